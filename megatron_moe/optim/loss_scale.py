"""Loss scaling for fp16, in which small gradients would underflow (Micikevicius et al., arXiv 1710.03740). The loss is
multiplied by a scale, and gradients, norm and clip factor are divided by it again.

The scale is constant, or it follows the overflows of gradients as in Megatron-LM: a step with a non-finite gradient is
skipped. The `hysteresis`-th skipped step and every later one halve the scale. After `loss_scale_window` consecutive
steps without overflow, the scale is doubled, and skipped steps are counted from zero again. The state stays on the
device, where it is also updated.
"""

import torch
from torch import Tensor

from megatron_moe.config.optimizer import LossScaleConfig


class LossScaler:
    """Scale of the loss, with its state on the device."""

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self._config = config
        first = config.initial_loss_scale if config.loss_scale is None else config.loss_scale
        self.state = torch.tensor([first, 0.0, float(config.hysteresis)], dtype=torch.float32, device=device)
        """(scale, number of consecutive steps without overflow, number of further overflows until the scale is halved),
        fp32 [3]."""

    @property
    def scale(self) -> Tensor:
        """Current loss scale: a view of `state`, fp32 scalar on the device, which `update` changes."""
        return self.state[0]

    @torch.no_grad()
    def update(self, overflow: Tensor, valid: Tensor) -> None:
        """Ends a step. `overflow`: True if a gradient is not finite. `valid`: False if the step will be repeated and
        must not change the scale. Both are bool scalars on the device."""
        config = self._config
        if config.loss_scale is not None:
            return
        scale, usual, left = self.state.unbind()
        left, usual = left - overflow.float(), torch.where(overflow, 0.0, usual + 1)
        grows = usual >= config.loss_scale_window
        smaller = (scale / 2).clamp(min=config.min_loss_scale)
        moved = torch.where(grows, scale * 2, torch.where(overflow & (left <= 0), smaller, scale))
        left = torch.where(grows, float(config.hysteresis), left)
        self.state.copy_(torch.where(valid, torch.stack([moved, torch.where(grows, 0.0, usual), left]), self.state))
