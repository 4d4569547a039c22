"""An activation: Mish, x * tanh(log(1 + exp(x))) (arXiv 1908.08681).

pretrain_moe.py --import tests/examples/activation.py --activation-func mish --gated-linear-unit ...
"""

from megatron_moe.config.functions import Activation
from megatron_moe.config.registry import ACTIVATIONS


def mish(x):
    return x * x.logaddexp(x.new_zeros(())).tanh()


ACTIVATIONS.register("mish", Activation(function=mish))
