"""Flags of fully sharded data parallelism."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import differs, flag, new_flag, refused


@dataclass(frozen=True, kw_only=True)
class FSDPFlags:
    """Fully sharded data parallelism: ZeRO-1 to ZeRO-3, hybrid sharding."""

    use_megatron_fsdp: bool = flag(False)
    """Shard optimizer state, gradients and weights over data-parallel ranks (`--data-parallel-sharding-strategy`)."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = flag(
        "optim_grads_params"
    )
    """State that --use-megatron-fsdp shards: nothing (no_shard), optimizer state (optim, ZeRO-1), also gradients
    (optim_grads, ZeRO-2), or also weights (optim_grads_params, ZeRO-3)."""
    num_distributed_optimizer_instances: int = differs(
        1, "without gradient sharding, optimizer state is sharded over all data-parallel ranks", least=1
    )
    """Number of replicas of sharded gradients and weights (hybrid sharding); it must divide the data-parallel size."""
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = flag("no_shard")
    """Whether the replicas of sharded weights also shard the optimizer state among each other (optim)."""
    fsdp_double_buffer: bool = flag(False)
    """Gather weights into two buffers at fixed addresses. With sharded weights, CUDA graphs imply it."""
    fsdp_gather_backend: Literal["auto", "nccl"] = new_flag("auto")
    """How sharded weights are gathered. auto: on GPUs of one host, by copies from the memory of the other GPUs, which
    occupy no SM; otherwise NCCL."""
    fsdp_reduce_backend: Literal["auto", "nccl"] = new_flag("auto")
    """How gradients are reduced to shards. auto: on GPUs of one host, by copies to the memory of the other GPUs and a
    sum in fp32; otherwise NCCL."""
    init_model_with_meta_device: bool = differs(False, "has an effect only with gradient sharding")
    """Create and initialise the model unit by unit, so that the full weights are never in memory at the same time."""
    megatron_fsdp_main_params_dtype: Literal["fp32", "fp16", "auto"] = differs(
        "auto", "auto uses --main-params-dtype; bf16 is not available"
    )
    """Dtype of the master weights with --use-megatron-fsdp."""
    megatron_fsdp_main_grads_dtype: Literal["fp32", "bf16", "auto"] = differs(
        "auto", "auto is fp32, or bf16 with --grad-reduce-in-bf16"
    )
    """Dtype in which sharded gradients are accumulated over microbatches."""
    megatron_fsdp_grad_comm_dtype: Literal["fp32", "bf16", "auto"] = flag("auto")
    """Dtype in which gradients are computed and reduced; auto: the dtype in which they are accumulated."""
    suggested_communication_unit_size: int | None = differs(
        None, "no effect: one collective transfers the dense or the expert weights of one layer", least=1
    )
    """Number of elements per collective."""
    use_torch_fsdp2: bool = refused(
        False, "use --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    )
    """Shard parameters over data-parallel ranks (torch FSDP2)."""
