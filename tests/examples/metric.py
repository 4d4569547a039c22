"""A metric: how much the largest logit of a token exceeds that of the next expert, as moe/margin in the log.

pretrain_moe.py --import tests/examples/metric.py ...
"""

from megatron_moe.config.functions import RouterMetric
from megatron_moe.config.registry import METRICS


def margin(logits_TE, ids_TK, probs_TK):
    """Returns one value per token [T]; the log has the mean over an interval's tokens, per layer and over layers."""
    best_T2 = logits_TE.topk(2, dim=-1).values
    return best_T2[:, 0] - best_T2[:, 1]


METRICS.register("margin", RouterMetric(function=margin))
