"""A balancing loss: KL divergence of the mean scores P of the experts from an even distribution, sum_e P_e log(E P_e).

    pretrain_moe.py --import tests/examples/balancing_loss.py --moe-router-load-balancing-type kl_loss \\
        --moe-aux-loss-coeff 0.01 ...
"""

from megatron_moe.config.functions import Balancing
from megatron_moe.config.registry import BALANCING


def divergence(load):
    """Loss of one microbatch; its mean scores [1, E] cover the tokens of all tensor- and context-parallel ranks."""
    scores_E = load.mean_scores()[0]
    return (scores_E * (scores_E.clamp(min=1e-12) * len(scores_E)).log()).sum()


BALANCING.register("kl_loss", Balancing(function=divergence, metric="kl_loss"))
