"""The RunPlan: the complete, resolved configuration of a run, built by `arguments/resolve.py`."""

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
from megatron_moe.config.parallel import DataParallelConfig, Launch, ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.resilience import ResilienceConfig
from megatron_moe.config.training import BatchConfig, LoopConfig
from megatron_moe.pipeline.layout import PipelineLayout, even_layout
from megatron_moe.pipeline.schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Kernel backends and compilation."""

    kernel_backend: str = "auto"
    """Kernel backend of all ops (`--kernel-backend`)."""
    kernel_per_op: tuple[tuple[str, str], ...] = ()
    """Pairs (op, backend) that override `kernel_backend` (`--kernel-per-op`)."""
    kernel_cache_dir: Path | None = None
    """Directory of compiled kernels, with a subdirectory per node; None: the user's cache directory."""
    compile_first: bool = False
    """Compiles all kernels before the first step (GPU only)."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Configuration of a run, resolved from its flags."""

    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    lr_schedule: LRConfig
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
    cuda_graphs: CudaGraphConfig = CudaGraphConfig()
    profile: ProfileConfig = ProfileConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables to set before torch is imported, as (name, value)."""
    environment_reasons: tuple[str, ...] = ()
    """Reason for each entry of `environment`."""
    resolved_yaml: str = ""
    """Text of run.yaml: every value with its origin."""
    command_line: str = ""
    notes: tuple[str, ...] = ()
    """Notes on flags, one line each: flags without effect, aliases, duplicates."""
    emulation: EmulationConfig | None = None
    """Runs a memory emulation instead of training; None: training."""
    missing_inputs: tuple[str, ...] = ()
    """Dry run only: missing or invalid inputs, without which the run cannot start."""
    blockers: tuple[str, ...] = ()
    """Dry run only: unavailable features that training would need."""
    unknown_layers: tuple[str, ...] = ()
    """Dry run only: flags that request unsupported layers, which `model` does not contain."""

    @property
    def layout(self) -> PipelineLayout:
        """Layers of every pipeline stage."""
        if self.pipeline.layout is not None:
            return self.pipeline.layout
        vpp = self.parallel.virtual_stages
        return even_layout(len(self.model.layers), pp=self.parallel.pp, vpp=vpp, num_mtp=self.model.num_mtp)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step at the full global batch size."""
        return self.batch.global_batch_size // (self.batch.micro_batch_size * self.parallel.dp)

    def schedule(self, num_microbatches: int, *, forward_only: bool = False) -> ScheduleConfig:
        """See `PipelineConfig.schedule`."""
        return self.pipeline.schedule(self.layout, num_microbatches, forward_only=forward_only)
