"""Rules about ranks, batches, the length of a run, learning rate and weight decay."""

from math import isqrt

from arguments import derive
from arguments.checks.violation import Violation
from megatron_moe.config.exit_codes import counted


def attention_grid_covers_the_world(
    world_size: int,
    tensor_model_parallel_size: int,
    context_parallel_size: int,
    pipeline_model_parallel_size: int,
) -> Violation:
    """Ranks that do not split the model hold copies of it: the sizes divide the number of ranks."""
    product = tensor_model_parallel_size * context_parallel_size * pipeline_model_parallel_size
    if world_size % product == 0:
        return None
    return (
        f"the model cannot be split: {tensor_model_parallel_size} x {context_parallel_size} x "
        f"{pipeline_model_parallel_size} = {product} "
        f"does not divide {counted(world_size, 'rank')}",
        _nearest(
            world_size,
            product,
            {
                "--pipeline-model-parallel-size": pipeline_model_parallel_size,
                "--context-parallel-size": context_parallel_size,
                "--tensor-model-parallel-size": tensor_model_parallel_size,
            },
        ),
    )


def expert_grid_covers_the_world(
    world_size: int,
    expert_tensor_parallel_size: int | None,
    tensor_model_parallel_size: int,
    expert_model_parallel_size: int,
    pipeline_model_parallel_size: int,
) -> Violation:
    """Ranks that do not split the experts hold copies of them: the sizes divide the number of ranks."""
    etp = expert_tensor_parallel_size or tensor_model_parallel_size
    product = etp * expert_model_parallel_size * pipeline_model_parallel_size
    if world_size % product == 0:
        return None
    return (
        f"experts cannot be folded: {etp} x {expert_model_parallel_size} x {pipeline_model_parallel_size} = {product} "
        f"does not divide {counted(world_size, 'rank')}",
        _nearest(
            world_size,
            product,
            {
                "--expert-model-parallel-size": expert_model_parallel_size,
                "--pipeline-model-parallel-size": pipeline_model_parallel_size,
                "--expert-tensor-parallel-size": etp,
            },
        ),
    )


def pipelines_are_those_of_both_grids(
    use_tp_pp_dp_mapping: bool,
    pipeline_model_parallel_size: int,
    tensor_model_parallel_size: int,
    context_parallel_size: int,
    expert_tensor_parallel_size: int | None,
    expert_model_parallel_size: int,
) -> Violation:
    """Attention and experts of a layer stand on the same stage. With stages inside of data parallelism, a stage is as
    many ranks as attention is split over, and as many as experts are."""
    if not use_tp_pp_dp_mapping or pipeline_model_parallel_size == 1:
        return None
    etp = expert_tensor_parallel_size or tensor_model_parallel_size
    attention, experts = tensor_model_parallel_size * context_parallel_size, etp * expert_model_parallel_size
    if attention == experts:
        return None
    remedy = "leave out --use-tp-pp-dp-mapping"
    if attention % etp == 0:
        remedy += f", or --expert-model-parallel-size {attention // etp}"
    return (
        f"--use-tp-pp-dp-mapping: stages of {tensor_model_parallel_size} x {context_parallel_size} = "
        f"{counted(attention, 'rank')} (tensor x context) are not stages of {etp} x {expert_model_parallel_size} = "
        f"{counted(experts, 'rank')} (expert-tensor x expert)",
        remedy,
    )


def _nearest(world_size: int, product: int, sizes: dict[str, int]) -> str:
    """What comes next below each size and fits these ranks when only that size changes, and ranks that fit all."""
    near = []
    for option, size in sizes.items():
        others = product // size
        share = world_size // others if world_size % others == 0 else 0
        small = [divisor for divisor in range(1, isqrt(share) + 1) if share % divisor == 0]
        fits = [divisor for low in small for divisor in (low, share // low) if divisor < size]
        if fits:
            near.append(f"{option} {max(fits)} ({others} x {max(fits)} = {others * max(fits)})")
    more = -(-world_size // product) * product
    return f"nearest: {', or '.join([*near, f'{more} ranks'])}"


def ranks_share_the_experts(num_experts: int | None, expert_model_parallel_size: int) -> Violation:
    """Every expert-parallel rank holds the same number of experts."""
    if not num_experts and expert_model_parallel_size > 1:
        return f"{expert_model_parallel_size} ranks have no experts to share", "give --num-experts"
    if not num_experts or num_experts % expert_model_parallel_size == 0:
        return None
    return (
        f"{expert_model_parallel_size} ranks do not divide {counted(num_experts, 'expert')}",
        "use a divisor of --num-experts for --expert-model-parallel-size",
    )


def microbatches_make_the_batch(
    data_parallel_size: int, micro_batch_size: int, global_batch_size: int | None
) -> Violation:
    """A step is a whole number of microbatches on every data-parallel rank."""
    unit = micro_batch_size * data_parallel_size
    if global_batch_size is None or global_batch_size % unit == 0:
        return None
    near = max(unit, round(global_batch_size / unit) * unit)
    return (
        f"a global batch of {global_batch_size} is not a multiple of {unit} = "
        f"{counted(micro_batch_size, 'sequence')} x {counted(data_parallel_size, 'data-parallel rank')}",
        f"--global-batch-size {near}, or another --micro-batch-size",
    )


def batch_grows_in_whole_steps(
    data_parallel_size: int,
    rampup_batch_size: tuple[int, int, int] | None,
    global_batch_size: int | None,
    micro_batch_size: int,
) -> Violation:
    """The batch grows from its start to its full size in equal steps, and every size divides into microbatches."""
    if rampup_batch_size is None:
        return None
    start, increment, _ = rampup_batch_size
    full = derive.global_batch_size(global_batch_size, micro_batch_size, data_parallel_size)
    unit = micro_batch_size * data_parallel_size
    if start > full:
        return f"the batch starts with {start} sequences, more than its full size {full}", "start with less"
    if (full - start) % increment:
        return (
            f"the batch cannot grow from {start} to {full} in steps of {increment}",
            f"use an increment that divides {full - start}",
        )
    if start % unit or (full > start and increment % unit):
        return (
            f"batches of {start}, {start + increment}, ... sequences are not multiples of {unit} = "
            f"{counted(micro_batch_size, 'sequence')} x {counted(data_parallel_size, 'data-parallel rank')}",
            f"use multiples of {unit} for start and increment",
        )
    return None


def length_is_given_once(train_iters: int | None, train_samples: int | None) -> Violation:
    """A run is as long as its iterations or its samples say."""
    if train_iters is None and train_samples is None:
        return "the length of the run is not given", "give --train-iters or --train-samples"
    if train_iters is not None and train_samples is not None:
        return "the length of the run is given twice", "keep --train-iters or --train-samples"
    return None


def samples_fill_a_batch(
    train_samples: int | None,
    rampup_batch_size: tuple[int, int, int] | None,
    global_batch_size: int | None,
) -> Violation:
    """A step takes a whole batch."""
    first = rampup_batch_size[0] if rampup_batch_size else global_batch_size
    if train_samples is None or first is None or train_samples >= first:
        return None
    return f"--train-samples {train_samples} does not fill one batch of {first}", "train on more samples"


def schedule_counts_like_the_run(
    train_iters: int | None,
    train_samples: int | None,
    lr_decay_iters: int | None,
    lr_warmup_iters: int,
    lr_wsd_decay_iters: int | None,
    lr_decay_samples: int | None,
    lr_warmup_samples: int,
    lr_wsd_decay_samples: int | None,
) -> Violation:
    """The learning rate is scheduled in the unit in which the run is counted."""
    if train_iters is not None and (lr_decay_samples or lr_warmup_samples or lr_wsd_decay_samples):
        return "the run is counted in iterations, but its learning rate in samples", "use the --lr-*-iters flags"
    if train_samples is not None and (lr_decay_iters or lr_warmup_iters or lr_wsd_decay_iters):
        return "the run is counted in samples, but its learning rate in iterations", "use the --lr-*-samples flags"
    return None


def warm_up_is_given_once(lr_warmup_fraction: float | None, lr_warmup_iters: int, lr_warmup_samples: int) -> Violation:
    """Warm-up has one length."""
    if lr_warmup_fraction is not None and (lr_warmup_iters or lr_warmup_samples):
        return "the length of warm-up is given twice", "keep --lr-warmup-fraction or the number"
    return None


def warm_up_ends_before_decay(
    train_iters: int | None,
    train_samples: int | None,
    lr_decay_iters: int | None,
    lr_decay_samples: int | None,
    lr_warmup_iters: int,
    lr_warmup_samples: int,
) -> Violation:
    """The learning rate first rises, then falls."""
    for unit, length, decay, warmup in (
        ("iterations", train_iters, lr_decay_iters, lr_warmup_iters),
        ("samples", train_samples, lr_decay_samples, lr_warmup_samples),
    ):
        end = length if decay is None else decay
        if length is not None and end is not None and warmup >= end:
            return (
                f"warm-up of {warmup} {unit} does not end before decay does at {end}",
                "warm up for less, or decay later",
            )
    return None


def learning_rates_are_in_order(lr: float, min_lr: float, lr_warmup_init: float) -> Violation:
    """The largest learning rate is the largest."""
    if min_lr > lr:
        return f"the smallest learning rate {min_lr:g} is above the largest {lr:g}", "lower --min-lr or raise --lr"
    if lr_warmup_init > lr:
        return f"warm-up starts at {lr_warmup_init:g}, above the largest learning rate {lr:g}", "lower --lr-warmup-init"
    return None


def decoupled_rates_are_in_order(
    decoupled_lr: float | None, decoupled_min_lr: float | None, min_lr: float
) -> Violation:
    """Embedding and head have a largest and a smallest learning rate of their own; without the latter that of all."""
    if decoupled_lr is None:
        if decoupled_min_lr is None:
            return None
        return "--decoupled-min-lr has no largest learning rate beside it", "give --decoupled-lr"
    smallest = min_lr if decoupled_min_lr is None else decoupled_min_lr
    if smallest > decoupled_lr:
        return (
            f"the smallest decoupled learning rate {smallest:g} is above the largest {decoupled_lr:g}",
            f"--decoupled-min-lr {decoupled_lr:g} or less",
        )
    return None


def annealing_has_a_length(
    lr_decay_style: str, lr_wsd_decay_iters: int | None, lr_wsd_decay_samples: int | None
) -> Violation:
    """WSD holds the learning rate and anneals it in a last part of known length."""
    if lr_decay_style == "WSD" and lr_wsd_decay_iters is None and lr_wsd_decay_samples is None:
        return "WSD does not know how long to anneal", "give --lr-wsd-decay-iters or --lr-wsd-decay-samples"
    return None


def annealing_fits_behind_warm_up(
    lr_decay_style: str,
    train_iters: int | None,
    train_samples: int | None,
    lr_decay_iters: int | None,
    lr_decay_samples: int | None,
    lr_warmup_iters: int,
    lr_warmup_samples: int,
    lr_wsd_decay_iters: int | None,
    lr_wsd_decay_samples: int | None,
) -> Violation:
    """WSD warms up, holds, and anneals, one after the other."""
    for unit, length, decay, warmup, annealing in (
        ("iterations", train_iters, lr_decay_iters, lr_warmup_iters, lr_wsd_decay_iters),
        ("samples", train_samples, lr_decay_samples, lr_warmup_samples, lr_wsd_decay_samples),
    ):
        end = length if decay is None else decay
        if lr_decay_style != "WSD" or length is None or end is None or annealing is None:
            continue
        if warmup + annealing > end:
            return (
                f"{annealing} {unit} of annealing and {warmup} of warm-up are more than the {end} until decay ends",
                "shorten one of them",
            )
    return None


def weight_decay_ramp_is_complete(
    weight_decay_incr_style: str, start_weight_decay: float | None, end_weight_decay: float | None
) -> Violation:
    """A changing weight decay has a start and an end; a constant one is --weight-decay."""
    if weight_decay_incr_style == "constant":
        if start_weight_decay is not None or end_weight_decay is not None:
            return (
                "a constant weight decay has no start and end",
                "use --weight-decay, or --weight-decay-incr-style linear",
            )
        return None
    if start_weight_decay is None or end_weight_decay is None:
        return "a changing weight decay needs a start and an end", "give --start-weight-decay and --end-weight-decay"
    if end_weight_decay < start_weight_decay:
        return f"weight decay cannot grow from {start_weight_decay:g} to {end_weight_decay:g}", "let it end higher"
    return None


def one_schedule_wins(override_opt_param_scheduler: bool, use_checkpoint_opt_param_scheduler: bool) -> Violation:
    """On resume either the command line's schedule or the checkpoint's is used."""
    if override_opt_param_scheduler and use_checkpoint_opt_param_scheduler:
        return "both the command line's and the checkpoint's learning rate shall win", "keep one of the two"
    return None


def one_format(bf16: bool, fp16: bool, fp64: bool) -> Violation:
    """Parameters have one format."""
    if bf16 + fp16 + fp64 > 1:
        return "several formats of parameters are asked for", "keep one; none of them is fp32"
    return None


RULES = (
    attention_grid_covers_the_world,
    expert_grid_covers_the_world,
    pipelines_are_those_of_both_grids,
    ranks_share_the_experts,
    microbatches_make_the_batch,
    batch_grows_in_whole_steps,
    length_is_given_once,
    samples_fill_a_batch,
    schedule_counts_like_the_run,
    warm_up_is_given_once,
    warm_up_ends_before_decay,
    learning_rates_are_in_order,
    decoupled_rates_are_in_order,
    annealing_has_a_length,
    annealing_fits_behind_warm_up,
    weight_decay_ramp_is_complete,
    one_schedule_wins,
    one_format,
)
