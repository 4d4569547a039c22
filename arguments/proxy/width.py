"""Fewer and narrower heads, experts and feed-forward blocks. The ratios on which code paths depend stay."""

from math import gcd, lcm

from arguments import derive
from arguments.proxy.draft import Draft
from arguments.proxy.fold import Sizes

HIDDEN = 64
DENSE = 128
EXPERT = 64
HEAD = 16
LATENT = 32
VOCABULARY = 512
MOST_CHOICES = 4
FEW_EXPERTS = 8

_REASON = "narrower"


def lower_width(draft: Draft, sizes: Sizes) -> None:
    """Rewrites every width. `sizes` are the ranks that share them."""
    _narrow_heads(draft)
    _narrow_blocks(draft, sizes)
    _fewer_heads(draft, sizes)
    _smaller_vocabulary(draft, sizes)
    if draft.value("num_experts"):
        _fewer_experts(draft, sizes)


def _narrow_blocks(draft: Draft, sizes: Sizes) -> None:
    draft.lower("hidden_size", HIDDEN, _REASON)
    draft.lower("ffn_hidden_size", _multiple(DENSE, sizes.tp), _REASON)
    draft.lower("moe_ffn_hidden_size", _multiple(EXPERT, sizes.etp), _REASON)
    draft.lower("moe_shared_expert_intermediate_size", _multiple(EXPERT, sizes.tp), _REASON)
    draft.lower("moe_latent_size", LATENT, _REASON)


def _narrow_heads(draft: Draft) -> None:
    """Heads stay wide enough that a whole even number of dims is rotated."""
    if draft.value("multi_latent_attention"):
        draft.lower("q_lora_rank", LATENT, _REASON)
        draft.lower("kv_lora_rank", LATENT, _REASON)
        draft.lower("qk_head_dim", HEAD, _REASON)
        draft.lower("v_head_dim", HEAD, _REASON)
        draft.lower("qk_pos_emb_head_dim", HEAD // 2, _REASON)
        return
    full = derive.head_dim(draft.value("kv_channels"), draft.value("hidden_size"), draft.value("num_attention_heads"))
    share = draft.value("rotary_percent") if draft.value("position_embedding_type") in ("rope", "yarn") else 1.0
    widths = [width for width in (HEAD, 2 * HEAD, 4 * HEAD) if width < full]
    rotated = [width for width in widths if int(width * share) > 0 and int(width * share) % 2 == 0]
    draft.put("kv_channels", min(rotated, default=full), _REASON)


def _fewer_heads(draft: Draft, sizes: Sizes) -> None:
    """One or two query groups on every rank, with one or two heads each, or what an exchange of heads needs.

    Groups that several ranks share remain shared.
    """
    tp = draft.value("tensor_model_parallel_size")
    heads, grouped = draft.value("num_attention_heads"), draft.value("group_query_attention")
    groups = draft.value("num_query_groups") if grouped else heads
    per_rank, per_group = min(max(groups // tp, 1), 2), min(heads // max(groups, tp), 2)
    exchanging = sizes.cp if "a2a" in draft.value("cp_comm_type") else 1  # two levels exchange among pairs, which fit
    if exchanging > 1:
        per_rank = per_rank if exchanging % per_rank == 0 else 1
        per_group *= exchanging // gcd(per_rank * per_group, exchanging)
    draft.put("num_attention_heads", sizes.tp * per_rank * per_group, "fewer heads")
    if grouped:
        ranks_per_group = gcd(max(tp // groups, 1), sizes.tp)
        draft.put("num_query_groups", sizes.tp * per_rank // ranks_per_group, "fewer heads")


def _smaller_vocabulary(draft: Draft, sizes: Sizes) -> None:
    size = _multiple(VOCABULARY, sizes.tp)
    draft.put("vocab_size", min(draft.value("vocab_size") or size, size), "a smaller vocabulary")
    draft.lower("make_vocab_size_divisible_by", VOCABULARY // 4, "a smaller vocabulary")
    if draft.value("padded_vocab_size") is not None:
        draft.put("padded_vocab_size", size, "a smaller vocabulary")


def _fewer_experts(draft: Draft, sizes: Sizes) -> None:
    """As many choices per group as before, but at most two; more than one expert per rank where there were more."""
    experts, chosen = draft.value("num_experts"), draft.value("moe_router_topk")
    groups, allowed = draft.value("moe_router_num_groups") or 1, draft.value("moe_router_group_topk")
    few_groups = min(groups, 4)
    few_allowed = allowed and min(allowed, max(few_groups // 2, 1))
    few_chosen = min(chosen, MOST_CHOICES)
    if few_allowed:
        few_chosen = few_allowed * max(1, min(chosen // allowed, MOST_CHOICES // few_allowed))
    ep = sizes.ep
    several = 2 if experts > draft.value("expert_model_parallel_size") else 1
    enough = max(FEW_EXPERTS, several * ep, 2 * few_chosen, few_groups * -(-few_chosen // (few_allowed or few_groups)))
    few = _multiple(enough, lcm(ep, few_groups))
    if chosen == experts or (experts < few and experts % lcm(ep, few_groups) == 0):
        few = experts
    reason = "fewer experts"
    draft.put("num_experts", few, reason)
    draft.put("moe_router_topk", few if chosen == experts else few_chosen, reason)
    if draft.value("moe_router_num_groups"):
        draft.put("moe_router_num_groups", few_groups, reason)
        draft.put("moe_router_group_topk", few_allowed, reason)


def _multiple(number: int, unit: int) -> int:
    return -(-number // unit) * unit
