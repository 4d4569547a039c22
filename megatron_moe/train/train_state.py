"""Training state saved with a checkpoint in addition to weights and optimizer state, and its validation."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_moe.checkpoint.manifest import TRAIN_STATE, CorruptCheckpoint
from megatron_moe.config.model_differences import model_differences, recorded_model
from megatron_moe.config.optimizer import LRConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.flops import flops_per_step


@dataclass
class TrainState:
    """Progress of a run. Random streams need no state: each draw is keyed by seed, iteration and use (`rng.py`)."""

    iteration: int = 0
    """Completed iterations."""
    consumed_samples: int = 0
    """Training sequences read, over all ranks."""
    skipped_samples: int = 0
    """Consumed samples without a step (`--iterations-to-skip`); the learning rate schedule does not count them."""
    consumed_tokens: int = 0
    flops: float = 0.0
    """Model FLOPs so far, by the formula of `cost_model/flops.py`."""

    validation_loss: float | None = None
    """Mean loss over the validation sets after this iteration; None if not evaluated or not finite."""

    def advance(self, num_samples: int, plan: RunPlan) -> None:
        """Counts one step of `num_samples` sequences over all ranks."""
        self.iteration += 1
        self.validation_loss = None
        self.consumed_samples += num_samples
        self.consumed_tokens += num_samples * plan.data.seq_length
        self.flops += flops_per_step(plan.model, num_samples, plan.data.seq_length)

    def skip(self, num_samples: int) -> None:
        """Counts an iteration whose samples were skipped."""
        self.iteration += 1
        self.validation_loss = None
        self.consumed_samples += num_samples
        self.skipped_samples += num_samples

    def last_iteration(self, plan: RunPlan) -> int:
        """Iteration after which training ends; `--train-samples` count from `consumed_samples`, so that the batch size
        may change between starts."""
        if plan.loop.train_samples is None:
            return plan.loop.train_iters
        return self.iteration + plan.batch.steps_for(plan.loop.train_samples, self.consumed_samples)

    @property
    def trained_samples(self) -> int:
        """Consumed samples that were trained on."""
        return self.consumed_samples - self.skipped_samples

    def to_json(self, plan: RunPlan) -> dict[str, Any]:
        """The content of train_state.json."""
        return {
            "state": asdict(self),
            "seed": plan.loop.seed,
            "data_seed": plan.data.seed,
            "seq_length": plan.data.seq_length,
            "global_batch_size": plan.batch.size_at(self.consumed_samples),
            "model": recorded_model(plan.model),
            "training": _training(plan),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TrainState":
        return cls(**content["state"])


_CONTENT: Mapping[str, Any] = MappingProxyType(
    {"state": dict, "seed": int, "data_seed": int, "seq_length": int, "global_batch_size": int}
)
_OPTIONAL_CONTENT: Mapping[str, Any] = MappingProxyType(
    {"learning_rate": dict, "data": dict, "model": dict, "training": dict}
)
"""Keys that imported and converted checkpoints lack."""
_DATA: Mapping[str, Any] = MappingProxyType({"consumed_samples": int, "fingerprint": str})
_OPTIONAL_DATA: Mapping[str, Any] = MappingProxyType({"tokenizer": str, "end_of_document": int, "contents": dict})


def check_train_state(content: Mapping[str, Any], iteration: int) -> None:
    """Validates the content of train_state.json against the manifest's `iteration`.

    Raises:
        CorruptCheckpoint: a key is missing or unknown, a value has another type than `TrainState.to_json` writes, a
            counter is negative, or the iteration differs.
    """
    _check_table("the file", content, _CONTENT, _OPTIONAL_CONTENT)
    state = content["state"]
    _check_table("state", state, get_type_hints(TrainState), {})
    _check_table(
        "learning_rate", content.get("learning_rate", {}), {}, get_type_hints(LRConfig) | {"decoupled": list | None}
    )
    if "data" in content:
        _check_table("data", content["data"], _DATA, _OPTIONAL_DATA)
    counters = {**state, "seq_length": content["seq_length"], "global_batch_size": content["global_batch_size"]}
    negative = [name for name, value in counters.items() if name != "validation_loss" and value < 0]
    if negative:
        raise CorruptCheckpoint(f"{TRAIN_STATE}: {negative[0]!r} is {counters[negative[0]]!r:.80}, which is negative")
    if state["iteration"] != iteration:
        raise CorruptCheckpoint(
            f"{TRAIN_STATE}: its iteration is {state['iteration']!r:.80}, the manifest's is {iteration}"
        )


def _check_table(what: str, table: Mapping[str, Any], required: Mapping[str, Any], optional: Mapping[str, Any]) -> None:
    """Raises CorruptCheckpoint unless `table` has all `required` keys, only `required` and `optional` keys, and values
    of their types."""
    missing = sorted(required.keys() - table.keys())
    unknown = sorted(table.keys() - required.keys() - optional.keys())
    if missing or unknown:
        problems = [f"lacks the keys {missing}"] * bool(missing) + [f"has the unknown keys {unknown!s:.200}"] * bool(
            unknown
        )
        raise CorruptCheckpoint(f"{TRAIN_STATE}: {what} {' and '.join(problems)}")
    for name, value in table.items():
        if not _is_a(value, required.get(name, optional.get(name))):
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


def config_differences(saved: Mapping[str, Any], plan: RunPlan) -> tuple[list[str], list[str]]:
    """(model differences, training differences) between a checkpoint and the plan, one line per value.

    `saved`: content of train_state.json; older checkpoints lack the compared values.
    """
    found = model_differences(plan.model, saved["model"], "checkpoint") if "model" in saved else []
    then, now = saved.get("training", {}), _training(plan)
    changed = {name: (value, then[name]) for name, value in now.items() if name in then and value != then[name]}
    training = [difference.line for difference in found if difference.training]
    training += [f"{name}: {value}, checkpoint {old}" for name, (value, old) in changed.items()]
    return [difference.line for difference in found if not difference.training], training


def _training(plan: RunPlan) -> dict[str, Any]:
    """Training settings outside the model, by name; data and learning rate are saved separately."""
    optimizer, precision, data = plan.optimizer, plan.precision, plan.data
    return {
        "--global-batch-size": plan.batch.global_batch_size,
        "--adam-beta1": optimizer.adam_beta1,
        "--adam-beta2": optimizer.adam_beta2,
        "--adam-eps": optimizer.adam_eps,
        "--clip-grad": optimizer.clip_grad,
        "--apply-wd-to-qk-layernorm": optimizer.apply_wd_to_qk_layernorm,
        "--calculate-per-token-loss": plan.loop.calculate_per_token_loss,
        "--seed": plan.loop.seed,
        "--eod-mask-loss": data.eod_mask_loss,
        "--reset-position-ids": data.reset_position_ids,
        "--reset-attention-mask": data.reset_attention_mask,
        "type of gradients": precision.grads,
        "matrix products in low precision": precision.low_precision,
    }
