"""Reads the YAML file of `--te-precision-config-file`: recipes of single modules, selected by name patterns.

The format is Megatron-LM's: `configs` maps names to recipes, and `matchers` maps names to patterns of module names. The
first enabled matcher whose pattern matches decides.

    configs:
      bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
    matchers:
      last_layers: {type: glob, enabled: true, pattern: "*layers.4[67].*", config: bf16}
"""

from collections.abc import Mapping
from typing import Any

from arguments.files import read_yaml
from megatron_moe.config.precision import ModulePrecision, low_precision_config, quantization_recipe
from megatron_moe.config.registry import QUANTIZATION_RECIPES

_KEYS = ("fp8_quantization_recipe", "fp4_quantization_recipe", "fp8_format", "override_quantized_autocast",
         "override_nonquantized_autocast")  # fmt: skip
_FORMATS = ("e4m3", "hybrid")


def read_module_precision(path: str, **options: Any) -> tuple[ModulePrecision, ...]:
    """Overrides in the order of the file. `options`: further fields of their `LowPrecisionConfig`s.

    Raises ValueError with a message for the user if the file cannot be read or has another format.
    """
    content = read_yaml(path)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("configs", "matchers")):
        raise ValueError("must contain the mappings configs and matchers")
    return tuple(
        _override(name, matcher, content["configs"], options)
        for name, matcher in content["matchers"].items()
        if not isinstance(matcher, dict) or matcher.get("enabled", False)
    )


def _override(name: str, matcher: Any, configs: Mapping[str, Any], options: Mapping[str, Any]) -> ModulePrecision:
    if not isinstance(matcher, dict) or matcher.get("type") != "glob" or not isinstance(matcher.get("pattern"), str):
        raise ValueError(f"matcher {name} needs type glob, a pattern and a config")
    config = configs.get(str(matcher.get("config")))
    if not isinstance(config, dict) or not isinstance(config.get("training_recipe"), dict):
        raise ValueError(f"matcher {name} needs a config with a training_recipe; {matcher.get('config')!r} has none")
    recipe = config["training_recipe"]
    if config.get("evaluation_recipe", recipe) != recipe:
        raise ValueError(f"config {matcher['config']} has another recipe in evaluation, which is not available")
    unknown = sorted(set(recipe) - set(_KEYS))
    if unknown:
        raise ValueError(f"config {matcher['config']} has unavailable keys: {', '.join(unknown)}")
    given = recipe.get("fp8_quantization_recipe") or recipe.get("fp4_quantization_recipe")
    family = "fp4" if recipe.get("fp4_quantization_recipe") else "fp8"
    known = [name for name in QUANTIZATION_RECIPES.names() if quantization_recipe(name).family == family]
    if (given is not None and given not in known) or recipe.get("fp8_format", "e4m3") not in _FORMATS:
        raise ValueError(f"config {matcher['config']} has an unavailable recipe or format")
    hybrid = recipe.get("fp8_format") == "hybrid"
    return ModulePrecision(
        pattern=matcher["pattern"],
        config=None if given is None else low_precision_config(given, hybrid=hybrid, **options),
        in_low_precision=bool(recipe.get("override_quantized_autocast", True)),
        in_params_dtype=bool(recipe.get("override_nonquantized_autocast", False)),
    )
