"""Run settings that a checkpoint records in addition to tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_moe.config.model import ModelConfig
from megatron_moe.config.training import BatchConfig, LoopConfig


@dataclass(frozen=True, kw_only=True)
class TrainStateConfig:
    """Settings recorded in train_state.json and needed to convert samples to iterations, tokens and FLOPs."""

    model: ModelConfig
    batch: BatchConfig
    loop: LoopConfig
    seq_length: int
    data_seed: int
    training: Mapping[str, Any]
    """Other training settings, by flag; a resumed run reports settings that changed."""
    run_yaml: str
    """Text of run.yaml."""
