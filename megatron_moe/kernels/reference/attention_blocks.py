"""Reference implementation of attention between two parts of a sequence, in plain torch.

Each call computes attention over the keys of one part, with its log-sum-exp. The mean of the parts' outputs, weighted
according to the log-sum-exps, is the softmax attention over all keys (Milakov and Gimelshein, arXiv 1805.02867; Liu et
al., arXiv 2310.01889). Backward of a part uses the log-sum-exp over all keys.
"""

import math

import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels.ops import AttentionBlock, AttentionResult, PositionSpan, internal_dtype
from megatron_moe.parallel import rng


def attention_block(
    block: AttentionBlock, out_SBNE: Tensor | None = None, lse_SBN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if out_SBNE is None or lse_SBN is None:
        out_SBNE, lse_SBN = empty_result(block.q_SBND, block.v_SBGE.shape[3])
    logits_BNSS = _logits(block)
    lse_BNS = logits_BNSS.logsumexp(dim=-1)
    probs_BNSS = _probabilities(logits_BNSS, lse_BNS)
    kept_BNSS = rng.dropout(probs_BNSS, block.config.dropout, block.dropout_key)
    part_BNSE = kept_BNSS @ _heads(block.v_SBGE, block.q_SBND.shape[2], probs_BNSS.dtype)
    wide_SBNE = out_SBNE.to(lse_SBN.dtype)
    merge_(wide_SBNE, lse_SBN, part_BNSE.permute(2, 0, 1, 3), lse_BNS.permute(2, 0, 1))
    return out_SBNE if wide_SBNE is out_SBNE else out_SBNE.copy_(wide_SBNE), lse_SBN


def empty_result(q_SBND: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    """Initial values for queries that have seen no key: (output 0, log-sum-exp -inf), in the layouts of the kernels."""
    wide, (seq, batch, heads) = internal_dtype(q_SBND.dtype), q_SBND.shape[:3]
    out_SBNE = q_SBND.new_zeros(seq, batch, heads, value_width, dtype=wide)
    return out_SBNE, q_SBND.new_full((batch, heads, seq), -math.inf, dtype=wide).permute(2, 0, 1)


def no_gradients(block: AttentionBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros to which the gradients of q, k and v can be added."""
    wide = internal_dtype(block.q_SBND.dtype)
    grad_q, grad_k, grad_v = (x.new_zeros(x.shape, dtype=wide) for x in block[:3])
    return grad_q, grad_k, grad_v


def merge_(out_SBNE: Tensor, lse_SBN: Tensor, part_SBNE: Tensor, part_lse_SBN: Tensor) -> None:
    """Merges attention over further keys (`part_SBNE`, `part_lse_SBN`) into `out_SBNE` and `lse_SBN`, in place."""
    total_SBN = torch.logaddexp(lse_SBN, part_lse_SBN)
    # if a query has seen no key so far, both log-sum-exps are -inf; its weights must be 0, not nan
    base_SBN = total_SBN.masked_fill(total_SBN == -math.inf, 0.0)
    out_SBNE.mul_((lse_SBN - base_SBN).exp()[..., None])
    out_SBNE.add_(part_SBNE * (part_lse_SBN - base_SBN).exp()[..., None])
    lse_SBN.copy_(total_SBN)


def attention_block_grad(
    block: AttentionBlock, found: AttentionResult, into: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of one block; uses the output and log-sum-exp of all keys (Dao et al., arXiv 2205.14135 section B.2)."""
    q_SBND, k_SBGD, v_SBGE, config, *_ = block
    num_heads, num_groups = q_SBND.shape[2], k_SBGD.shape[2]
    probs_BNSS = _probabilities(_logits(block), found.lse_SBN.permute(1, 2, 0))
    wide = probs_BNSS.dtype
    # dropout factor of every probability
    factor_BNSS = rng.dropout(torch.ones_like(probs_BNSS), config.dropout, block.dropout_key)
    grad_BNSE = _heads(found.grad_SBNE, num_heads, wide)
    grad_v_BNSE = (probs_BNSS * factor_BNSS).transpose(-1, -2) @ grad_BNSE
    grad_probs_BNSS = grad_BNSE @ _heads(v_SBGE, num_heads, wide).transpose(-1, -2) * factor_BNSS
    delta_SBN = (found.grad_SBNE.to(wide) * found.out_SBNE).sum(dim=-1)
    grad_logits_BNSS = probs_BNSS * (grad_probs_BNSS - delta_SBN.permute(1, 2, 0)[..., None])
    grad_logits_BNSS = grad_logits_BNSS * config.softmax_scale
    grad_q_BNSD = grad_logits_BNSS @ _heads(k_SBGD, num_heads, wide)
    grad_k_BNSD = grad_logits_BNSS.transpose(-1, -2) @ _heads(q_SBND, num_heads, wide)
    grad_q_SBND, grad_k_SBGD, grad_v_SBGE = into = into or no_gradients(block)
    grad_q_SBND += grad_q_BNSD.permute(2, 0, 1, 3)
    grad_k_SBGD += _groups(grad_k_BNSD, num_groups)
    grad_v_SBGE += _groups(grad_v_BNSE, num_groups)
    return into


def max_logits_(block: AttentionBlock, lse_SBN: Tensor, maxima_N: Tensor, least: float) -> None:
    torch.maximum(maxima_N, _logits(block).amax(dim=(0, 2, 3)), out=maxima_N)


def visible_between(
    query: PositionSpan, key: PositionSpan, config: CoreAttentionConfig, device: torch.device
) -> Tensor:
    """Attention mask, bool [Sq, Sk] or [B, 1, Sq, Sk]: True where query i (dim -2) attends to key j (dim -1)."""
    back = query.positions(device)[:, None] - key.positions(device)[None, :]
    visible = torch.ones_like(back, dtype=torch.bool)
    if config.causal:
        visible = visible & (back >= 0)
    if config.window is not None:
        left, right = config.window
        visible = visible & (back <= left if left >= 0 else visible) & (-back <= right if right >= 0 else visible)
    if query.segments_BS is not None:
        assert key.segments_BS is not None, "queries have document ids, keys have none"
        visible = visible & (query.segments_BS[:, None, :, None] == key.segments_BS[:, None, None, :])
    return visible


def _logits(block: AttentionBlock) -> Tensor:
    """Attention logits [B, N, Sq, Sk]; -inf where the mask excludes the key."""
    q_SBND, k_SBGD, _, config, query, key, _ = block
    wide, num_heads = internal_dtype(q_SBND.dtype), q_SBND.shape[2]
    q_BNSD, k_BNSD = _heads(q_SBND, num_heads, wide), _heads(k_SBGD, num_heads, wide)
    logits_BNSS = q_BNSD @ k_BNSD.transpose(-1, -2) * config.softmax_scale
    return logits_BNSS.masked_fill(~visible_between(query, key, config, q_SBND.device), -math.inf)


def _probabilities(logits_BNSS: Tensor, lse_BNS: Tensor) -> Tensor:
    """Attention probabilities exp(logits - lse); 0 for queries that attend to no key, whose lse is -inf."""
    return (logits_BNSS - lse_BNS.masked_fill(lse_BNS == -math.inf, 0.0)[..., None]).exp()


def _heads(x_SBGD: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Repeats each group for its query heads: [S, B, G, D] -> [B, N, S, D]."""
    x_BGSD = x_SBGD.to(dtype).permute(1, 2, 0, 3)
    return x_BGSD.repeat_interleave(num_heads // x_BGSD.shape[1], dim=1)


def _groups(x_BNSD: Tensor, num_groups: int) -> Tensor:
    """Sums over the query heads of each group: [B, N, S, D] -> [S, B, G, D]."""
    return x_BNSD.unflatten(1, (num_groups, -1)).sum(dim=2).permute(2, 0, 1, 3)
