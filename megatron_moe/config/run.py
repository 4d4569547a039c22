"""Complete configuration of a run, which `arguments/resolve.py` builds from the flags."""

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
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig, ProcessInfo
from megatron_moe.config.pipeline import PipelineConfig, ScheduleConfig
from megatron_moe.config.pipeline_layout import PipelineLayout, even_layout
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.resilience import ResilienceConfig
from megatron_moe.config.training import BatchConfig, LoopConfig


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Kernel backends and kernel compilation."""

    kernel_backend: str = "auto"
    """Kernel backend of ops that `kernel_per_op` does not list (`--kernel-backend`)."""
    kernel_per_op: tuple[tuple[str, str], ...] = ()
    """Pairs (op, backend) that override `kernel_backend` (`--kernel-per-op`)."""
    kernel_cache_dir: Path | None = None
    """Directory in which every node has a folder of compiled kernels; None means a folder in the user's cache
    directory."""
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
    process: ProcessInfo
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
    """Why each variable of `environment` is set, in the same order."""
    resolved_yaml: str = ""
    """Text of run.yaml, which lists every flag value and its origin."""
    command_line: str = ""
    notes: tuple[str, ...] = ()
    """Notes for the user, one line each, such as flags without effect, replaced transports and hints on speed."""
    emulation: EmulationConfig | None = None
    """Options of a memory emulation, which runs instead of training; None if the run trains."""
    missing_inputs: tuple[str, ...] = ()
    """Inputs that are missing or invalid, so that the run cannot start; filled in dry runs only."""
    blockers: tuple[str, ...] = ()
    """Requested features that are not available, so that the run cannot train; filled in dry runs only."""
    imports: tuple[str, ...] = ()
    """Python files that register components of this run (`--import`)."""
    unknown_layers: tuple[str, ...] = ()
    """Flags that request unsupported layers, which are missing in `model`; filled in dry runs only."""

    @property
    def layout(self) -> PipelineLayout:
        """Assignment of layers to pipeline stages."""
        if self.pipeline.layout is not None:
            return self.pipeline.layout
        vpp = self.parallel.virtual_stages
        return even_layout(len(self.model.layers), pp=self.parallel.pp, vpp=vpp, num_mtp=self.model.num_mtp)

    @property
    def warning(self) -> str:
        """Sentence for the user if the run is a benchmark that does not train its router; else empty."""
        routers = [moe.router for moe in self.model.moe_configs]
        forced = next((router.forced_routing_flag for router in routers if router.forced_routing_flag), "")
        return f"benchmark: {forced} replaces the router by random logits, so the model learns no routing" * bool(
            forced
        )

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and data-parallel rank, at the full global batch size (after its ramp-up)."""
        return self.batch.global_batch_size // (self.batch.micro_batch_size * self.parallel.dp)

    def pipeline_schedule(self, num_microbatches: int, *, forward_only: bool = False) -> ScheduleConfig:
        """Parameters of the pipeline schedule of one training step or, if `forward_only`, of an evaluation."""
        return self.pipeline.pipeline_schedule(self.layout, num_microbatches, forward_only=forward_only)
