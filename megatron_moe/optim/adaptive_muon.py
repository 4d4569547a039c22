"""Muon with a second moment: AdaMuon (Si et al., arXiv 2507.11005), as Megatron-LM computes it by default.

Each element of the orthogonal matrix O is divided by the root of a moving average v of its square, v = beta2 v +
(1 - beta2) O^2, before the scale of Muon. Megatron-LM has no bias correction.
"""

import torch
from torch import Tensor

from megatron_moe.optim.muon import Muon
from megatron_moe.optim.pieces import ParamPiece
from megatron_moe.optim.state import UpdateOperands

_BETA2 = 0.95
_EPS = 1e-8


class AdaptiveMuon(Muon):
    """Update rule for matrices: Muon, divided element by element by the root of a second moment."""

    def adapted(
        self, operands: UpdateOperands, piece: ParamPiece, orthogonal: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Muon.adapted`."""
        moment2 = torch.lerp(orthogonal.square(), operands.values("moment2", piece), _BETA2)
        return orthogonal / (moment2.sqrt() + _EPS), {"moment2": moment2}
