"""Derives flags from a Hugging Face config.json (`--from-hf-config`) or compares them (`--check-against-hf`)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from arguments import derive
from arguments.checks.run import MODEL_RULES, broken_rules, missing_flags
from arguments.errors import FlagErrors, Problem
from arguments.flag import REQUIRED
from arguments.flags import Flags, Registry, flag_values
from arguments.parser import Given, Settings, merge_settings
from arguments.resolve_model import model_config
from arguments.values import LayerPattern, words_of
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf, with_latent_norms_of
from megatron_moe.checkpoint.huggingface.config_write import NoPublishedFamily, generated_config
from megatron_moe.config.component import Component
from megatron_moe.config.exit_codes import CheckpointProblem, ExitCode, RunError
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.model_differences import config_differences
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.text import aligned_columns

_MAX_PERIOD = 8
"""Largest interval n (every n-th layer) that `_pattern` tries; other patterns are written as lists."""


def model_flags(model: ModelConfig) -> dict[str, Any]:
    """Returns flag name -> value for the flags that describe a model, most of which its components state."""
    first, depth = model.layers[0], model.mtp and model.mtp.layer
    found = {
        "num_layers": len(model.layers),
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "hidden_dropout": first.hidden_dropout,
        "init_method_std": model.init.std,
        "mtp_num_layers": model.mtp.num_layers if model.mtp else None,
        "position_embedding_type": "learned_absolute" if model.position_embedding == "learned_absolute" else "none",
        **first.norm.as_flags(),
        **first.residual.as_flags(),
    }
    for kind in ("mixer", "feed_forward"):
        if depth:
            own: Component = getattr(depth, kind)
            found |= {**_of_layers([own.as_flags()]), f"mtp_{kind}": own.registered_as}
        found |= _component_flags(kind, [getattr(layer, kind) for layer in model.layers])
        if depth:
            of_depth = {name: value for name, value in own.as_flags().items() if name in derive.LAYER_NUMBERS}
            found |= {name: (*found[name], value) for name, value in of_depth.items() if name in found}
    return found


def _component_flags(kind: str, components: Sequence[Component]) -> dict[str, Any]:
    """Flags of the mixers or of the feed-forward modules of all layers. `kind`: the flag that selects them by name."""
    names = tuple(component.registered_as for component in components)
    selections = [component.selecting_flags for component in components]
    if all(selections) and not _contradict(selections):
        return _of_layers([{**each.as_flags(), **each.selecting_flags} for each in components])
    period = next(n for n in range(1, len(names) + 1) if derive.repeat_names(names[:n], len(names)) == names)
    return {**_of_layers([component.as_flags() for component in components]), kind: names[:period]}


def _contradict(selections: Sequence[Mapping[str, Any]]) -> bool:
    """Whether layers need different values of a flag that applies to all layers."""
    needed = {item for each in selections for item in each.items() if item[0] not in derive.LAYER_PATTERNS}
    return len(needed) > len(dict(needed))


def _of_layers(stated: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the flags that the components of all layers state: the first value that is not None, a pattern, the number
    of layers for which it is True, or the number of every layer, which is 0 for layers without one."""
    found: dict[str, Any] = {}
    choices: dict[str, dict[int, bool]] = {}
    for layer, flags in enumerate(stated):
        for name, value in flags.items():
            if name in derive.LAYER_PATTERNS:
                choices.setdefault(name, {})[layer] = value
            elif name in derive.LAYER_NUMBERS:
                found[name] = tuple(each.get(name, 0) for each in stated)
            elif name in derive.LAYER_COUNTS:
                found[name] = found.get(name, 0) + bool(value)
            elif found.get(name) is None:
                found[name] = value
    return found | {name: _pattern(name, len(stated), selected) for name, selected in choices.items()}


def _pattern(name: str, num_layers: int, selected: Mapping[int, bool]) -> LayerPattern | None:
    """Value of a flag that selects layers: its default or the smallest interval if that agrees with `selected`, else a
    tuple of 0s and 1s. Layers that `selected` does not contain may be selected or not."""
    default = cast(LayerPattern | None, Registry.declared().flags[name].default)
    if not any(selected.values()):
        return default
    entries = [int(selected.get(layer, True)) for layer in range(num_layers)]
    lists: tuple[LayerPattern, ...] = tuple(entries), tuple(1 - entry for entry in entries)
    values: list[LayerPattern | None] = [default, *range(1, _MAX_PERIOD + 1), *lists]
    for value in values:
        selection = derive.LAYER_PATTERNS[name](num_layers, value)
        if all(selection[layer] == is_selected for layer, is_selected in selected.items()):
            return value
    raise AssertionError(f"no value of {name} selects {selected}")


def rebuilt_from_flags(model: ModelConfig) -> ModelConfig:
    """Rebuilds a model from its `model_flags`. Properties that no flag describes are reset to their defaults."""
    values = model_flags(model)
    return model_config(_flags(values), values["vocab_size"])


def _flags(values: Mapping[str, Any]) -> Flags:
    """Returns all flags: `values`, defaults for the other flags, and 1 for required flags that are not in `values`."""
    flags = Registry.declared().flags.values()
    defaults = {flag.name: 1 if flag.default is REQUIRED else flag.default for flag in flags}
    return flag_values({**defaults, **values})


_MODEL_GROUPS = ("model", "attention", "moe")
TRAINING_FLAGS = (
    *("attention_dropout", "hidden_dropout", "init_method_std"),
    *("max_position_embeddings", "mtp_num_layers", "mtp_mixer", "mtp_feed_forward", "vocab_size"),
)
"""Flags in which a run may differ from the published model and still use its published layer weights."""
_HEADINGS = ("flag", "this run", "published")


class AnotherModel(RunError):
    """The flags and the Hugging Face folder describe different models; `str()` is a table of the differences."""

    code = ExitCode.CONFIG


def published_flags(folder: str, registry: Registry) -> tuple[list[Given], list[str]]:
    """Returns the flags that describe the model in a Hugging Face folder, and notes on properties without a flag.

    An epsilon of MLA's latent norms that differs from that of the other norms is only noted, because published weights
    work with both.

    Raises FlagErrors if config.json cannot be read, describes a model that cannot be built, or has any other property
    that no flag describes.
    """
    path = _config_path(folder)
    published = _published(path)
    layer = []
    for name, value in model_flags(published).items():
        flag = registry.flags[name]
        if value != flag.default:
            words = None if value is None else tuple(words_of(flag.type, value))
            layer.append(Given(flag.option, words, str(path)))
    expressed = rebuilt_from_flags(published)
    remedy = "correct config.json, or give the model flags without --from-hf-config"
    unsupported = config_differences(expressed, with_latent_norms_of(expressed, published))
    if unsupported:
        raise FlagErrors([Problem(what=f"{path}: no flag describes its {line}", remedy=remedy) for line in unsupported])
    return layer, [f"{path}: no flag for: {line}" for line in config_differences(expressed, published)]


def model_with_flag(layer: Sequence[Given], more: Given | None, registry: Registry) -> ModelConfig | None:
    """Model that the flags `layer` (from `published_flags`) describe, with the flag `more` added unless it is None;
    None if the flags describe no valid model."""
    settings = merge_settings(registry, [layer, [more] if more else []])
    flags = _flags({name: setting.value for name, setting in settings.values.items()})
    try:
        return None if settings.problems else model_config(flags, flags.vocab_size or 1)
    except (AssertionError, ValueError, ArithmeticError, TypeError):
        return None


def exported_config(model: ModelConfig, vocab_size: int, registry: Registry) -> dict[str, Any]:
    """Contents of a config.json that describes the model. Raises FlagErrors that name the flags if there is none."""
    try:
        return generated_config(model, vocab_size)
    except NoPublishedFamily as problem:
        rows = [] if problem.nearest is None else _differing_flags(registry, model, problem.nearest)
        others = [row for row in rows if row[0] not in _training_options(registry)]
        table = "\n" + _table(others) if others else ""
        remedy = "an export needs a model that transformers can load, or --hf-config (--save-hf-config) with its code"
        raise FlagErrors.of(f"{problem}{table}", remedy) from None


def differences_from_export(model: ModelConfig, folder: Path) -> list[str]:
    """Differences of the model from the config.json in `folder`, which exports copy. Raises FlagErrors if it cannot be
    read or describes no model."""
    published = _published(folder / "config.json", mtp=model.mtp is not None)
    found = config_differences(model, with_latent_norms_of(model, published))
    if published.vocab_size > model.vocab_size:
        found.append(f"vocabulary: {model.vocab_size} rows, published {published.vocab_size}")
    return found


def _training_options(registry: Registry) -> set[str]:
    return {registry.flags[name].option for name in TRAINING_FLAGS}


def compared_with(folder: str, settings: Settings) -> str:
    """Compares the model of the flags with the model of a Hugging Face folder; returns a message if they are equal.

    Raises AnotherModel with a table of the differences, or FlagErrors if config.json or the flags are invalid.
    """
    path = _config_path(folder)
    published = _published(path)
    own = _model_of(settings, published.vocab_size)
    lines = config_differences(own, published)
    rows = _differing_flags(settings.registry, own, published)
    if not lines:
        training = _training_options(settings.registry)
        others = _table([row for row in rows if row[0] in training])
        return f"The flags describe the model of {path}." + (f" Choices of this run:\n{others}" if others else "")
    count = f"1 difference from {path}:" if len(lines) == 1 else f"{len(lines)} differences from {path}:"
    parts = [count, *(f"  {line}" for line in lines)]
    if rows:
        parts += ["", "In flags:", _table(rows)]
    raise AnotherModel("\n".join(parts))


def _config_path(folder: str) -> Path:
    path = Path(folder)
    return path if path.suffix == ".json" else path / "config.json"


def _published(path: Path, *, mtp: bool = True) -> ModelConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise FlagErrors.of(what, "give the folder that contains config.json") from None
    except (ValueError, RecursionError) as error:
        raise FlagErrors.of(f"{path} is not JSON: {error}", "download the file again") from None
    if not isinstance(values, dict):
        raise FlagErrors.of(f"{path} is not a JSON object", "download the file again")
    try:
        return model_config_from_hf(values, mtp=mtp)
    except CheckpointProblem as error:
        # most messages name the file themselves
        raise FlagErrors.of(f"{path}: {str(error).removeprefix(f'{path.name} ')}") from None


def _model_of(settings: Settings, vocab_size: int) -> ModelConfig:
    """Model described by the model flags in `settings`; `vocab_size` is used if `--vocab-size` is not given."""
    missing = [problem for problem in missing_flags(settings, _MODEL_GROUPS) if "--seq-length" not in problem.what]
    problems = [*settings.problems, *missing, *broken_rules(settings, ProcessInfo(), MODEL_RULES, _MODEL_GROUPS)]
    if problems:
        raise FlagErrors(problems)
    flags = _flags({name: setting.value for name, setting in settings.values.items()})
    return model_config(flags, flags.vocab_size or vocab_size)


def _differing_flags(registry: Registry, own: ModelConfig, published: ModelConfig) -> list[tuple[str, str, str]]:
    own_by_name, published_by_name = model_flags(own), model_flags(published)
    rows = []
    for name in {**published_by_name, **own_by_name}:
        flag = registry.flags[name]
        run, published_value = (flag.text(side.get(name, flag.default)) for side in (own_by_name, published_by_name))
        if run != published_value:
            rows.append((flag.option, run, published_value))
    return rows


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    return "\n".join(f"  {line}" for line in aligned_columns([_HEADINGS, *rows]))
