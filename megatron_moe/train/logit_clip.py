"""Logs the largest attention logits of a step, and rescales the q and k weights of heads with large logits (QK-clip).

QK-clip (Kimi-K2, arXiv 2507.20534): after the optimizer step, the weights of a head whose largest logit S in the step
exceeds the threshold are multiplied so that the logits shrink by eta = threshold / S. Nothing is read on the host.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_moe.config.optimizer import QKClipConfig
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.model.attention import SoftmaxAttention
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter


class LogitClip:
    """Computes the largest attention logit of each head of a pipeline rank over one step (max all-reduce over dp_cp),
    and from it the QK-clip factors of the q and k weights.

    Args:
        config: None if weights are not rescaled.
        log: whether to record the metric `max_attention_logit`.
    """

    def __init__(self, model: nn.Module, context: ParallelContext, config: QKClipConfig | None, *, log: bool) -> None:
        self._context, self._config, self._log = context, config, log
        self._mixers: Sequence[SoftmaxAttention] = ()
        if config is not None or log:
            self._mixers = [module for module in model.modules() if isinstance(module, SoftmaxAttention)]
        for mixer in self._mixers:
            mixer.track_max_logits(-math.inf if log or config is None else config.qk_clip_threshold)

    @torch.no_grad()
    def end_step(self, apply_update: Tensor, metrics: MetricAccumulator) -> dict[Parameter, Tensor]:
        """Returns the row scaling factors for `Optimizer.step`, all 1 if `apply_update` is False; resets the maxima."""
        if not self._mixers:
            return {}
        maxima = [mixer.max_logits for mixer in self._mixers if mixer.max_logits is not None]
        # collective over dp_cp: 4 or 8 bytes per head and layer of this stage
        largest = all_reduce_(torch.cat(maxima), self._context.group("dp_cp"), "max")
        factors: dict[Parameter, Tensor] = {}
        own = largest.split([len(each) for each in maxima])
        for mixer, own_N, held_N in zip(self._mixers, own, maxima, strict=True):
            held_N.fill_(-math.inf)
            if self._log:
                metrics.record("max_attention_logit", own_N.max(), layer=mixer.layer, reduction="max")
            if self._config is not None:
                threshold = self._config.qk_clip_threshold
                clips_N = apply_update & own_N.isfinite() & (own_N > threshold)
                eta_N = torch.where(clips_N, threshold / own_N, 1.0)
                factors.update(mixer.logit_factors(eta_N, self._config.qk_clip_alpha))
        return factors
