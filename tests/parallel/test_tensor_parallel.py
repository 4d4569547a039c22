"""Differentiable collectives equal their definitions on the tensors of all ranks."""

import pytest
import torch

from megatron_moe.parallel import tensor_parallel
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.helpers.sharded import LAYOUTS, tensor_parallel_config
from tests.helpers.tiny_models import randn
from tests.helpers.tolerances import EXACT, FP64_LAYOUT

SHAPES = {"plain": (8, 3, 4), "one": (4, 4, 4), "empty": (0, 3, 4), "empty inside": (8, 0, 4), "long": (16, 5, 8)}


def run(size, function, inputs, probes):
    """Returns each rank's result, and the input gradient of the sum of result * probe."""

    def on_rank(ctx):
        group = ctx.group("tp")
        x = inputs[group.rank].clone().requires_grad_()
        out = function(x, group)
        (out * probes[group.rank]).sum().backward()
        return out.detach(), x.grad

    return on_threads(tensor_parallel_config(size), on_rank)


def different(shape, size, seed):
    return [randn(*shape, seed=seed + rank) for rank in range(size)]


def part(x, rank, size, dim):
    return x.chunk(size, dim=dim)[rank] if x.shape[dim] else x


def check(size, function, inputs, probes, outs, grads):
    for rank, (out, grad) in enumerate(run(size, function, inputs, probes)):
        FP64_LAYOUT.check(out, outs[rank], f"result on rank {rank}")
        FP64_LAYOUT.check(grad, grads[rank], f"gradient on rank {rank}")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("size", [2, 4])
class TestEqualParts:
    def test_copy_to_sums_the_gradients_of_all_ranks(self, size, shape):
        x, probes = randn(*shape), different(shape, size, 20)
        check(size, tensor_parallel.copy_to, [x] * size, probes, [x] * size, [sum(probes)] * size)

    def test_reduce_from_sums_and_hands_every_rank_the_gradient_of_the_sum(self, size, shape):
        parts, probe = different(shape, size, 20), randn(*shape)
        check(size, tensor_parallel.reduce_from, parts, [probe] * size, [sum(parts)] * size, [probe] * size)

    @pytest.mark.parametrize("dim", [0, -1])
    def test_gather_from_joins_and_keeps_its_slice_of_one_gradient(self, size, shape, dim):
        parts = different(shape, size, 20)
        joined = torch.cat(parts, dim=dim)
        probe = randn(*joined.shape)
        grads = [part(probe, rank, size, dim) for rank in range(size)]
        check(size, lambda x, g: tensor_parallel.gather_from(x, g, dim), parts, [probe] * size, [joined] * size, grads)

    @pytest.mark.parametrize("dim", [0, -1])
    def test_scatter_to_slices_and_joins_the_gradients(self, size, shape, dim):
        x = randn(*shape)
        outs = [part(x, rank, size, dim) for rank in range(size)]
        probes = different(outs[0].shape, size, 20)
        grads = [torch.cat(probes, dim=dim)] * size
        check(size, lambda x, g: tensor_parallel.scatter_to(x, g, dim), [x] * size, probes, outs, grads)

    @pytest.mark.parametrize("dim", [0, -1])
    def test_all_gather_joins_and_sums_its_slice_of_all_gradients(self, size, shape, dim):
        parts = different(shape, size, 20)
        joined = torch.cat(parts, dim=dim)
        probes = different(joined.shape, size, 40)
        grads = [part(sum(probes), rank, size, dim) for rank in range(size)]
        check(size, lambda x, g: tensor_parallel.all_gather(x, g, dim), parts, probes, [joined] * size, grads)

    @pytest.mark.parametrize("dim", [0, -1])
    def test_reduce_scatter_sums_its_slice_and_joins_the_gradients(self, size, shape, dim):
        parts = different(shape, size, 20)
        outs = [part(sum(parts), rank, size, dim) for rank in range(size)]
        probes = different(outs[0].shape, size, 40)
        grads = [torch.cat(probes, dim=dim)] * size
        check(size, lambda x, g: tensor_parallel.reduce_scatter(x, g, dim), parts, probes, outs, grads)


@pytest.mark.parametrize("function", [tensor_parallel.scatter_to, tensor_parallel.reduce_scatter])
def test_an_indivisible_dim_is_an_error_with_its_numbers(function):
    with pytest.raises(AssertionError, match=r"dim 0 of \(5, 3\) cannot be divided equally among 2 ranks"):
        on_threads(tensor_parallel_config(2), lambda ctx: function(randn(5, 3), ctx.group("tp"), 0))


def test_one_rank_gets_its_own_tensor_back():
    ctx = ParallelContext.single()
    group, x = ctx.group("tp"), randn(4, 3)
    assert tensor_parallel.copy_to(x, group) is x is tensor_parallel.reduce_from(x, group)
    for name in ("gather_from", "scatter_to", "all_gather", "reduce_scatter"):
        assert getattr(tensor_parallel, name)(x, group, 0) is x
    for name in ("enter_tensor_parallel", "leave_tensor_parallel", "columns_to_residual"):
        assert getattr(tensor_parallel, name)(x, ctx) is x
    assert tensor_parallel.select_local_positions(x, ctx) is x is tensor_parallel.gather_shard(x, group)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_entering_and_leaving_is_multiplying_by_the_number_of_ranks(layout):
    """Between enter and leave, every rank has the whole residual stream, so leave returns tp times the stream."""
    whole, probe = randn(8, 2, 3), randn(8, 2, 3, seed=4)

    def on_rank(ctx):
        index, num_parts = tensor_parallel.sequence_part(ctx)
        x = whole.chunk(num_parts)[index].clone().requires_grad_()
        out = tensor_parallel.leave_tensor_parallel(tensor_parallel.enter_tensor_parallel(x, ctx), ctx)
        (out * probe.chunk(num_parts)[index]).sum().backward()
        return out.detach(), x.grad

    results = on_threads(layout, on_rank)
    for index in (0, 1):
        joined = [result[index] for result in results]
        joined = torch.cat(joined) if layout.sequence_parallel else joined[0]
        FP64_LAYOUT.check(joined, layout.tp * (whole, probe)[index], ("stream", "gradient")[index])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_columns_become_the_residual_stream(layout):
    whole, probe = randn(8, 2, 4), randn(8, 2, 4, seed=4)

    def on_rank(ctx):
        tp, (index, num_parts) = ctx.group("tp"), tensor_parallel.sequence_part(ctx)
        x = whole.chunk(tp.size, dim=-1)[tp.rank].clone().requires_grad_()
        out = tensor_parallel.columns_to_residual(x, ctx)
        EXACT.check(out, whole.chunk(num_parts)[index], "stream")
        (out * probe.chunk(num_parts)[index]).sum().backward()
        EXACT.check(x.grad, probe.chunk(tp.size, dim=-1)[tp.rank], "gradient")

    on_threads(layout, on_rank)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_positions_of_a_rank_are_those_of_its_shard(layout):
    ids_BS = torch.arange(16).view(2, 8)

    def on_rank(ctx):
        index, num_parts = tensor_parallel.sequence_part(ctx)
        EXACT.check(
            tensor_parallel.select_local_positions(ids_BS, ctx), ids_BS.chunk(num_parts, dim=1)[index], "positions"
        )
        return index

    assert on_threads(layout, on_rank) == (list(range(layout.tp)) if layout.sequence_parallel else [0] * layout.tp)
