"""The sizes of the grids, and what follows from them for sequence, batch and buckets."""

from math import lcm

from arguments.proxy.draft import Draft
from arguments.proxy.fold import Sizes

SEQUENCE = 64
WINDOW = 16
"""Tokens that a windowed layer sees: fewer than there are."""
BUCKET = 16384
"""Elements in a bucket: several buckets, as at full size."""

_FOLDED = "folded to the ranks at hand"
_SHORTER = "a shorter sequence"


def fold_ranks(draft: Draft, sizes: Sizes) -> None:
    """The parallel sizes."""
    draft.put("tensor_model_parallel_size", sizes.tp, _FOLDED)
    draft.put("context_parallel_size", sizes.cp, _FOLDED)
    draft.put("pipeline_model_parallel_size", sizes.pp, _FOLDED)
    draft.put("expert_model_parallel_size", sizes.ep, _FOLDED)
    if draft.value("expert_tensor_parallel_size") is not None:
        draft.put("expert_tensor_parallel_size", sizes.etp, _FOLDED)
    if draft.value("hierarchical_context_parallel_sizes") is not None:
        levels = (2, sizes.cp // 2) if sizes.cp % 2 == 0 else (1, sizes.cp)
        draft.put("hierarchical_context_parallel_sizes", levels, _FOLDED)
    over_ranks = sizes.ep * sizes.etp > 1 and draft.value("moe_token_dispatcher_type") == "alltoall"
    if over_ranks and draft.value("moe_paged_stash"):
        draft.default("moe_paged_stash", "an all-to-all leaves no room unused that pages could save")


def lower_length(draft: Draft, sizes: Sizes) -> None:
    """A shorter sequence, which the ranks still share, with shorter windows and positions."""
    full = draft.value("seq_length")
    unit = lcm(2 * sizes.cp if sizes.cp > 1 else 1, sizes.cp * sizes.tp)
    length = -(-min(full, SEQUENCE) // unit) * unit
    draft.put("seq_length", length, _SHORTER)
    length = draft.value("seq_length")
    draft.lower("max_position_embeddings", length, _SHORTER)
    if draft.value("window_size") is not None:
        draft.put("window_size", tuple(min(side, WINDOW - 1) for side in draft.value("window_size")), _SHORTER)
    limit = draft.value("max_seqlen_per_dp_cp_rank")
    if limit is not None:
        draft.put("max_seqlen_per_dp_cp_rank", max(1, limit * length // full), _SHORTER)


def lower_batch(draft: Draft, sizes: Sizes) -> None:
    """Two microbatches per stage, or as few as there were."""
    reason = "a smaller batch"
    draft.lower("micro_batch_size", 2, reason)
    per_microbatch = draft.value("micro_batch_size") * sizes.dp
    full = draft.value("global_batch_size")
    if full is not None or sizes.pp > 1:
        draft.put("global_batch_size", 2 * sizes.pp * per_microbatch, reason)
    group = draft.value("microbatch_group_size_per_virtual_pipeline_stage")
    if group is not None:
        draft.put("microbatch_group_size_per_virtual_pipeline_stage", sizes.pp, reason)
    if draft.value("overlap_grad_reduce") and draft.value("ddp_num_buckets") is None:
        draft.put("ddp_bucket_size", BUCKET, "several buckets, as at full size")
