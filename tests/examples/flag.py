"""A flag, and a score function that receives its value: the sigmoid at a temperature.

pretrain_moe.py --import tests/examples/flag.py --moe-router-score-function warm_sigmoid --router-temperature 2 ...
"""

from dataclasses import dataclass

from arguments.flag import new_flag
from megatron_moe.config.functions import ScoreFunction
from megatron_moe.config.registry import FLAGS, SCORE_FUNCTIONS


@dataclass(frozen=True, kw_only=True)
class TemperatureFlags:
    """Flags of the example."""

    router_temperature: float = new_flag(1.0, least=0.01)
    """Number by which the logits are divided; higher temperatures give more even scores."""


def warm_sigmoid(logits_TE, *, router_temperature):
    return (logits_TE / router_temperature).sigmoid()


FLAGS.register("temperature", TemperatureFlags)
SCORE_FUNCTIONS.register("warm_sigmoid", ScoreFunction(function=warm_sigmoid, options=("router_temperature",)))
