"""Training state saved with a checkpoint in addition to weights and optimizer state, and its validation."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_moe.checkpoint.manifest import TRAIN_STATE, CorruptCheckpoint
from megatron_moe.config.model_differences import compare_recorded, model_differences, recorded_model
from megatron_moe.config.optimizer import LRConfig
from megatron_moe.config.train_state import TrainStateConfig
from megatron_moe.config.training import StepCounts
from megatron_moe.cost_model.flops import flops_per_step


@dataclass
class TrainState:
    """Progress of a run. Random streams need no state: each draw is keyed by seed, iteration and purpose (`rng.py`)."""

    iteration: int = 0
    """Number of completed iterations, skipped ones included."""
    consumed_samples: int = 0
    """Training sequences read, over all ranks."""
    skipped_samples: int = 0
    """Consumed samples that were not trained on (`--iterations-to-skip`); ignored by the learning rate schedule."""
    consumed_tokens: int = 0
    flops: float = 0.0
    """Model FLOPs so far, by the formula of `cost_model/flops.py`."""

    validation_loss: float | None = None
    """Mean loss over the validation sets after this iteration; None if not evaluated or not finite."""

    def advance(self, counts: StepCounts, config: TrainStateConfig) -> None:
        """Adds a completed step, which processed `counts` samples and tokens, to all counters."""
        self.iteration += 1
        self.validation_loss = None
        self.consumed_samples += counts.num_samples
        self.consumed_tokens += counts.num_tokens
        self.flops += flops_per_step(config.model, counts.num_tokens / config.seq_length, config.seq_length)

    def skip(self, num_samples: int) -> None:
        """Counts an iteration whose samples were skipped."""
        self.iteration += 1
        self.validation_loss = None
        self.consumed_samples += num_samples
        self.skipped_samples += num_samples

    def last_iteration(self, config: TrainStateConfig) -> int:
        """Iteration after which training ends. With `--train-samples`, the number of iterations left is computed from
        the samples left, so that the batch size may change between launches."""
        if config.loop.train_samples is None:
            return config.loop.train_iters
        return self.iteration + config.batch.steps_for(config.loop.train_samples, self.consumed_samples)

    @property
    def trained_samples(self) -> int:
        """Number of consumed samples that were trained on, i.e. not skipped."""
        return self.consumed_samples - self.skipped_samples

    def to_json(self, config: TrainStateConfig) -> dict[str, Any]:
        """Returns the content of train_state.json."""
        return {
            "state": asdict(self),
            "seed": config.loop.seed,
            "data_seed": config.data_seed,
            "seq_length": config.seq_length,
            "global_batch_size": config.batch.size_at(self.consumed_samples),
            "model": recorded_model(config.model),
            "training": dict(config.training),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TrainState":
        return cls(**content["state"])


_TABLES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = MappingProxyType(
    {
        "the file": (
            {"state": dict, "seed": int, "data_seed": int, "seq_length": int, "global_batch_size": int},
            {"learning_rate": dict, "data": dict, "model": dict, "training": dict},
        ),
        "state": (get_type_hints(TrainState), {}),
        "learning_rate": (
            {"max_lr": float, "decay_samples": int},
            get_type_hints(LRConfig) | {"decoupled": list | None},
        ),
        "data": (
            {"consumed_samples": int, "fingerprint": str},
            {"tokenizer": str, "end_of_document": int, "contents": dict},
        ),
    }
)
"""Maps each JSON object of the file to (types of required keys, types of optional keys). Imported or older checkpoints
lack optional keys."""


def check_train_state(content: Mapping[str, Any], iteration: int) -> None:
    """Validates the content of train_state.json against the manifest's `iteration`.

    Raises:
        CorruptCheckpoint: a key is missing or unknown, a value has another type than `TrainState.to_json` writes, a
            counter is negative, values contradict each other, or the iteration differs.
    """
    _check_table("the file", content)
    for name in ("state", "learning_rate", "data"):
        if name in content:
            _check_table(name, content[name])
    for wrong, sentence in _contradictions(content):
        if wrong:
            raise CorruptCheckpoint(f"{TRAIN_STATE}: {sentence}")
    state = content["state"]
    counters = {**state, "seq_length": content["seq_length"], "global_batch_size": content["global_batch_size"]}
    negative = [name for name, value in counters.items() if name != "validation_loss" and value < 0]
    if negative:
        raise CorruptCheckpoint(f"{TRAIN_STATE}: {negative[0]!r} is {counters[negative[0]]!r:.80}, which is negative")
    if state["iteration"] != iteration:
        raise CorruptCheckpoint(
            f"{TRAIN_STATE}: its iteration is {state['iteration']!r:.80}, the manifest's is {iteration}"
        )


def _contradictions(content: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yields checks of values that depend on each other, as (fails, message)."""
    data, schedule, model = (content.get(name, {}) for name in ("data", "learning_rate", "model"))
    yield (
        "data" in content and "learning_rate" not in content,
        "the file lacks the key 'learning_rate' of a trained run",
    )
    yield "tokenizer" in data and "end_of_document" not in data, "data has a tokenizer, but no 'end_of_document'"
    rates = schedule.get("decoupled") or [0, 0]
    yield (
        len(rates) != 2 or not all(_is_a(rate, float) for rate in rates),
        f"'decoupled' is {rates!r:.80}, not two rates",
    )
    endless = schedule.get("style") == "WSD" and schedule.get("wsd_decay_samples") is None
    yield endless, "learning_rate has style 'WSD', but no 'wsd_decay_samples'"
    if "model" in content:
        layers, kinds = model.get("layers"), model.get("kinds")
        known = isinstance(layers, list) and isinstance(kinds, list)
        known = known and all(isinstance(kind, dict) for kind in kinds)
        known = known and all(type(kind) is int and 0 <= kind < len(kinds) for kind in layers)
        yield not known, "'layers' of model are not indices into its 'kinds'"
        yield not _is_recorded(model), "a part of 'model' has no 'type'"


def _is_recorded(value: Any) -> bool:
    """True if each JSON object in `value` has a type, as `config_as_json` writes it."""
    if isinstance(value, dict):
        return isinstance(value.get("type"), str) and all(map(_is_recorded, value.values()))
    return not isinstance(value, list) or all(map(_is_recorded, value))


def _check_table(what: str, table: Mapping[str, Any]) -> None:
    """Raises CorruptCheckpoint if `table` lacks a required key, has an unknown key or has a value of a wrong type."""
    required, optional = _TABLES[what]
    types = {**required, **optional}
    missing, unknown = sorted(required.keys() - table.keys()), sorted(table.keys() - types.keys())
    if missing:
        raise CorruptCheckpoint(f"{TRAIN_STATE}: {what} lacks the keys {missing}")
    if unknown:
        raise CorruptCheckpoint(f"{TRAIN_STATE}: {what} has the unknown keys {unknown!s:.200}")
    for name, value in table.items():
        if not _is_a(value, types[name]):
            raise CorruptCheckpoint(f"{TRAIN_STATE}: {name!r} of {what} is {value!r:.80}, a value of another type")


def _is_a(value: Any, kind: Any) -> bool:
    """True if a JSON value has the type `kind`: a class, a Literal or a union of them."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if isinstance(kind, UnionType):
        return any(_is_a(value, each) for each in get_args(kind))
    if kind is float:
        return type(value) is int or type(value) is float and math.isfinite(value)
    return type(value) is kind


def config_differences(saved: Mapping[str, Any], config: TrainStateConfig) -> tuple[list[str], list[str]]:
    """Returns (model differences, training differences) between a checkpoint and this run, one line per differing
    value.

    `saved`: content of train_state.json. Values that it lacks, as in older checkpoints, are not compared.
    """
    found = model_differences(config.model, saved["model"], "checkpoint") if "model" in saved else []
    training = [difference.line for difference in found if difference.training]
    for name, value in config.training.items():
        before = saved.get("training", {}).get(name, value)
        training += [difference.line for difference in compare_recorded((name,), value, before, "checkpoint")]
    return [difference.line for difference in found if not difference.training], training
