"""Lion: the sign of a momentum (Chen et al., arXiv 2302.06675), with decoupled weight decay.

For an element with gradient g: the weight moves by -lr sign(beta1 m + (1 - beta1) g); then m = beta2 m + (1 - beta2) g.
"""

import torch

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.optim.state import StepScalars, UpdateOperands

_MOST_ELEMENTS = 1 << 24
"""Maximum number of elements that are updated at a time; it bounds temporary memory."""


class Lion:
    """Lion update rule: elementwise, with one momentum."""

    def __init__(self, config: OptimizerConfig, precision: PrecisionConfig) -> None:
        self._beta1, self._beta2 = config.lion_beta1, config.lion_beta2

    def step(self, scalars: StepScalars, operands: UpdateOperands, kernels: Kernels) -> None:
        """Updates weights, master weights and momentum of a range of elements in place (`UpdateRule.step`)."""
        lr, decay = scalars.lr_of(operands.buffer_key), scalars.weight_decay_of(operands.buffer_key)
        for part in operands.chunks(_MOST_ELEMENTS):
            master, momentum = part.flat_master, part.flat_values("exp_avg")
            grad = part.grads.to(master.dtype) * scalars.grad_scale.to(master.dtype)
            sign = torch.lerp(grad, momentum, self._beta1).sign_()
            new = (master * (1 - lr * decay)).sub_(sign, alpha=lr)
            part.commit_flat(scalars, new, exp_avg=torch.lerp(grad, momentum, self._beta2))
