"""Muon with a second moment: AdaMuon (Si et al., arXiv 2507.11005), as Megatron-LM computes it by default.

Each element of the orthogonal matrix O is divided by the root of a moving average v of its square, v = beta2 v +
(1 - beta2) O^2, before the scale of Muon. Megatron-LM has no bias correction.
"""

import torch
from torch import Tensor

from megatron_moe.optim.muon import Muon
from megatron_moe.optim.param_slices import ParamSlice
from megatron_moe.optim.state import StepScalars, UpdateOperands

_BETA2 = 0.95
_EPS = 1e-8


class AdaptiveMuon(Muon):
    """Update rule for matrices: Muon, divided element by element by the root of a second moment."""

    def adapt_direction(
        self, scalars: StepScalars, operands: UpdateOperands, param: ParamSlice, orthogonal: Tensor
    ) -> Tensor:
        """Divides the orthogonal matrices by the root of the second moment, which it updates; see
        `Muon.adapt_direction`."""
        old = operands.values("moment2", param)
        moment2 = torch.lerp(orthogonal.to(old.dtype).square(), old, _BETA2)
        operands.commit_state(scalars, param, moment2=moment2)
        return orthogonal / (moment2.sqrt() + _EPS)
