"""Every type of linear layer gives the same results with tensor parallelism as on one rank."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_moe.config.component import linear_parameters
from megatron_moe.config.tp_overlap import OVERLAPPED
from megatron_moe.layers.linear import Linear
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import new_parameter
from megatron_moe.parallel.sequence_shards import layer_collectives
from megatron_moe.parallel.tensor_parallel import sequence_part
from tests.helpers.ranks import on_threads
from tests.helpers.sharded import KERNELS, LAYOUTS, SEQUENCE_LAYOUTS, peers_of, run_module, whole
from tests.helpers.tiny_models import randn
from tests.helpers.tolerances import EXACT, FP64_LAYOUT

SEQ, BATCH, INPUTS, OUTPUTS = 8, 3, 12, 16


def part(x, rank, size, dim):
    return x.chunk(size, dim=dim)[rank]


def stream(x, ctx):
    """Selects this rank's part of the residual stream."""
    index, num_parts = sequence_part(ctx)
    return part(x, index, num_parts, 0)


def cut(x, ctx):
    """Selects this rank's channels."""
    tp = ctx.group("tp")
    return part(x, tp.rank, tp.size, -1)


def join(parts, layout, dim):
    """Concatenates shards along `dim`, or returns the first one if `dim` is None (replicated)."""
    if dim is None or (dim == 0 and not layout.sequence_parallel):
        for other in parts[1:]:
            EXACT.check(other, parts[0], "replicated")
        return parts[0]
    return torch.cat(parts, dim=dim)


KINDS = {"column": (0, stream, cut, 0, -1), "row": (1, cut, stream, -1, 0), "replicated": (None, stream, stream, 0, 0)}
"""(tp_dim, selection of this rank's input, selection of its output, dims along which inputs and outputs are
concatenated)."""
LAYERS = {"column": "qkv", "row": "proj", "replicated": ""}
"""Kind of layer in the names of overlapped GEMMs."""


def make_linear(ctx, kind, *, bias=False):
    specs = linear_parameters(
        "fc", (OUTPUTS, INPUTS), ctx.config, counted="dense_mlp", low="", bias=bias, tp_dim=KINDS[kind][0]
    )
    weight, *biases = [new_parameter(spec.shape, spec.meta, ctx) for spec in specs]
    collectives = layer_collectives(ctx, peers_of(ctx), LAYERS[kind])
    return Linear(weight, biases[0] if biases else None, ctx, KERNELS, collectives=collectives)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_sharded_linear_computes_the_linear_of_one_rank(layout, kind, bias):
    check_linear(layout, kind, bias=bias)


@pytest.mark.parametrize("name", [name for name in OVERLAPPED if name.startswith(("qkv", "proj"))])
def test_each_gemm_can_be_overlapped_alone(name):
    check_linear(replace(LAYOUTS["tp2-sp"], tp_comm_overlap=(name,)), "row" if "proj" in name else "column")


def check_linear(layout, kind, *, bias=False):
    _, my_input, my_output, input_dim, output_dim = KINDS[kind]
    x, probe = randn(SEQ, BATCH, INPUTS), randn(SEQ, BATCH, OUTPUTS, seed=4)
    make = partial(make_linear, kind=kind, bias=bias)
    alone = run_module(make, x, probe, ParallelContext.single())
    ranks = on_threads(layout, lambda ctx: run_module(make, my_input(x, ctx), my_output(probe, ctx), ctx))
    FP64_LAYOUT.check(join([r.out for r in ranks], layout, output_dim), alone.out, "output")
    FP64_LAYOUT.check(join([r.grad_x for r in ranks], layout, input_dim), alone.grad_x, "input gradient")
    FP64_LAYOUT.check_all(whole([r.gradients for r in ranks]), whole([alone.gradients]), "gradients")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_bias_of_a_row_parallel_linear_is_added_once(layout):
    def on_rank(ctx):
        linear = make_linear(ctx, "row", bias=True)
        with torch.no_grad():
            linear.weight.zero_()
            linear.bias.fill_(3.0)
        out = linear(randn(SEQ, BATCH, INPUTS // ctx.group("tp").size))
        EXACT.check(out, torch.full_like(out, 3.0), "bias alone")

    on_threads(layout, on_rank)


@pytest.mark.parametrize("layout", SEQUENCE_LAYOUTS.values(), ids=SEQUENCE_LAYOUTS)
def test_a_column_parallel_linear_saves_only_its_own_positions(layout):
    """Backward gathers the input again; saving it gathered would cost tp times the memory."""

    def on_rank(ctx):
        linear = make_linear(ctx, "column")
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape[0]) or t, lambda t: t):
            linear(stream(randn(SEQ, BATCH, INPUTS), ctx).requires_grad_())
        return kept

    assert on_threads(layout, on_rank) == [[SEQ // layout.tp]] * layout.tp


def test_gradients_of_replicated_parameters_are_partial_under_sequence_parallelism():
    def on_rank(ctx):
        linears = {kind: make_linear(ctx, kind, bias=True) for kind in KINDS}
        named = [(f"{kind}.{name}", p) for kind, linear in linears.items() for name, p in linear.named_parameters()]
        return {name for name, parameter in named if parameter.meta.partial_over_tp}

    expected = {"row.bias", "replicated.weight", "replicated.bias"}
    assert on_threads(LAYOUTS["tp2-sp"], on_rank) == [expected] * 2
    assert on_threads(LAYOUTS["tp2"], on_rank) == [set()] * 2
