"""Run settings that are saved in a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_moe.config.data import DataConfig
from megatron_moe.config.imports import file_digests
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.model_differences import config_as_json
from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.training import BatchConfig, LoopConfig

_NOT_COMPARED = frozenset(
    (
        # run length, intervals, and reactions to failed checks
        *("train_iters", "train_samples", "eval_interval", "eval_iters", "exit_interval", "exit_duration_in_mins"),
        *("skip_train", "check_for_nan_in_loss_and_grad", "iterations_to_skip", "use_cpu_initialization"),
        *("manual_gc", "manual_gc_interval", "manual_gc_eval", "moe_routing_replay_path"),
        # compared with the learning-rate schedule instead
        *("decoupled_lr", "decoupled_min_lr"),
        # compared by the fingerprint of the samples instead
        *("train_data_path", "valid_data_path", "test_data_path", "data_path", "split", "mock_data", "mock_documents"),
        *("data_cache_path", "seq_length", "tokenizer", "vocab_size", "mmap_bin_files", "num_workers"),
        *("drop_last_partial_validation", "multiple_validation_sets", "full_validation", "dataloader_type"),
        "mid_level_dataset_surplus",
        # without effect on results
        *("offload", "overlap_optimizer_step", "deterministic_mode", "store_param_remainders", "low_precision_params"),
        *("activation_modules", "emulate"),
    )
)
"""Config fields that `training_settings` leaves out."""


@dataclass(frozen=True, kw_only=True)
class TrainStateConfig:
    """Settings saved in a checkpoint and used to convert samples to iterations, tokens and FLOPs."""

    model: ModelConfig
    batch: BatchConfig
    loop: LoopConfig
    seq_length: int
    data_seed: int
    training: Mapping[str, Any]
    """Result of `training_settings`. A resumed run reports values that differ from the checkpoint's."""
    run_yaml: str
    """Text of run.yaml, which lists every flag value and its origin."""


def training_settings(
    optimizer: OptimizerConfig,
    batch: BatchConfig,
    loop: LoopConfig,
    data: DataConfig,
    precision: PrecisionConfig,
    imports: Sequence[str] = (),
) -> dict[str, Any]:
    """Settings that change the numbers of a step, as JSON values: one entry per flag, such as `--adam-beta1`, number
    formats as "precision", and the names and contents of imported files. New config fields are included, unless
    `_NOT_COMPARED` names them."""
    flags = {
        "--" + field.name.replace("_", "-"): config_as_json(getattr(config, field.name))
        # `loop.seed` replaces `data.seed`, which the fingerprint of the samples covers
        for config in (data, loop, batch, optimizer)
        for field in fields(config)
        if field.name not in _NOT_COMPARED
    }
    files = [f"{Path(name).name}, sha256 {digest}" for name, digest in file_digests(imports).items()]
    return {**flags, "precision": _without_ignored(config_as_json(precision)), "--import": files}


def _without_ignored(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ignored(each) for name, each in value.items() if name not in _NOT_COMPARED}
    return [_without_ignored(each) for each in value] if isinstance(value, list) else value
