"""Rules about how gradients and weights travel between data-parallel ranks."""

from arguments.checks.complaint import Complaint


def weights_travel_when_shards_are_stepped(
    overlap_param_gather: bool, use_distributed_optimizer: bool, overlap_grad_reduce: bool
) -> Complaint:
    """Only a sharded optimizer gathers weights, and its gradients come in the same buckets."""
    if not overlap_param_gather or (use_distributed_optimizer and overlap_grad_reduce):
        return None
    missing = "--overlap-grad-reduce" if use_distributed_optimizer else "--use-distributed-optimizer"
    return f"--overlap-param-gather without {missing} has nothing to overlap", f"give {missing}"


def buckets_have_one_size(ddp_bucket_size: int | None, ddp_num_buckets: int | None) -> Complaint:
    """The size of a bucket follows from their number."""
    if ddp_bucket_size is not None and ddp_num_buckets is not None:
        return f"buckets of {ddp_bucket_size} elements and {ddp_num_buckets} of them are both given", "keep one of them"
    return None


def token_sums_are_not_averaged(ddp_average_in_collective: bool, calculate_per_token_loss: bool) -> Complaint:
    """With a loss per token gradients are summed over ranks and divided by the tokens of all ranks."""
    if ddp_average_in_collective and calculate_per_token_loss:
        return "a mean over ranks is not a mean over tokens", "leave --ddp-average-in-collective out"
    return None


def fp32_sums_are_sharded(
    ddp_reduce_scatter_with_fp32_accumulation: bool, use_distributed_optimizer: bool
) -> Complaint:
    """Gradients are summed where they arrive, each shard at its owner."""
    if ddp_reduce_scatter_with_fp32_accumulation and not use_distributed_optimizer:
        return "only a sharded optimizer sums gradients in shards", "give --use-distributed-optimizer"
    return None


def bf16_gradients_are_of_bf16_weights(grad_reduce_in_bf16: bool, bf16: bool) -> Complaint:
    """Gradients are not kept in a narrower format than the weights."""
    if grad_reduce_in_bf16 and not bf16:
        return "gradients in bf16 of weights in a wider format", "give --bf16, or leave --grad-reduce-in-bf16 out"
    return None


RULES = (
    weights_travel_when_shards_are_stepped,
    buckets_have_one_size,
    token_sums_are_not_averaged,
    fp32_sums_are_sharded,
    bf16_gradients_are_of_bf16_weights,
)
