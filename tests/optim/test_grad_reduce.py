"""Overlapped gradient reduction: complete buckets are reduced in the same order on all ranks, with identical bits."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.memory import RecomputeConfig
from megatron_moe.config.model import ModelConfig, MTPConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.data.batch import MicroBatch
from megatron_moe.kernels.autograd import linear
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.gpt import GPT, LossOutput, training_objective
from megatron_moe.model.init import init_parameters
from megatron_moe.optim.grad_buffers import GradBuffers, finish_grads
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter, named_parameters, new_parameter
from megatron_moe.parallel.streams import Streams
from megatron_moe.pipeline.segment import SegmentedMicrobatch
from tests.helpers.optim_parameters import FP64, main_grads
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import microbatch, model_config
from tests.helpers.tolerances import EXACT
from tests.optim.test_gather_in_forward import DENSE, MODELS, MOE

DEPTH, WIDTH = 4, 8
KERNELS = reference.bundle()
NORM = "norm.weight"
OVERLAPPED = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=1)


@dataclass
class Layers:
    """Model of a few linear layers and a norm, in which every matrix has its own bucket."""

    context: ParallelContext
    config: DataParallelConfig
    uses: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)
    """For each microbatch, the number of bucket reductions launched before its backward reaches the second layer."""

    def __post_init__(self) -> None:
        kinds = {f"layers.{i}.weight": ((WIDTH, WIDTH), ParamMeta(role="matrix")) for i in range(DEPTH)}
        source = torch.Generator().manual_seed(3)
        for name, (shape, meta) in {**kinds, NORM: ((WIDTH,), ParamMeta(role="norm"))}.items():
            self.parameters[name] = new_parameter(shape, meta, self.context)
            self.parameters[name].data.copy_(torch.randn(shape, generator=source))
            self.parameters[name].uses = self.uses.get(name, 1)
        self.buffers = GradBuffers(self.parameters.items(), FP64, self.context, KERNELS, data_parallel=self.config)

    def loss(self, step: int, microbatch: int, *, repeat_last: bool = False) -> Tensor:
        """Loss of one microbatch. With `repeat_last`, the last matrix is used twice."""
        seed = 100 * step + 10 * microbatch + self.context.rank
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for i in range(DEPTH):
            x = linear(KERNELS, x, self.parameters[f"layers.{i}.weight"]).tanh()
            if i == 1:
                x.register_hook(lambda _: self.started.append(self.buffers.reducer.num_started))
        x = x * self.parameters[NORM]
        if repeat_last:
            x = linear(KERNELS, x.tanh(), self.parameters[f"layers.{DEPTH - 1}.weight"])
        return x.square().sum()

    def step(self, step: int, num_microbatches: int = 2, **changes: bool) -> dict[str, Tensor]:
        self.started.clear()
        self.buffers.begin_step(num_microbatches)
        for index in range(num_microbatches):
            self.loss(step, index, **changes).backward()
            self.buffers.collect_autograd_grads()
        finish_grads(self.buffers, self.context)
        return main_grads(self.buffers)


def on_two(function, config: DataParallelConfig = OVERLAPPED) -> list:
    return on_threads(ParallelConfig(world_size=2), lambda context: function(Layers(context, config)))


def test_buckets_start_during_the_last_backward_of_every_step() -> None:
    def starts(chain: Layers) -> list[list[int]]:
        found = []
        for step, num_microbatches in enumerate((2, 2, 3, 1)):
            chain.step(step, num_microbatches)
            found.append(list(chain.started))
            assert chain.buffers.reducer.num_started == DEPTH + 1
        return found

    # In every step, reductions of the norm and of the last two matrices are launched during the last backward.
    for found in on_two(starts):
        assert found == [[0, 3], [0, 3], [0, 0, 3], [3]]
    for found in on_two(starts, DataParallelConfig(ddp_bucket_size=1)):
        assert found == [[0, 0], [0, 0], [0, 0, 0], [0]]


@pytest.mark.parametrize("sharded", [False, True])
def test_overlap_changes_no_bit(sharded: bool) -> None:
    def grads(chain: Layers) -> dict[str, Tensor]:
        for step in range(2):
            chain.step(step)
        buffers = chain.buffers.buffers
        return {f"{i} {j}": part.clone() for i, b in enumerate(buffers) for j, part in enumerate(b.finished_grads())}

    early = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=1, use_distributed_optimizer=sharded)
    late = DataParallelConfig(ddp_bucket_size=1, use_distributed_optimizer=sharded)
    for found, expected in zip(on_two(grads, early), on_two(grads, late), strict=True):
        EXACT.check_all(found, expected, "gradients")


def test_a_matrix_with_two_uses_waits_for_both_gradients() -> None:
    def run(chain: Layers) -> list[int]:
        chain.step(0, repeat_last=True)
        return list(chain.started)

    uses = {f"layers.{DEPTH - 1}.weight": 2}
    for found in on_threads(ParallelConfig(world_size=2), lambda context: run(Layers(context, OVERLAPPED, uses))):
        assert found == [0, 3]


def test_a_gradient_that_contradicts_the_count_is_reported() -> None:
    with pytest.raises(AssertionError, match="layers.3.weight: 3 gradients in a step with 2, 1 per microbatch"):
        on_two(lambda chain: chain.step(0, repeat_last=True))


def test_a_step_of_unknown_length_waits_for_the_end() -> None:
    def run(chain: Layers) -> list[int]:
        chain.buffers.begin_step()
        chain.loss(1, 0).backward()
        chain.buffers.collect_autograd_grads()
        finish_grads(chain.buffers, chain.context)
        return list(chain.started)

    assert on_two(run) == [[0], [0]]


def test_a_deferred_weight_gradient_counts_when_it_is_computed() -> None:
    def run(chain: Layers) -> tuple[list[int], dict[str, Tensor]]:
        chain.buffers.queue.deferred = True
        chain.step(0)
        grads = chain.step(1)
        return list(chain.started), grads

    plain = on_two(lambda chain: chain.step(1))
    for (started, grads), expected in zip(on_two(run), plain, strict=True):
        assert started == [0, 1], "only the norm's gradient is there when the backward passes"
        EXACT.check_all(grads, expected, "gradients")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_parameter_without_gradient_is_zero_even_if_its_bucket_starts_early(sharded: bool) -> None:
    config = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=10**6, use_distributed_optimizer=sharded)

    def run(context: ParallelContext) -> Tensor:
        chain = Layers(context, config, uses={f"layers.{DEPTH - 1}.weight": 0})
        for _ in range(2):
            for buffer in chain.buffers.buffers:
                buffer.grads.fill_(7.0)
            chain.buffers.begin_step(1)
            x = torch.ones(3, WIDTH, dtype=torch.float64)
            for i in range(DEPTH - 1):
                x = linear(KERNELS, x, chain.parameters[f"layers.{i}.weight"]).tanh()
            (x * chain.parameters[NORM]).sum().backward()
            chain.buffers.collect_autograd_grads()
            assert chain.buffers.reducer.num_started == 2
            finish_grads(chain.buffers, chain.context)
        found = []
        for buffer in chain.buffers.buffers:
            unused = torch.zeros(buffer.layout.size, dtype=torch.bool)
            dict(buffer.views(unused)).get(f"layers.{DEPTH - 1}.weight", unused[:0]).fill_(True)
            parts = zip(buffer.finished_grads(), [unused[a:b] for a, b in buffer.owned], strict=True)
            found += [grads[where] for grads, where in parts]
        return torch.cat(found)

    found = torch.cat(on_threads(ParallelConfig(world_size=2), run))
    assert len(found) == (1 if sharded else 2) * WIDTH * WIDTH
    assert not found.any(), "left-overs of another step count"


REPEATED = MTPConfig(num_layers=2, repeated_layer=True)
MTP_MODELS = {
    "mtp tied": model_config(DENSE, MOE, mtp=MTPConfig(num_layers=2), tied_embeddings=True),
    "mtp repeated": model_config(DENSE, MOE, mtp=REPEATED),
    "mtp detached": model_config(DENSE, MOE, mtp=replace(REPEATED, detach_heads=True), tied_embeddings=True),
    "mtp positions": model_config(DENSE, mtp=REPEATED, position_embedding="learned_absolute", max_positions=64),
}


@pytest.mark.parametrize("by_node", [False, True])
@pytest.mark.parametrize("recompute", [RecomputeConfig(), RecomputeConfig(recompute_method="uniform")])
@pytest.mark.parametrize("name", [*MODELS, *MTP_MODELS])
def test_the_first_step_adds_as_many_gradients_as_the_model_declares(
    name: str, recompute: RecomputeConfig, by_node: bool
) -> None:
    """All reductions have been launched by the end of the last backward, even in the first step."""
    config, context = (MODELS | MTP_MODELS)[name], ParallelContext.single(dtype=torch.float64)
    model = GPT(config, context, KERNELS, saved_tensors=SavedTensorPolicy(recompute))
    init_parameters(model, 7, config.init)
    buffers = GradBuffers(named_parameters(model), FP64, context, KERNELS, data_parallel=OVERLAPPED)
    buffers.begin_step(2)
    for seed in range(2):
        batch = microbatch(seed=seed, training=True)
        if by_node:
            *steps, last = model.steps(batch)
            loss = replace(last, run=lambda state, last=last, batch=batch: scalar_loss(config, last.run(state), batch))
            segments = SegmentedMicrobatch([*steps, loss], None, Streams())
            segments.forward()
            segments.output()
            segments.begin_backward(None)
            segments.backward()
        else:
            scalar_loss(config, model(batch), batch).backward()
        buffers.collect_autograd_grads()
    counts = {each.name: (each._num_arrived, each._num_expected) for each in buffers.main_grads}
    missing = {name: (arrived, expected) for name, (arrived, expected) in counts.items() if arrived != expected}
    assert not missing, f"gradients that arrived, and expected: {missing}"
    assert buffers.reducer.num_started == len(buffers.reducer.buckets)


def scalar_loss(config: ModelConfig, output: LossOutput, batch: MicroBatch) -> Tensor:
    return training_objective(output, batch, mtp=config.mtp, per_token=False)[0]
