"""Run settings that are saved in a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_moe.config.model import ModelConfig
from megatron_moe.config.training import BatchConfig, LoopConfig


@dataclass(frozen=True, kw_only=True)
class TrainStateConfig:
    """Settings saved in a checkpoint and used to convert samples to iterations, tokens and FLOPs."""

    model: ModelConfig
    batch: BatchConfig
    loop: LoopConfig
    seq_length: int
    data_seed: int
    training: Mapping[str, Any]
    """Further training settings: name -> value. A resumed run reports values that differ from the checkpoint's."""
    run_yaml: str
    """Text of run.yaml, which lists every flag value and its origin."""
