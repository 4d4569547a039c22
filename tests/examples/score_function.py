"""A score function: softsign, mapped to (0, 1). Its tails are heavier than those of the sigmoid.

pretrain_moe.py --import tests/examples/score_function.py --moe-router-score-function softsign ...
"""

from megatron_moe.config.functions import ScoreFunction
from megatron_moe.config.registry import SCORE_FUNCTIONS


def softsign(logits_TE):
    """Scores [T, E] in (0, 1) of the router's logits [T, E]."""
    return (1 + logits_TE / (1 + logits_TE.abs())) / 2


SCORE_FUNCTIONS.register("softsign", ScoreFunction(function=softsign))
