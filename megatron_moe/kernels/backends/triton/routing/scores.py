"""What the router's kernels share: logits, scores and their slopes, and an order of numbers that knows no ties.

A tile holds all experts of a few tokens. Tokens and experts that are not there have logits of minus infinity, which
every score function turns into 0.
"""

import triton
import triton.language as tl


@triton.jit
def load_logits(logits_ptr, tokens, held, experts, real, num_experts, WIDE: tl.constexpr):
    place = tokens[:, None].to(tl.int64) * num_experts + experts[None, :]
    return tl.load(logits_ptr + place, mask=held[:, None] & real[None, :], other=float("-inf")).to(WIDE)


@triton.jit
def softmax(logits):
    """(softmax, logsumexp) of every row; of a row of minus infinities zeros and minus infinity."""
    peak = tl.max(logits, axis=1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    shifted = tl.exp(logits - peak[:, None])
    total = tl.sum(shifted, axis=1)
    return shifted / tl.where(total == 0.0, 1.0, total)[:, None], peak + tl.log(total)


@triton.jit
def score(logits, SCORE: tl.constexpr):
    """Scores that look at one expert each."""
    if SCORE == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        tl.static_assert(SCORE == "sqrtsoftplus")
        scores = tl.sqrt(tl.maximum(logits, 0.0) + _log_of_one_plus(tl.exp(-tl.abs(logits))))
    return scores


@triton.jit
def slope(logits, scores, SCORE: tl.constexpr):
    """d score / d logit of these."""
    if SCORE == "sigmoid":
        slopes = scores * (1.0 - scores)
    else:
        slopes = tl.where(scores > 0.0, tl.sigmoid(logits) / (2.0 * scores), 0.0)
    return slopes


@triton.jit
def _log_of_one_plus(x):
    """With the digits of a small x: what 1 + x rounds off, the quotient puts back."""
    wide = 1.0 + x
    return tl.where(wide == 1.0, x, tl.log(wide) * (x / tl.where(wide == 1.0, 1.0, wide - 1.0)))


@triton.jit
def ordered(values, INT: tl.constexpr, HIGHEST: tl.constexpr):
    """Integers in the order of the floating numbers: nan on top, both zeros equal, and -HIGHEST - 1 below all of them,
    so that it can mark what is taken."""
    bits = tl.where(values == 0.0, 0.0, values).to(INT, bitcast=True)
    return tl.where(values != values, HIGHEST, tl.where(bits < 0, bits ^ HIGHEST, bits))


@triton.jit
def value_of(keys, WIDE: tl.constexpr, HIGHEST: tl.constexpr):
    """The numbers that `ordered` made keys of."""
    return tl.where(keys < 0, keys ^ HIGHEST, keys).to(WIDE, bitcast=True)
