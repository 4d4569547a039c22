"""Efficiency of a training step relative to data sheets: measured on one H200, assumed for all kinds of GPU.

Measured (`benchmarks/2026-11-21-h200-step.md`): dense GEMMs of Q6 reach 768 of 989 TFLOP/s, its attention 399 (causal
count), grouped GEMMs 674 and more, copies 4.29 of 4.8 TB/s. Values for FP8, host links and host memory are estimates,
and marked as such. Launch overhead of the host is not modelled.
"""

from dataclasses import dataclass

from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.cost_model.hardware import GPU

DENSE = 0.77
"""GEMMs outside the experts, as a share of the peak."""
GROUPED = 0.68
"""Grouped GEMMs of the experts, as a share of the peak, without the time to read weights and gradients."""
CORE_ATTENTION = 0.41
"""Attention forward and backward, as a share of the bf16 peak, with operations counted under the causal mask."""
LOW_PRECISION = 0.64
"""FP8 GEMMs, as a share of the FP8 peak: estimated from one blockwise GEMM of 8192 x 4096 x 4096 (1261 TFLOP/s)."""
BANDWIDTH = 0.89
"""Memory bandwidth, as a share of the data sheet's."""
PASSES = 7.5
"""Bytes moved by bandwidth-bound kernels (norms, RoPE, router, permutation, activation, residual sums) in forward and
backward, as a multiple of a layer's saved bytes: 7.7 for Q6, 7.1 for M8."""
LOGIT_PASSES = 3.0
"""Bytes moved by the loss as a multiple of the logits: one read in forward, one read and one write in backward."""
PASSES_AGAIN = 3.0
"""Bytes moved by recomputed bandwidth-bound kernels, as a multiple of the bytes that recompute frees."""
LOW_PASSES = 3.0
"""Bytes moved to quantise a GEMM's input and its gradient, as a multiple of the input; an estimate."""
OFFLOAD_DISTURBANCE = 0.018
"""Slowdown of computation by overlapped activation copies: 1.6 to 2 % in the paper."""
HIDDEN_AT_BEST = 0.95
"""Largest share of expert communication that another microbatch hides, from the paper."""
HOST_MEMORY = 60e9
"""Bandwidth of host memory per GPU during an optimizer step on the CPU, bytes per second; an estimate."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Attainable rates of one GPU, in FLOP/s and bytes per second."""

    dense: float
    head: float
    """Output head, which always uses the parameters' format."""
    experts: float
    core_attention: float
    memory: float
    host_link: float
    """Host memory, per direction."""


def rates_of(gpu: GPU, precision: PrecisionConfig) -> Rates:
    """Attainable rates of a GPU with the number formats of a run."""
    peak, _ = gpu.rate(precision.params)
    low = gpu.fp8 * LOW_PRECISION
    return Rates(
        dense=low if precision.low_precision else peak * DENSE,
        head=peak * DENSE,
        experts=low if precision.low_precision else peak * GROUPED,
        core_attention=peak * CORE_ATTENTION,
        memory=gpu.hbm * BANDWIDTH,
        host_link=gpu.host_link,
    )
