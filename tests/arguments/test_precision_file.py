"""--te-precision-config-file: patterns, recipes, error messages, and the modules whose recipe it changes."""

from dataclasses import replace
from pathlib import Path

import pytest

from arguments.precision_file import read_module_precision
from megatron_moe.config.precision import low_precision_config
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import tiny
from tests.helpers.command_lines import plan_of, texts_of
from tests.helpers.pipelines import make_trainer

FILE = Path(__file__).parents[1] / "data_files" / "te_precision.yaml"
CONFIGS = FILE.read_text().partition("matchers:")[0]
ONE = """
configs: {{a: {{training_recipe: {}}}}}
matchers: {{a: {{type: glob, enabled: true, pattern: x, config: a}}}}
"""


def write(folder: Path, text: str | None) -> str:
    path = folder / "precision.yaml"
    if text is not None:
        path.write_text(text)
    return str(path)


def test_the_first_matching_pattern_selects_the_recipe() -> None:
    overrides = read_module_precision(str(FILE), emulate=True)
    assert [override.pattern for override in overrides] == ["*.linear_proj", "*.layers.1.*", "*.experts.linear_fc2"]
    plan = tiny.plan()
    low = low_precision_config("blockwise", layers_at_end=1, emulate=True)
    precision = replace(plan.precision, low_precision=low, module_precision=overrides)
    model = make_trainer(replace(plan, precision=precision), ParallelContext.single()).model
    found = {
        name: module.quantizer._config.name
        for name, module in model.named_modules()
        if getattr(module, "quantizer", None) is not None
    }
    blockwise, tensorwise = "blockwise e4m3", "tensorwise hybrid"
    assert found == {
        "decoder.layers.0.self_attention.linear_qkv": blockwise,
        "decoder.layers.0.mlp.linear_fc1": blockwise,
        "decoder.layers.0.mlp.linear_fc2": blockwise,
        "decoder.layers.1.self_attention.linear_qkv": blockwise,
        "decoder.layers.1.mlp.experts.linear_fc1": blockwise,
        "decoder.layers.1.mlp.experts.linear_fc2": blockwise,
        "decoder.layers.2.mlp.experts.linear_fc2": tensorwise,  # in the last layer, only the override is quantised
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must contain the mappings configs and matchers"),
        ("a: {", "is not YAML in line 1: "),
        (None, "cannot be read: No such file or directory"),
        (CONFIGS + "matchers: {a: {type: regex, enabled: true, pattern: x, config: bf16}}", "needs type glob"),
        (CONFIGS + "matchers: {a: {type: glob, enabled: true, pattern: x, config: x}}", "'x' has none"),
        (ONE.format("{fp8_param: true}"), "unavailable keys: fp8_param"),
        (ONE.format("{fp8_quantization_recipe: custom}"), "unavailable recipe or format"),
        (ONE.format("{}, evaluation_recipe: {fp8_format: e4m3}"), "another recipe in evaluation"),
    ],
)
def test_other_files_are_rejected(text: str | None, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        read_module_precision(path)
    (found,) = texts_of(f"--bf16 --fp8-format e4m3 --fp8-recipe blockwise --te-precision-config-file {path}")
    assert message in found and path in found


def test_other_recipes_are_read_with_emulation() -> None:
    line = f"--bf16 --fp8-format e4m3 --fp8-recipe blockwise --te-precision-config-file {FILE} --emulate-low-precision"
    assert len(plan_of(line).precision.module_precision) == 3


def test_options_of_the_run_apply_to_the_modules_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, ONE.format("{fp8_quantization_recipe: delayed}"))
    line = "--bf16 --fp8-format e4m3 --fp8-recipe delayed --fp8-margin 1 --fp8-amax-history-len 16"
    more = "--fp8-amax-compute-algo max --low-precision-activation-modules mlp --emulate-low-precision"
    precision = plan_of(f"{line} {more} --te-precision-config-file {path}").precision
    assert [each.config for each in precision.module_precision] == [precision.low_precision]
