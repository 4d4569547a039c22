"""Sizes of the grids over ranks, and how gradients and parameters travel between data-parallel ranks."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class ParallelFlags:
    """Tensor, context, expert and data parallelism."""

    tensor_model_parallel_size: int = flag(1, least=1)
    """Ranks that split attention, dense blocks and the vocabulary."""
    sequence_parallel: bool = flag(False)
    """Split the residual stream, its norms and its dropout along the sequence over tensor-parallel ranks."""
    context_parallel_size: int = flag(1, least=1)
    """Ranks that split the sequence."""
    expert_model_parallel_size: int = flag(1, least=1)
    """Ranks over which the experts are spread."""
    expert_tensor_parallel_size: int | None = flag(None, least=1)
    """Ranks that split one expert. Not set: the tensor-parallel size."""
    use_tp_pp_dp_mapping: bool = flag(False)
    """Pipeline stages before data-parallel ranks in the order of ranks."""
    cp_comm_type: tuple[Literal["p2p", "allgather", "all_gather", "a2a", "a2a+p2p"], ...] = flag(("p2p",))
    """How context-parallel ranks exchange keys and values: around a ring, gathered, heads against places, or both; one
    value, or one per layer."""
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(None, least=1)
    """Of a2a+p2p: ranks that exchange heads, and ranks of the ring between them; their product is the context-parallel
    size."""
    distributed_timeout_minutes: int = flag(10, least=1)
    """How long a collective may wait."""

    overlap_moe_expert_parallel_comm: bool = flag(
        False, status="close", note="any precision, no change of numbers; on one expert-parallel rank the plain order"
    )
    """Hide expert communication behind another microbatch."""
    delay_wgrad_compute: bool = flag(
        False, status="close", note="needs no other flag: a stage sends its input's gradient before it computes them"
    )
    """Compute weight gradients later than input gradients."""

    use_distributed_optimizer: bool = flag(False)
    """Shard the optimizer's state over data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = flag(False)
    """Reduce gradients during the backward pass."""
    overlap_param_gather: bool = flag(False)
    """Gather parameters during the forward pass."""
    ddp_num_buckets: int | None = flag(
        None, least=1, status="close", note="about that many: parameters that differ in their treatment never share one"
    )
    """Number of gradient buckets of a rank."""
    ddp_bucket_size: int | None = flag(
        None, least=1, status="close", note="on every pipeline stage, and without --overlap-grad-reduce too"
    )
    """Elements in a gradient bucket. Not set: 40 million, or 1 million per rank if that is more."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = flag(False)
    """Pad buckets to multiples of 2^16 elements."""
    ddp_average_in_collective: bool = flag(False)
    """Average inside of the collective."""
    ddp_reduce_scatter_with_fp32_accumulation: bool = flag(False)
    """Sum gradients that travel in bf16 in fp32."""

    use_megatron_fsdp: bool = flag(False, status="not yet", note="use data parallelism")
    """Shard parameters over data-parallel ranks."""
    use_torch_fsdp2: bool = flag(False, status="not yet", note="use data parallelism")
    """Shard parameters with torch's FSDP2."""
    hybrid_context_parallel: bool = flag(
        False,
        names=("--dynamic-context-parallel",),
        status="close",
        note="among the context-parallel ranks, one degree per microbatch; smaller groups share its sequences",
    )
    """Split a microbatch over as few context-parallel ranks as its longest document needs."""
    max_seqlen_per_dp_cp_rank: int | None = flag(None, least=1)
    """Of --hybrid-context-parallel: tokens of one document that a rank holds at most."""
    ep_overlap_early_attn_memory_release: bool = flag(False)
    """Of --overlap-moe-expert-parallel-comm: run the backward pass of attention earlier, which hides less."""
