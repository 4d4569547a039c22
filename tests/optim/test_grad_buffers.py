"""Flat buffers: parameters are views, and gradients of accumulators and autograd are summed over microbatches."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.kernels.autograd import grouped_linear, linear
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.optim.grad_buffers import GradBuffers, finish_grads
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter
from tests.helpers.optim_parameters import (
    BF16,
    FP32,
    FP64,
    main_grads,
    make_buffers,
    make_gradients,
    make_parameters,
    set_grads,
)  # fmt: skip
from tests.helpers.tolerances import EXACT, FP64_LAYOUT

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
NORM, QKV = "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
EXPERTS = "decoder.layers.0.mlp.experts.linear_fc1.weight"
OFFSETS = torch.tensor([3, 3, 7, 8], dtype=torch.int32)


def toy_loss(parameters: dict[str, Parameter], ids_T: Tensor) -> Tensor:
    """Loss of a small model that uses an embedding, a norm, a matrix, experts and a head."""
    kernels = reference.bundle()
    x_TH = torch.nn.functional.embedding(ids_T, parameters[EMBEDDING]) * parameters[NORM]
    qkv = linear(kernels, x_TH, parameters[QKV]).tanh()
    rows = linear(kernels, x_TH[:8], parameters[HEAD]).tanh().sum() + qkv.square().sum()
    return rows + grouped_linear(kernels, x_TH[:8], parameters[EXPERTS], OFFSETS).tanh().sum()


def tokens(microbatch: int) -> Tensor:
    return torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(microbatch))


def run(parameters: dict[str, Parameter], buffers: GradBuffers, microbatches: int) -> dict[str, Tensor]:
    buffers.begin_step()
    for microbatch in range(microbatches):
        toy_loss(parameters, tokens(microbatch)).backward()
        buffers.collect_autograd_grads()
    buffers.complete_local_grads()
    return main_grads(buffers)


def autograd_sums(dtype: torch.dtype, microbatches: int) -> dict[str, Tensor]:
    """Returns the gradients that plain autograd computes without flat buffers."""
    parameters = make_parameters(dtype)
    for microbatch in range(microbatches):
        toy_loss(parameters, tokens(microbatch)).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}


def test_parameters_keep_their_values_and_become_views_of_the_flat_buffer() -> None:
    parameters, values = make_parameters(), make_parameters()
    buffers = make_buffers(parameters)
    EXACT.check_all(
        {name: p.detach() for name, p in parameters.items()}, {name: p.detach() for name, p in values.items()}
    )
    for buffer in buffers.buffers:
        buffer.weights.zero_()
    assert all(not p.any() for p in parameters.values()), "a parameter is not a view of its buffer"


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("precision", [FP64, FP32], ids=["fp64", "fp32"])
def test_gradient_accumulators_give_the_gradients_of_autograd(microbatches: int, precision) -> None:
    dtype = torch.float64 if precision is FP64 else torch.float32
    parameters = make_parameters(dtype)
    found = run(parameters, make_buffers(parameters, precision), microbatches)
    EXACT.check_all(found, autograd_sums(dtype, microbatches), "gradients")


def test_a_second_step_discards_the_gradients_of_the_first() -> None:
    parameters = make_parameters()
    buffers = make_buffers(parameters)
    first = run(parameters, buffers, 2)
    EXACT.check_all(run(parameters, buffers, 2), first, "gradients of the second step")


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    "interval, known, arrived",
    [(1, True, [1, 2, 3]), (2, True, [0, 2, 3]), (2, False, [0, 2, 2]), (4, True, [0, 0, 3])],
)
def test_batched_expert_gradients_are_counted_when_they_are_computed(
    interval: int, known: bool, arrived: list[int], deferred: bool
) -> None:
    """Runs two steps of three microbatches in which one expert has no rows.

    `arrived` is the number of gradients counted after each microbatch. Deferred gradients are queued before they are
    batched.
    """
    parameters = make_parameters()
    buffers = make_buffers(parameters, expert_interval=interval)
    (expert_grad,) = (each for each in buffers.main_grads if each.name == EXPERTS)
    seen: list[bool] = []
    expert_grad.on_arrival = lambda number: seen.extend([expert_grad.filled] * number)
    for _ in range(2):
        seen.clear()
        buffers.begin_step(3 if known else None)
        buffers.queue.deferred = deferred
        found = []
        for microbatch in range(3):
            toy_loss(parameters, tokens(microbatch)).backward()
            before = len(seen)
            buffers.queue.run()
            assert not deferred or before == (found[-1] if found else 0)
            buffers.collect_autograd_grads()
            found.append(len(seen))
        buffers.complete_local_grads()
        assert found == arrived and seen == [True] * 3
        FP64_LAYOUT.check_all(main_grads(buffers), autograd_sums(torch.float64, 3), "gradients")
        assert not expert_grad.main_grad[1].any()


def test_a_batched_gradient_does_not_keep_the_graph_of_its_rows_alive() -> None:
    parameters = make_parameters()
    buffers = make_buffers(parameters, expert_interval=2)
    buffers.begin_step(2)
    toy_loss(parameters, tokens(0)).backward()
    (expert_grad,) = (each for each in buffers.main_grads if each.name == EXPERTS)
    assert expert_grad._batched is not None
    (part,) = expert_grad._batched.parts
    assert part.rows.data.grad_fn is None and part.grad.data.grad_fn is None


@pytest.mark.parametrize(
    ("interval", "deferred", "problem"),
    [
        (2, False, "linear_fc1.weight: a deferred weight gradient of the last"),
        (1, True, "3 deferred weight gradients of the last"),
    ],
)
def test_a_step_cannot_begin_before_all_weight_gradients_of_the_last_one(
    interval: int, deferred: bool, problem: str
) -> None:
    parameters = make_parameters()
    buffers = make_buffers(parameters, expert_interval=interval)
    buffers.begin_step(2)
    buffers.queue.deferred = deferred
    toy_loss(parameters, tokens(0)).backward()
    with pytest.raises(AssertionError, match=problem):
        buffers.begin_step(2)


def test_a_parameter_without_a_gradient_has_gradient_zero() -> None:
    parameters = make_parameters()
    buffers = make_buffers(parameters)
    for buffer in buffers.buffers:
        buffer.grads.fill_(7.0)
    found = run(parameters, buffers, 1)
    unused = set(found) - {EMBEDDING, HEAD, NORM, QKV, EXPERTS}
    assert len(unused) == 4
    assert not any(found[name].any() for name in unused), "left-overs of an earlier step count"


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_accumulating_microbatches_equals_one_big_batch(parts: int) -> None:
    batch = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(5))

    def loss(parameters: dict[str, Parameter], ids_T: Tensor) -> Tensor:
        x_TH = torch.nn.functional.embedding(ids_T, parameters[EMBEDDING]) * parameters[NORM]
        return linear(reference.bundle(), x_TH, parameters[QKV]).tanh().square().sum()

    def gradients(pieces: tuple[Tensor, ...]) -> dict[str, Tensor]:
        parameters = make_parameters()
        buffers = make_buffers(parameters)
        buffers.begin_step()
        for piece in pieces:
            loss(parameters, piece).backward()
            buffers.collect_autograd_grads()
        buffers.complete_local_grads()
        return main_grads(buffers)

    FP64_LAYOUT.check_all(gradients(batch.chunk(parts)), gradients((batch,)), f"{parts} microbatches")


def test_a_tied_matrix_accumulates_the_gradients_of_both_uses() -> None:
    def gradient(parameters: dict[str, Parameter], buffers: GradBuffers | None) -> Tensor:
        tied = parameters[EMBEDDING]
        x_TH = torch.nn.functional.embedding(tokens(0), tied)
        loss = linear(reference.bundle(), x_TH, tied).tanh().sum()
        if buffers is None:
            loss.backward()
            return tied.grad
        buffers.begin_step()
        loss.backward()
        buffers.collect_autograd_grads()
        buffers.complete_local_grads()
        return main_grads(buffers)[EMBEDDING]

    parameters = make_parameters()
    found = gradient(parameters, make_buffers(parameters))
    FP64_LAYOUT.check(found, gradient(make_parameters(), None), "gradient of the tied matrix")


def test_bf16_gradients_add_up_in_fp32() -> None:
    parameters = make_parameters(torch.bfloat16)
    buffers = make_buffers(parameters, BF16)
    buffers.begin_step()
    for value in (256.0, 1.0, 1.0):
        parameters[NORM].grad = torch.full_like(parameters[NORM], value)
        buffers.collect_autograd_grads()
        assert parameters[NORM].grad is None, "a collected gradient keeps its memory"
    EXACT.check(main_grads(buffers)[NORM], torch.full((6,), 258.0), "sum that bf16 would round to 256")


def test_deferred_weight_gradients_are_computed_by_run_and_are_identical() -> None:
    expected_parameters = make_parameters()
    expected = run(expected_parameters, make_buffers(expected_parameters), 2)
    parameters = make_parameters()
    buffers = make_buffers(parameters)
    buffers.queue.deferred = True
    buffers.begin_step()
    for microbatch in range(2):
        toy_loss(parameters, tokens(microbatch)).backward()
        buffers.collect_autograd_grads()
    assert len(buffers.queue) == 6, "three matrices in two microbatches wait"
    assert not main_grads(buffers)[QKV].any(), "a deferred gradient is there before its time"
    buffers.complete_local_grads()
    assert not len(buffers.queue)
    EXACT.check_all(main_grads(buffers), expected, "gradients")


def test_finished_gradients_of_one_rank_are_unchanged_and_finite_without_any_token() -> None:
    gradients, context = make_gradients(0), ParallelContext.single()
    for count in (None, torch.zeros((), dtype=torch.float64)):
        buffers = make_buffers(make_parameters())
        set_grads(buffers, gradients)
        finish_grads(buffers, context, token_count=count)
        EXACT.check_all(main_grads(buffers), gradients, f"gradients with token count {count}")


def test_frozen_parameters_stay_out_of_the_buffers() -> None:
    parameters = make_parameters()
    parameters[HEAD].requires_grad_(False)
    assert HEAD not in {each.name for each in make_buffers(parameters).main_grads}
    assert parameters[HEAD].grad_accumulator is None


def test_unreferenced_buffers_are_freed() -> None:
    """A reference cycle through the hook of a parameter would keep the buffers alive forever."""
    parameters = make_parameters()
    buffers = make_buffers(parameters, data_parallel=DataParallelConfig(overlap_grad_reduce=True))
    toy_loss(parameters, tokens(0)).backward()
    held = [weakref.ref(buffers), *map(weakref.ref, parameters.values())]
    del parameters, buffers
    gc.collect()
    assert not any(each() is not None for each in held)
