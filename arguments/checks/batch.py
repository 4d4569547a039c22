"""Rules about the rank grids, batch sizes, run length, learning rate and weight decay."""

from math import isqrt

from arguments import derive
from arguments.checks.violation import Violation, functions_returning
from megatron_moe.config.exit_codes import counted


def model_parallel_sizes_divide_world(
    world_size: int, tensor_model_parallel_size: int, context_parallel_size: int, pipeline_model_parallel_size: int
) -> Violation:
    """The remaining ranks are data parallel: the model-parallel sizes must divide the number of ranks."""
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


def expert_parallel_sizes_divide_world(
    world_size: int,
    expert_tensor_parallel_size: int | None,
    tensor_model_parallel_size: int,
    expert_model_parallel_size: int,
    pipeline_model_parallel_size: int,
) -> Violation:
    """The remaining ranks hold replicas of the experts: the expert-parallel sizes must divide the number of ranks."""
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


def pipeline_stages_match_in_both_grids(
    use_tp_pp_dp_mapping: bool,
    pipeline_model_parallel_size: int,
    tensor_model_parallel_size: int,
    context_parallel_size: int,
    expert_tensor_parallel_size: int | None,
    expert_model_parallel_size: int,
) -> Violation:
    """Attention and experts of a layer run on the same stage. If stages are nested inside data parallelism, a stage
    needs the same number of ranks in the attention grid and in the expert grid."""
    if not use_tp_pp_dp_mapping or pipeline_model_parallel_size == 1:
        return None
    etp = expert_tensor_parallel_size or tensor_model_parallel_size
    attention, experts = tensor_model_parallel_size * context_parallel_size, etp * expert_model_parallel_size
    if attention == experts:
        return None
    remedy = "remove --use-tp-pp-dp-mapping"
    if attention % etp == 0:
        remedy += f", or --expert-model-parallel-size {attention // etp}"
    return (
        f"--use-tp-pp-dp-mapping: attention stages of {tensor_model_parallel_size} x {context_parallel_size} = "
        f"{counted(attention, 'rank')} (tensor x context) differ from expert stages of {etp} x "
        f"{expert_model_parallel_size} = {counted(experts, 'rank')} (expert-tensor x expert)",
        remedy,
    )


def _nearest(world_size: int, product: int, sizes: dict[str, int]) -> str:
    """Suggests the next smaller value of each size that fits the ranks with the other sizes fixed, and a number of
    ranks that fits all of them."""
    nearest = []
    for option, size in sizes.items():
        rest = product // size
        share = world_size // rest if world_size % rest == 0 else 0
        small = [divisor for divisor in range(1, isqrt(share) + 1) if share % divisor == 0]
        fits = [divisor for low in small for divisor in (low, share // low) if divisor < size]
        if fits:
            nearest.append(f"{option} {max(fits)} ({rest} x {max(fits)} = {rest * max(fits)})")
    more = -(-world_size // product) * product
    return f"nearest: {', or '.join([*nearest, f'{more} ranks'])}"


def ep_divides_experts(num_experts: int | None, expert_model_parallel_size: int) -> Violation:
    """Every expert-parallel rank holds the same number of experts."""
    if not num_experts and expert_model_parallel_size > 1:
        return f"--expert-model-parallel-size {expert_model_parallel_size} without experts", "set --num-experts"
    if not num_experts or num_experts % expert_model_parallel_size == 0:
        return None
    return (
        f"{expert_model_parallel_size} ranks do not divide {counted(num_experts, 'expert')}",
        "use a divisor of --num-experts for --expert-model-parallel-size",
    )


def global_batch_is_whole_microbatches(
    data_parallel_size: int, micro_batch_size: int, global_batch_size: int | None
) -> Violation:
    """Every data-parallel rank runs the same whole number of microbatches per step."""
    unit = micro_batch_size * data_parallel_size
    if global_batch_size is None or global_batch_size % unit == 0:
        return None
    nearest = max(unit, round(global_batch_size / unit) * unit)
    return (
        f"a global batch of {global_batch_size} is not a multiple of {unit} = "
        f"{counted(micro_batch_size, 'sequence')} x {counted(data_parallel_size, 'data-parallel rank')}",
        f"--global-batch-size {nearest}, or another --micro-batch-size",
    )


def rampup_steps_are_whole(
    data_parallel_size: int,
    rampup_batch_size: tuple[int, int, int] | None,
    global_batch_size: int | None,
    micro_batch_size: int,
) -> Violation:
    """The batch size grows from the start size to the full size in equal increments, each a whole number of
    microbatches."""
    if rampup_batch_size is None:
        return None
    start, increment, _ = rampup_batch_size
    full = derive.global_batch_size(global_batch_size, micro_batch_size, data_parallel_size)
    unit = micro_batch_size * data_parallel_size
    if start > full:
        return (
            f"the batch ramp-up starts with {start} sequences, more than the full batch of {full}",
            "use a smaller start",
        )
    if (full - start) % increment:
        return (
            f"the batch size cannot grow from {start} to {full} in steps of {increment}",
            f"use an increment that divides {full - start}",
        )
    if start % unit or (full > start and increment % unit):
        return (
            f"batches of {start}, {start + increment}, ... sequences are not multiples of {unit} = "
            f"{counted(micro_batch_size, 'sequence')} x {counted(data_parallel_size, 'data-parallel rank')}",
            f"use multiples of {unit} for start and increment",
        )
    return None


def train_length_given_once(train_iters: int | None, train_samples: int | None) -> Violation:
    """The length of a run is given in iterations or in samples."""
    if train_iters is None and train_samples is None:
        return "the length of the run is not given", "set --train-iters or --train-samples"
    if train_iters is not None and train_samples is not None:
        return "the length of the run is given twice", "keep --train-iters or --train-samples"
    return None


def train_samples_fill_one_batch(
    train_samples: int | None, rampup_batch_size: tuple[int, int, int] | None, global_batch_size: int | None
) -> Violation:
    """A step consumes a whole batch."""
    first = rampup_batch_size[0] if rampup_batch_size else global_batch_size
    if train_samples is None or first is None or train_samples >= first:
        return None
    return (
        f"--train-samples {train_samples} does not fill one batch of {first}",
        "train on more samples, or use a smaller batch",
    )


def lr_schedule_unit_matches_run(
    train_iters: int | None,
    train_samples: int | None,
    lr_decay_iters: int | None,
    lr_warmup_iters: int,
    lr_wsd_decay_iters: int | None,
    lr_decay_samples: int | None,
    lr_warmup_samples: int,
    lr_wsd_decay_samples: int | None,
) -> Violation:
    """The learning-rate schedule uses the unit in which the length of the run is given."""
    if train_iters is not None and (lr_decay_samples or lr_warmup_samples or lr_wsd_decay_samples):
        return "the run is counted in iterations, but its learning rate in samples", "use the --lr-*-iters flags"
    if train_samples is not None and (lr_decay_iters or lr_warmup_iters or lr_wsd_decay_iters):
        return "the run is counted in samples, but its learning rate in iterations", "use the --lr-*-samples flags"
    return None


def warmup_given_once(lr_warmup_fraction: float | None, lr_warmup_iters: int, lr_warmup_samples: int) -> Violation:
    """Warm-up is a fraction of the decay length or an explicit length."""
    if lr_warmup_fraction is not None and (lr_warmup_iters or lr_warmup_samples):
        return "the length of warm-up is given twice", "keep --lr-warmup-fraction or the number"
    return None


def warmup_ends_before_decay(
    train_iters: int | None,
    train_samples: int | None,
    lr_decay_iters: int | None,
    lr_decay_samples: int | None,
    lr_warmup_iters: int,
    lr_warmup_samples: int,
) -> Violation:
    """The learning rate rises during warm-up, then decays."""
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


def learning_rates_are_ordered(lr: float, min_lr: float, lr_warmup_init: float) -> Violation:
    """--min-lr and --lr-warmup-init are at most --lr."""
    if min_lr > lr:
        return f"the smallest learning rate {min_lr:g} is above the largest {lr:g}", "lower --min-lr or raise --lr"
    if lr_warmup_init > lr:
        return f"warm-up starts at {lr_warmup_init:g}, above the largest learning rate {lr:g}", "lower --lr-warmup-init"
    return None


def decoupled_learning_rates_are_ordered(
    decoupled_lr: float | None, decoupled_min_lr: float | None, min_lr: float
) -> Violation:
    """Embedding and output head can have a separate learning-rate range; its default minimum is --min-lr."""
    if decoupled_lr is None:
        if decoupled_min_lr is None:
            return None
        return "--decoupled-min-lr without --decoupled-lr", "set --decoupled-lr"
    smallest = min_lr if decoupled_min_lr is None else decoupled_min_lr
    if smallest > decoupled_lr:
        return (
            f"the smallest decoupled learning rate {smallest:g} is above the largest {decoupled_lr:g}",
            f"--decoupled-min-lr {decoupled_lr:g} or less",
        )
    return None


def wsd_decay_has_length(
    lr_decay_style: str, lr_wsd_decay_iters: int | None, lr_wsd_decay_samples: int | None
) -> Violation:
    """WSD keeps the learning rate constant and anneals it in a final phase of given length."""
    if lr_decay_style == "WSD" and lr_wsd_decay_iters is None and lr_wsd_decay_samples is None:
        return "WSD without the length of its annealing", "set --lr-wsd-decay-iters or --lr-wsd-decay-samples"
    return None


def wsd_phases_fit_in_run(
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
    """WSD has consecutive warm-up, stable and annealing phases."""
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
                "shorten one of the two phases",
            )
    return None


def weight_decay_ramp_is_complete(
    weight_decay_incr_style: str, start_weight_decay: float | None, end_weight_decay: float | None
) -> Violation:
    """A changing weight decay needs a start and an end; a constant one is set by --weight-decay."""
    if weight_decay_incr_style == "constant":
        if start_weight_decay is not None or end_weight_decay is not None:
            return (
                "a constant weight decay takes no start and end",
                "use --weight-decay, or --weight-decay-incr-style linear",
            )
        return None
    if start_weight_decay is None or end_weight_decay is None:
        return "a changing weight decay needs a start and an end", "set --start-weight-decay and --end-weight-decay"
    if end_weight_decay < start_weight_decay:
        return f"weight decay cannot grow from {start_weight_decay:g} to {end_weight_decay:g}", "use a larger end value"
    return None


def one_lr_schedule_source(override_opt_param_scheduler: bool, use_checkpoint_opt_param_scheduler: bool) -> Violation:
    """On resume the schedule comes either from the command line or from the checkpoint."""
    if override_opt_param_scheduler and use_checkpoint_opt_param_scheduler:
        return "--override-opt_param-scheduler contradicts --use-checkpoint-opt_param-scheduler", "use one of them"
    return None


def one_parameter_dtype(bf16: bool, fp16: bool, fp64: bool) -> Violation:
    """All parameters have one dtype."""
    if bf16 + fp16 + fp64 > 1:
        return "several parameter dtypes are requested", "use one; the default is fp32"
    return None


RULES = functions_returning(Violation, globals())
