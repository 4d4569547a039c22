"""The RunPlan: everything a run was asked to do, resolved and frozen. Made only in `arguments/resolve.py`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_moe.specs.emulation import EmulationSpec
from megatron_moe.specs.memory import GraphSpec, MemorySpec
from megatron_moe.specs.model import ModelSpec
from megatron_moe.specs.parallel import DataParallelSpec, Launch, ParallelSpec
from megatron_moe.specs.pipeline.layout import PipelineLayout, even_layout
from megatron_moe.specs.pipeline.schedule import ScheduleSpec
from megatron_moe.specs.pipeline.spec import PipelineSpec
from megatron_moe.specs.precision import PrecisionSpec
from megatron_moe.specs.train import (
    BatchSpec,
    CheckpointSpec,
    DataSpec,
    LoggingSpec,
    LoopSpec,
    LRSpec,
    OptimizerSpec,
    ProfileSpec,
    ResilienceSpec,
)


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
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

    model: ModelSpec
    parallel: ParallelSpec
    precision: PrecisionSpec
    optimizer: OptimizerSpec
    lr: LRSpec
    batch: BatchSpec
    data: DataSpec
    loop: LoopSpec
    checkpoint: CheckpointSpec
    logging: LoggingSpec
    kernels: KernelSpec
    launch: Launch
    data_parallel: DataParallelSpec = DataParallelSpec()
    pipeline: PipelineSpec = PipelineSpec()
    memory: MemorySpec = MemorySpec()
    graphs: GraphSpec = GraphSpec()
    profile: ProfileSpec = ProfileSpec()
    resilience: ResilienceSpec = ResilienceSpec()
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
    emulation: EmulationSpec | None = None
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

    def schedule(self, num_microbatches: int, *, forward_only: bool = False) -> ScheduleSpec:
        """The order of work of one step, or of an evaluation."""
        return ScheduleSpec(
            num_microbatches=num_microbatches,
            pp=self.layout.pp,
            vpp=self.layout.vpp,
            group_size=self.pipeline.group_size,
            overlap=self.pipeline.overlap,
            split_backward=self.pipeline.split_backward,
            forward_only=forward_only,
        )
