"""Weights are sent to the clones of an expert; their gradients are added to the expert's gradient in fp32."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatron_moe.kernels.reference import backend as reference
from megatron_moe.moe.expert_clones import CloneSizes, ExpertClones
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.moe.parallel.folded import parallel

KERNELS = reference.bundle()
CLONED = CloneSizes(sent=((), (1,)), received=(0, 0), num_rows=0, on_any_rank=True)
CLONING = CloneSizes(sent=((), ()), received=(1, 0), num_rows=5, on_any_rank=True)
"""Clones on two ranks: the second rank has a clone of the second of the first rank's two experts."""


class Accumulator:
    """Gradient accumulator whose fp32 buffer initially contains ones."""

    defers_weight_grads = False

    def __init__(self, weight: Tensor) -> None:
        self.buffer = torch.ones_like(weight, dtype=torch.float32)

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        compute(self.buffer, True)


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_gradients_of_clones_are_added_in_fp32(keeps_weights: bool) -> None:
    def rank(ctx: ParallelContext) -> tuple[list[Tensor], list[Tensor]]:
        draw = torch.Generator().manual_seed(ctx.rank)
        new = torch.empty(0, dtype=torch.bfloat16).new_empty
        weights = [nn.Parameter(new(2, *shape).normal_(generator=draw)) for shape in ((7, 6), (6, 7))]
        for weight in weights:
            weight.grad_accumulator = Accumulator(weight)
        sizes = CLONED if ctx.rank == 0 else CLONING
        clones = ExpertClones(weights, ctx.group("ep"), sizes, keeps_weights=keeps_weights)
        rows, offsets_e = new(5, 6).normal_(generator=draw), torch.tensor([5, 5], dtype=torch.int32)
        used: list[Tensor] = []
        if ctx.rank == 0:
            clones.join(rows.requires_grad_()).sum().backward()
        else:
            hidden = clones.linear(KERNELS, 0, rows, offsets_e)
            hidden.retain_grad()
            grad = new(5, 6).normal_(generator=draw)
            clones.linear(KERNELS, 1, hidden, offsets_e).backward(grad)
            used = [rows, hidden.detach(), hidden.grad, grad]
        return [weight.grad_accumulator.buffer for weight in weights], used

    (of_home, _), (of_other, (rows, hidden, grad_hidden, grad)) = on_threads(
        parallel(2, ep=2), rank, dtype=torch.bfloat16
    )
    for found, expected in zip(
        of_home, (grad_hidden.T.double() @ rows.double(), grad.T.double() @ hidden.double()), strict=True
    ):
        assert (found[0] == 1).all(), "only the second expert has a clone"
        torch.testing.assert_close(found[1].double(), 1 + expected, rtol=1e-5, atol=1e-5)
        assert (found[1] != found[1].bfloat16()).any()
    assert all((each == 1).all() for each in of_other), "no expert of the other rank has a clone"
