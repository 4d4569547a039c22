"""Flat buffers: parameters become views, gradients arrive on two paths and add up over microbatches."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.kernels import reference
from megatron_moe.kernels.autograd import grouped_linear, linear
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.parallel.parameter import Parameter
from tests.helpers.optim_parameters import BF16, FP32, FP64, main_grads, make_buffers, make_parameters
from tests.helpers.tolerances import EXACT, FP64_LAYOUT

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
NORM, QKV = "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
EXPERTS = "decoder.layers.0.mlp.experts.linear_fc1.weight"
OFFSETS = torch.tensor([3, 3, 7, 8], dtype=torch.int32)


def toy_loss(parameters: dict[str, Parameter], ids_T: Tensor) -> Tensor:
    """Sum over tokens of something that uses an embedding, a norm, a matrix, experts and a head."""
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
        buffers.collect()
    buffers.complete()
    return main_grads(buffers)


def autograd_sums(dtype: torch.dtype, microbatches: int) -> dict[str, Tensor]:
    """The same gradients by autograd alone, without buffers."""
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
def test_the_sink_path_gives_the_very_gradients_of_autograd(microbatches: int, precision) -> None:
    dtype = torch.float64 if precision is FP64 else torch.float32
    parameters = make_parameters(dtype)
    found = run(parameters, make_buffers(parameters, precision), microbatches)
    EXACT.check_all(found, autograd_sums(dtype, microbatches), "gradients")


def test_a_second_step_forgets_the_first() -> None:
    parameters = make_parameters()
    buffers = make_buffers(parameters)
    first = run(parameters, buffers, 2)
    EXACT.check_all(run(parameters, buffers, 2), first, "gradients of the second step")


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    "interval, known, arrived",
    [(1, True, [1, 2, 3]), (2, True, [0, 2, 3]), (2, False, [0, 2, 2]), (4, True, [0, 0, 3])],
)
def test_gradients_of_experts_wait_for_others_and_are_told_when_they_are_there(
    interval: int, known: bool, arrived: list[int], deferred: bool
) -> None:
    """Of three microbatches, in two steps; one expert has no rows. What is deferred waits in the queue first."""
    parameters = make_parameters()
    buffers = make_buffers(parameters, expert_interval=interval)
    (slot,) = (slot for slot in buffers.slots if slot.name == EXPERTS)
    seen: list[bool] = []
    slot.on_arrival = lambda number: seen.extend([slot.filled] * number)
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
            buffers.collect()
            found.append(len(seen))
        buffers.complete()
        assert found == arrived and seen == [True] * 3
        FP64_LAYOUT.check_all(main_grads(buffers), autograd_sums(torch.float64, 3), "gradients")
        assert not slot.main_grad[1].any()


def test_a_gradient_that_waits_does_not_keep_the_graph_that_its_rows_came_from() -> None:
    parameters = make_parameters()
    buffers = make_buffers(parameters, expert_interval=2)
    buffers.begin_step(2)
    toy_loss(parameters, tokens(0)).backward()
    (slot,) = (slot for slot in buffers.slots if slot.name == EXPERTS)
    assert slot._batched is not None
    (part,) = slot._batched.parts
    assert part.rows.data.grad_fn is None and part.grad.data.grad_fn is None


def test_a_step_does_not_begin_while_gradients_of_the_last_one_wait() -> None:
    parameters = make_parameters()
    buffers = make_buffers(parameters, expert_interval=2)
    buffers.begin_step(2)
    toy_loss(parameters, tokens(0)).backward()
    with pytest.raises(AssertionError, match="linear_fc1.weight: a weight gradient of the last step"):
        buffers.begin_step(2)


def test_a_parameter_that_received_nothing_has_gradient_zero() -> None:
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
            buffers.collect()
        buffers.complete()
        return main_grads(buffers)

    FP64_LAYOUT.check_all(gradients(batch.chunk(parts)), gradients((batch,)), f"{parts} microbatches")


def test_a_tied_matrix_gets_the_gradients_of_both_its_uses() -> None:
    def gradient(parameters: dict[str, Parameter], buffers: GradBuffers | None) -> Tensor:
        tied = parameters[EMBEDDING]
        x_TH = torch.nn.functional.embedding(tokens(0), tied)
        loss = linear(reference.bundle(), x_TH, tied).tanh().sum()
        if buffers is None:
            loss.backward()
            return tied.grad
        buffers.begin_step()
        loss.backward()
        buffers.collect()
        buffers.complete()
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
        buffers.collect()
        assert parameters[NORM].grad is None, "a collected gradient keeps its memory"
    EXACT.check(main_grads(buffers)[NORM], torch.full((6,), 258.0), "sum that bf16 would round to 256")


def test_deferred_weight_gradients_come_when_they_are_run_and_are_the_same() -> None:
    expected_parameters = make_parameters()
    expected = run(expected_parameters, make_buffers(expected_parameters), 2)
    parameters = make_parameters()
    buffers = make_buffers(parameters)
    buffers.queue.deferred = True
    buffers.begin_step()
    for microbatch in range(2):
        toy_loss(parameters, tokens(microbatch)).backward()
        buffers.collect()
    assert len(buffers.queue) == 6, "three matrices in two microbatches wait"
    assert not main_grads(buffers)[QKV].any(), "a deferred gradient is there before its time"
    buffers.complete()
    assert not len(buffers.queue)
    EXACT.check_all(main_grads(buffers), expected, "gradients")


def test_a_step_does_not_begin_while_weight_gradients_of_the_last_one_wait() -> None:
    parameters = make_parameters()
    buffers = make_buffers(parameters)
    buffers.queue.deferred = True
    toy_loss(parameters, tokens(0)).backward()
    with pytest.raises(AssertionError, match="3 weight gradients of the last step were never computed"):
        buffers.begin_step()


def test_frozen_parameters_stay_out_of_the_buffers() -> None:
    parameters = make_parameters()
    parameters[HEAD].requires_grad_(False)
    assert HEAD not in {slot.name for slot in make_buffers(parameters).slots}
    assert parameters[HEAD].sink is None


def test_buffers_that_nobody_holds_are_freed() -> None:
    """A hook on a parameter that holds what holds the parameter would keep all of them for ever."""
    parameters = make_parameters()
    buffers = make_buffers(parameters, data_parallel=DataParallelConfig(overlap_grad_reduce=True))
    toy_loss(parameters, tokens(0)).backward()
    held = [weakref.ref(buffers), *map(weakref.ref, parameters.values())]
    del parameters, buffers
    gc.collect()
    assert not any(each() is not None for each in held)
