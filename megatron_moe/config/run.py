"""The RunPlan: everything a run was asked to do, resolved and frozen. Made only in `arguments/resolve.py`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.data import DataConfig
from megatron_moe.config.emulation import EmulationConfig
from megatron_moe.config.logging import LoggingConfig, ProfileConfig
from megatron_moe.config.memory import CudaGraphConfig, MemoryConfig
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.optimizer import LRConfig, OptimizerConfig
from megatron_moe.config.parallel import (
    DataParallelConfig,
    Launch,
    ParallelConfig,
)
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.resilience import ResilienceConfig
from megatron_moe.config.training import BatchConfig, LoopConfig
from megatron_moe.pipeline.layout import PipelineLayout, even_layout
from megatron_moe.pipeline.schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Which backend computes each op."""

    backend: str = "auto"
    per_op: tuple[tuple[str, str], ...] = ()
    """(op, backend) wishes that override `backend`."""
    cache_dir: Path | None = None
    """Where compiled kernels are kept, a folder per node in it; None: in the user's cache."""
    compile_first: bool = False
    """Before the run begins, on a GPU."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One command line, resolved. `arguments` keeps the flags; this keeps what they mean."""

    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    lr: LRConfig
    batch: BatchConfig
    data: DataConfig
    loop: LoopConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    kernels: KernelConfig
    launch: Launch
    data_parallel: DataParallelConfig = DataParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    memory: MemoryConfig = MemoryConfig()
    graphs: CudaGraphConfig = CudaGraphConfig()
    profile: ProfileConfig = ProfileConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables to set before torch is imported: asked for by files, or needed by flags."""
    environment_reasons: tuple[str, ...] = ()
    """Why, one for each of them."""
    resolved_yaml: str = ""
    """Text of run.yaml: every value with its origin."""
    command_line: str = ""
    notes: tuple[str, ...] = ()
    """One line each: flags accepted without effect, aliases, flags given twice."""
    emulation: EmulationConfig | None = None
    """Not a run, but one rank of it whose memory is watched; None: a run."""
    missing_inputs: tuple[str, ...] = ()
    """Inputs that are missing or wrong, so that the plan would not start. Only the plan of a dry run has any."""
    blockers: tuple[str, ...] = ()
    """Features that this program lacks to train the plan. Only the plan of a dry run has any."""
    unknown_layers: tuple[str, ...] = ()
    """Flags of layers that cannot be built: `model` lacks them. Only the plan of a dry run has any."""

    @property
    def layout(self) -> PipelineLayout:
        """Which layers every pipeline stage holds."""
        if self.pipeline.layout is not None:
            return self.pipeline.layout
        return even_layout(
            len(self.model.layers),
            pp=self.parallel.pp,
            vpp=self.parallel.virtual_stages,
            num_mtp=self.model.mtp.num_layers if self.model.mtp else 0,
        )

    def schedule(self, num_microbatches: int, *, forward_only: bool = False) -> ScheduleConfig:
        """See `PipelineConfig.schedule`."""
        return self.pipeline.schedule(self.layout, num_microbatches, forward_only=forward_only)
