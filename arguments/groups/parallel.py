"""Parallelism flags."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import differs, flag
from arguments.values import FilePath


@dataclass(frozen=True, kw_only=True)
class ParallelFlags:
    """Tensor, context, expert and data parallelism."""

    tensor_model_parallel_size: int = flag(1, least=1)
    """Tensor-parallel size: number of ranks that shard attention, dense MLPs and the vocabulary."""
    sequence_parallel: bool = flag(False)
    """Shard the residual stream, norms and dropout along the sequence over tensor-parallel ranks."""
    tp_comm_overlap: bool = differs(
        False, "communicates by copy engines through symmetric memory of one host; quantised GEMMs are not overlapped"
    )
    """Overlap tensor-parallel communication with the GEMMs of mixers, dense MLPs and shared experts."""
    tp_comm_overlap_cfg: FilePath | None = differs(
        None, "`false` switches a GEMM off; methods and their settings have no effect"
    )
    """YAML file that maps GEMMs (`qkv_fprop`, `fc1_dgrad`, ...) to settings of `--tp-comm-overlap`."""
    tp_comm_overlap_ag: bool = flag(True, off=("--disable-tp-comm-overlap-ag",))
    """With `--tp-comm-overlap`, overlap all-gathers with the GEMMs that multiply the gathered tensor."""
    tp_comm_overlap_rs: bool = flag(True, off=("--disable-tp-comm-overlap-rs",))
    """With `--tp-comm-overlap`, overlap reduce-scatters with the GEMMs that compute their input, in forward."""
    tp_comm_bulk_dgrad: bool = flag(True, off=("--disable-tp-comm-bulk-dgrad",))
    """With `--tp-comm-overlap`, overlap the all-gather for a weight gradient with the GEMM of the input gradient."""
    tp_comm_bulk_wgrad: bool = flag(True, off=("--disable-tp-comm-bulk-wgrad",))
    """With `--tp-comm-overlap`, overlap the reduce-scatter of an input gradient with both GEMMs of the backward."""
    context_parallel_size: int = flag(1, least=1)
    """Context-parallel size: number of ranks that shard the sequence."""
    expert_model_parallel_size: int = flag(1, least=1)
    """Expert-parallel size: number of ranks over which the experts of a layer are distributed."""
    expert_tensor_parallel_size: int | None = flag(None, least=1)
    """Tensor-parallel size of experts. Default: the tensor-parallel size."""
    use_tp_pp_dp_mapping: bool = flag(False)
    """Rank order tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp: the pipeline rank varies faster than the dp rank."""
    cp_comm_type: tuple[Literal["p2p", "allgather", "all_gather", "a2a", "a2a+p2p"], ...] = flag(("p2p",))
    """Context-parallel communication: a ring (p2p) or an all-gather for keys and values, an all-to-all for heads (a2a),
    or an all-to-all and a ring on two levels (a2a+p2p). Give one value for all layers or one per layer."""
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(None, least=1)
    """For `--cp-comm-type a2a+p2p`: all-to-all and ring group sizes, whose product is the context-parallel size."""
    distributed_timeout_minutes: int = flag(10, least=1)
    """Collective timeout in minutes."""

    overlap_moe_expert_parallel_comm: bool = differs(
        False, "supports every precision and does not change results; no effect with one expert-parallel rank"
    )
    """Overlap expert-parallel communication with computation of another microbatch."""
    delay_wgrad_compute: bool = differs(
        False,
        "requires no other flag: pipeline stages send input gradients first and compute weight gradients when they "
        "would be idle",
    )
    """Compute weight gradients separately after the input gradients, instead of together with them."""
    overlap_dispatch_backward_with_experts_wgrad: bool = differs(
        False,
        "also overlaps the backward of combine with the other weight gradients; no effect with one expert-parallel "
        "rank",
    )
    """Overlap the dispatch backward with the weight gradients of the experts."""

    high_priority_a2a_comm_stream: bool = flag(False)
    """Run expert communication on CUDA streams of high priority."""

    use_distributed_optimizer: bool = flag(False)
    """Shard optimizer state over data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = flag(False)
    """Overlap gradient reduction with the backward pass."""
    overlap_param_gather: bool = flag(False)
    """Overlap the parameter all-gather with the forward pass."""
    ddp_num_buckets: int | None = differs(
        None, "the number is approximate, because parameters with different settings never share a bucket", least=1
    )
    """Number of gradient buckets per rank."""
    ddp_bucket_size: int | None = differs(
        None, "applies to all pipeline stages, with and without --overlap-grad-reduce", least=1
    )
    """Number of elements per gradient bucket. Default: 1 million per data-parallel rank, but at least 40 million."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = flag(False)
    """Pad gradient buckets to multiples of 2^16 elements, for a higher NCCL bus bandwidth."""
    ddp_average_in_collective: bool = flag(False)
    """Average gradients in the collective instead of summing them and scaling the sum."""
    ddp_reduce_scatter_with_fp32_accumulation: bool = flag(False)
    """Communicate bf16 gradients but accumulate them in fp32."""

    dynamic_context_parallel: bool = differs(
        False,
        "all sequences of a microbatch use the same group size and are divided among the groups",
        names=("--hybrid-context-parallel",),
    )
    """Split each microbatch over the smallest number of context-parallel ranks that its longest document requires."""
    max_seqlen_per_dp_cp_rank: int | None = flag(None, least=1)
    """For --dynamic-context-parallel: maximum number of tokens of one document on each rank. Default: --seq-length
    divided by the context-parallel size, rounded up."""
    min_dynamic_context_parallel_size: int = flag(1, least=1)
    """For --dynamic-context-parallel: minimum number of ranks over which each sequence is split."""
    ep_overlap_early_attn_memory_release: bool = flag(False)
    """With --overlap-moe-expert-parallel-comm, run the attention backward earlier: less memory, less overlap."""


@dataclass(frozen=True, kw_only=True)
class PipelineFlags:
    """Assignment of layers to pipeline stages, and pipeline schedule."""

    pipeline_model_parallel_size: int = flag(1, least=1)
    """Pipeline-parallel size: number of ranks among which the layers are divided."""
    pipeline_model_parallel_layout: str | None = differs(
        None, "`auto` (not in Megatron-LM) computes a layout that balances FLOPs"
    )
    """Layers of each pipeline stage, such as Et*3|(tt|)*29m|L, or `auto`. E: embedding, t: layer, m: MTP layer, L:
    loss, |: end of a stage, *N: repeated N times."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, least=1)
    """Number of layers per virtual stage."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, least=1)
    """Number of virtual stages per pipeline rank."""
    decoder_first_pipeline_num_layers: int | None = flag(None, least=0)
    """Number of layers on the first pipeline rank; the other ranks divide the remaining layers."""
    decoder_last_pipeline_num_layers: int | None = flag(None, least=0)
    """Number of layers on the last pipeline rank; the other ranks divide the remaining layers."""
    account_for_embedding_in_pipeline_split: bool = flag(False)
    """Count the embedding as a layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = flag(False)
    """Count the output layer and loss as a layer of the last stage."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(None, least=1)
    """Number of consecutive microbatches that a rank runs per virtual stage. Default: the pipeline-parallel size."""
