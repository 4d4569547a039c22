"""How much of a machine's data sheet a training step reaches: shares measured on one H200, taken for all kinds.

Measured (`benchmarks/2026-11-21-h200-step.md`): the matrices of Q6 outside the experts run at 768 TFLOP/s of 989, its
attention at 399 by the causal count; grouped matrices alone at 674 and more; copies at 4.29 of 4.8 TB/s. Not measured,
and marked so: everything about FP8, host links and host memory. Waiting for the host between kernels is not modelled.
"""

from dataclasses import dataclass

from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.cost_model.hardware import GPU

DENSE = 0.77
"""Of the peak: matrices outside the experts."""
GROUPED = 0.68
"""Of the peak: expert matrices, apart from reading their weights and gradients."""
CORE_ATTENTION = 0.41
"""Of the bf16 peak, forward and backward, operations counted under the causal mask."""
LOW_PRECISION = 0.64
"""Of the FP8 peak: one blockwise product of 8192 x 4096 x 4096 (1261 TFLOP/s). An estimate for whole steps."""
BANDWIDTH = 0.89
"""Of HBM's data sheet."""
PASSES = 7.5
"""Times that bandwidth-bound kernels of forward and backward move as many bytes as a layer keeps: norms, rotation,
router, permutation, activation and residual sums of Q6 (7.7) and M8 (7.1)."""
LOGIT_PASSES = 3.0
"""Times that the loss moves the logits: read once forward, read and written backward."""
PASSES_AGAIN = 3.0
"""Times that computing something again in bandwidth-bound kernels moves what was freed."""
LOW_PASSES = 3.0
"""Times that quantising moves a matrix's input, with its gradient. An estimate."""
OFFLOAD_DISTURBANCE = 0.018
"""Share of the computing time that copies of activations cost though they are hidden: 1.6 to 2 % in the paper."""
HIDDEN_AT_BEST = 0.95
"""Share of an exchange of rows that another microbatch can hide: the paper's 5 % are left."""
HOST_MEMORY = 60e9
"""Bytes per second of host memory for one GPU's part of a step of the optimizer there. An estimate."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one GPU, in operations and bytes per second."""

    dense: float
    head: float
    """Of the head, which stays in the parameters' format."""
    experts: float
    core_attention: float
    memory: float
    host_link: float
    """To host memory, one direction."""


def rates_of(gpu: GPU, precision: PrecisionConfig) -> Rates:
    """What a GPU reaches with the products of a run."""
    peak, _ = gpu.rate(precision.params)
    low = gpu.fp8 * LOW_PRECISION
    return Rates(
        dense=low if precision.low else peak * DENSE,
        head=peak * DENSE,
        experts=low if precision.low else peak * GROUPED,
        core_attention=peak * CORE_ATTENTION,
        memory=gpu.hbm * BANDWIDTH,
        host_link=gpu.host_link,
    )
