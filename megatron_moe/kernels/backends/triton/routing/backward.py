"""Router backward in one pass: the gradient of the logits from the gradients of the probabilities and of the loss sums.
Only logits and choices are saved; scores are recomputed. Gradients that are None are skipped at compile time."""

import triton
import triton.language as tl

from megatron_moe.kernels.backends.triton.routing.scores import load_logits, score, score_derivative, softmax


@triton.jit
def route_backward(
    grad_probs_ptr, grad_scores_ptr, grad_z_ptr, logits_ptr, ids_ptr, valid_ptr, grad_ptr,
    num_tokens, num_experts, sets,
    PROBS: tl.constexpr, BALANCE: tl.constexpr, Z: tl.constexpr, MASKED: tl.constexpr, TOPK: tl.constexpr,
    SCORE: tl.constexpr, ON_LOGITS: tl.constexpr, NORMALISED: tl.constexpr, SCALING: tl.constexpr,
    EPSILON: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    experts = tl.arange(0, EXPERTS)
    real = experts < num_experts
    inside = tokens < num_tokens
    mask = inside
    if MASKED:
        mask = inside & (tl.load(valid_ptr + tokens, mask=inside, other=0) != 0)
    logits = load_logits(logits_ptr, tokens, mask, experts, real, num_experts, WIDE)
    shares, logsumexp = softmax(logits)

    grad = tl.zeros((TOKENS, EXPERTS), dtype=WIDE)  # gradient with respect to the logits
    # gradient with respect to the scores normalised to a sum of 1 per token
    by_shares = tl.zeros((TOKENS, EXPERTS), dtype=WIDE)
    # gradient with respect to the elementwise scores (not used for softmax)
    by_scores = tl.zeros((TOKENS, EXPERTS), dtype=WIDE)
    if SCORE != "softmax":
        scores = score(logits, SCORE)
    if BALANCE:
        offsets = (tokens % sets)[:, None] * num_experts + experts[None, :]
        by_shares += tl.load(grad_scores_ptr + offsets, mask=mask[:, None] & real[None, :], other=0.0)
    if PROBS:
        by_choice, taken = _at_the_choices(grad_probs_ptr, ids_ptr, tokens, mask, experts, TOPK, EXPERTS, WIDE)
        by_choice *= SCALING
        if ON_LOGITS:
            weights, _ = softmax(tl.where(taken, logits, float("-inf")))
            grad += _through_softmax(weights, by_choice)
        elif SCORE == "softmax":
            by_shares += by_choice
        elif NORMALISED:
            by_choice = _through_quotient(tl.where(taken, scores, 0.0), by_choice, EPSILON)
            by_scores += tl.where(taken, by_choice, 0.0)
        else:
            by_scores += by_choice
    if SCORE == "softmax":
        grad += _through_softmax(shares, by_shares)
    else:
        if BALANCE:
            by_scores += _through_quotient(scores, by_shares, EPSILON)
        grad += by_scores * score_derivative(logits, scores, SCORE)
    if Z:
        grad += shares * (2.0 * tl.load(grad_z_ptr) * logsumexp)[:, None]

    offsets = tokens[:, None].to(tl.int64) * num_experts + experts[None, :]
    grad = tl.where(mask[:, None], grad, 0.0).to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + offsets, grad, mask=inside[:, None] & real[None, :])


@triton.jit
def _at_the_choices(
    grad_ptr, ids_ptr, tokens, mask, experts, TOPK: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr
):
    """Returns (probability gradients, 0 for experts not chosen; mask of chosen experts), both [tokens, experts]."""
    grad = tl.zeros((tokens.shape[0], EXPERTS), dtype=WIDE)
    taken = tl.zeros((tokens.shape[0], EXPERTS), dtype=tl.int32)
    first = tokens.to(tl.int64) * TOPK
    for k in tl.static_range(TOPK):
        expert = tl.load(ids_ptr + first + k, mask=mask, other=-1).to(tl.int32)
        own = tl.load(grad_ptr + first + k, mask=mask, other=0.0).to(WIDE)
        hit = experts[None, :] == expert[:, None]
        grad = tl.where(hit, own[:, None], grad)
        taken = tl.where(hit, 1, taken)
    return grad, taken != 0


@triton.jit
def _through_softmax(shares, grad):
    return shares * (grad - tl.sum(shares * grad, axis=1)[:, None])


@triton.jit
def _through_quotient(scores, grad, EPSILON: tl.constexpr):
    """Backward of scores / (sum of scores + EPSILON): returns the gradient of the scores."""
    total = tl.sum(scores, axis=1)[:, None] + EPSILON
    return (grad - tl.sum(scores * grad, axis=1)[:, None] / total) / total
