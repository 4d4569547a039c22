"""Helpers of both router kernels: logits, scores, their derivatives, and integer keys for comparing scores.

A tile holds all experts of a few tokens. Padding tokens and experts have logits of -inf, for which every score function
returns 0.
"""

import triton
import triton.language as tl


@triton.jit
def load_logits(logits_ptr, tokens, mask, experts, real, num_experts, WIDE: tl.constexpr):
    offsets = tokens[:, None].to(tl.int64) * num_experts + experts[None, :]
    return tl.load(logits_ptr + offsets, mask=mask[:, None] & real[None, :], other=float("-inf")).to(WIDE)


@triton.jit
def softmax(logits):
    """Returns (softmax, log-sum-exp) of every row; (0, -inf) for a row whose logits are all -inf."""
    peak = tl.max(logits, axis=1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    shifted = tl.exp(logits - peak[:, None])
    total = tl.sum(shifted, axis=1)
    return shifted / tl.where(total == 0.0, 1.0, total)[:, None], peak + tl.log(total)


@triton.jit
def score(logits, SCORE: tl.constexpr):
    """Scores by an elementwise function: sigmoid or sqrt(softplus)."""
    if SCORE == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        tl.static_assert(SCORE == "sqrtsoftplus")
        scores = tl.sqrt(tl.maximum(logits, 0.0) + _log_of_one_plus(tl.exp(-tl.abs(logits))))
    return scores


@triton.jit
def score_derivative(logits, scores, SCORE: tl.constexpr):
    """Derivative of `score` with respect to the logits."""
    if SCORE == "sigmoid":
        slopes = scores * (1.0 - scores)
    else:
        slopes = tl.where(scores > 0.0, tl.sigmoid(logits) / (2.0 * scores), 0.0)
    return slopes


@triton.jit
def _log_of_one_plus(x):
    """log(1 + x), accurate for small x. With w = 1 + x, log(w) * x / (w - 1) corrects the rounding error of w."""
    wide = 1.0 + x
    return tl.where(wide == 1.0, x, tl.log(wide) * (x / tl.where(wide == 1.0, 1.0, wide - 1.0)))


@triton.jit
def sortable_ints(values, INT: tl.constexpr, HIGHEST: tl.constexpr):
    """Maps floats to integers that compare like the floats. nan maps to HIGHEST, and both zeros map to 0. No float maps
    to the lowest integer, -HIGHEST - 1, which marks removed entries."""
    bits = tl.where(values == 0.0, 0.0, values).to(INT, bitcast=True)
    return tl.where(values != values, HIGHEST, tl.where(bits < 0, bits ^ HIGHEST, bits))


@triton.jit
def floats_of_sortable_ints(keys, WIDE: tl.constexpr, HIGHEST: tl.constexpr):
    """Inverse of `sortable_ints`."""
    return tl.where(keys < 0, keys ^ HIGHEST, keys).to(WIDE, bitcast=True)
