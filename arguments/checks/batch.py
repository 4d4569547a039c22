"""Rules about parallel sizes, batch sizes, run length, learning rate and weight decay."""

from math import isqrt

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, conflict, lacks
from megatron_moe.config.text import counted


def model_parallel_sizes_divide_world(flags: RuleFlags) -> Violations:
    """The data-parallel size is the number of ranks divided by the product of tensor-, context- and pipeline-parallel
    size, which must be an integer."""
    tp, cp, pp = flags.tensor_model_parallel_size, flags.context_parallel_size, flags.pipeline_model_parallel_size
    sizes = {"--pipeline-model-parallel-size": pp, "--context-parallel-size": cp, "--tensor-model-parallel-size": tp}
    product, ranks = tp * cp * pp, counted(flags.num_ranks, "rank")
    if flags.num_ranks % product:
        remedy = _nearest(flags.num_ranks, product, sizes)
        yield f"the model cannot be split: {tp} x {cp} x {pp} = {product} does not divide {ranks}", remedy


def expert_parallel_sizes_divide_world(flags: RuleFlags) -> Violations:
    """The number of expert replicas is the number of ranks divided by the product of expert-tensor-, expert- and
    pipeline-parallel size, which must be an integer."""
    etp = derive.expert_tensor_parallel_size(flags)
    ep, pp = flags.expert_model_parallel_size, flags.pipeline_model_parallel_size
    sizes = {"--expert-model-parallel-size": ep, "--pipeline-model-parallel-size": pp}
    sizes["--expert-tensor-parallel-size"] = etp
    product, ranks = etp * ep * pp, counted(flags.num_ranks, "rank")
    if flags.num_ranks % product:
        remedy = _nearest(flags.num_ranks, product, sizes)
        yield f"experts cannot be folded: {etp} x {ep} x {pp} = {product} does not divide {ranks}", remedy


def pipeline_stages_match_in_both_grids(flags: RuleFlags) -> Violations:
    """--use-tp-pp-dp-mapping assigns pipeline stages to blocks of adjacent ranks. A block has (tensor x context) ranks
    for attention and (expert-tensor x expert) ranks for experts; both sizes must be equal, so that stages match."""
    if not flags.use_tp_pp_dp_mapping or flags.pipeline_model_parallel_size == 1:
        return
    etp, experts = derive.expert_tensor_parallel_size(flags), derive.expert_ranks(flags)
    attention = flags.tensor_model_parallel_size * flags.context_parallel_size
    if attention == experts:
        return
    remedy = "remove --use-tp-pp-dp-mapping"
    if attention % etp == 0:
        remedy += f", or --expert-model-parallel-size {attention // etp}"
    yield (
        f"--use-tp-pp-dp-mapping: attention stages of {flags.tensor_model_parallel_size} x "
        f"{flags.context_parallel_size} = {counted(attention, 'rank')} (tensor x context) differ from expert stages of "
        f"{etp} x {flags.expert_model_parallel_size} = {counted(experts, 'rank')} (expert-tensor x expert)",
        remedy,
    )


def _nearest(world_size: int, product: int, sizes: dict[str, int]) -> str:
    """Suggests corrections if `product`, the product of the parallel sizes, does not divide `world_size`. Each
    correction either reduces one of the sizes or increases the number of ranks."""
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


def expert_parallelism_needs_experts(flags: RuleFlags) -> Violations:
    """Expert parallelism shards the experts of MoE layers."""
    if not flags.num_experts and flags.expert_model_parallel_size > 1:
        yield lacks(f"--expert-model-parallel-size {flags.expert_model_parallel_size}", "experts", "set --num-experts")


def flex_library_has_peers(flags: RuleFlags) -> Violations:
    """deepep and ncclep exchange tokens between expert-parallel ranks, so they need at least two of them."""
    library, is_flex = flags.moe_flex_dispatcher_backend, flags.moe_token_dispatcher_type == "flex"
    if flags.num_experts and is_flex and library in ("deepep", "ncclep") and derive.expert_ranks(flags) == 1:
        remedy = "set --expert-model-parallel-size above 1, or leave out the flags of the dispatcher"
        yield f"--moe-flex-dispatcher-backend {library} cannot be used if all experts are on one rank", remedy


def global_batch_is_whole_microbatches(flags: RuleFlags) -> Violations:
    """Every data-parallel rank runs the same whole number of microbatches per step."""
    unit = flags.micro_batch_size * flags.data_parallel_size
    if flags.global_batch_size is None or flags.global_batch_size % unit == 0:
        return
    nearest = max(unit, round(flags.global_batch_size / unit) * unit)
    remedy = f"--global-batch-size {nearest}, or another --micro-batch-size"
    yield f"a global batch of {flags.global_batch_size} is not a multiple of {unit} = {_microbatch(flags)}", remedy


def _microbatch(flags: RuleFlags) -> str:
    ranks = counted(flags.data_parallel_size, "data-parallel rank")
    return f"{counted(flags.micro_batch_size, 'sequence')} x {ranks}"


def rampup_steps_are_whole(flags: RuleFlags) -> Violations:
    """The batch size grows from its initial to its final value in equal increments. Every size must be a whole number
    of microbatches per data-parallel rank."""
    if flags.rampup_batch_size is None:
        return
    start, increment, _ = flags.rampup_batch_size
    full = derive.global_batch_size(flags, flags.data_parallel_size)
    unit = flags.micro_batch_size * flags.data_parallel_size
    if start > full:
        yield (
            f"the batch ramp-up starts with {start} sequences, more than the full batch of {full}",
            "use a smaller start",
        )
    elif (full - start) % increment:
        yield (
            f"the batch size cannot grow from {start} to {full} in steps of {increment}",
            f"use an increment that divides {full - start}",
        )
    elif start % unit or (full > start and increment % unit):
        remedy = f"use multiples of {unit} for start and increment"
        sizes = f"batches of {start}, {start + increment}, ... sequences"
        yield f"{sizes} are not multiples of {unit} = {_microbatch(flags)}", remedy


def step_batch_sizes_are_whole(flags: RuleFlags) -> Violations:
    """The sizes of --step-batch-size-schedule are whole numbers of microbatches per data-parallel rank. The largest one
    is the global batch size, and a ramp-up is excluded."""
    schedule = flags.step_batch_size_schedule
    if schedule is None:
        return
    sizes = [size for _, size in derive.step_batch_sizes(flags)]
    if not sizes:
        yield (
            f"--step-batch-size-schedule {schedule!r} is not a list of TOKENS:SIZE with increasing TOKENS that start "
            "at 0",
            'write it like "0:768 250B:1536"',
        )
        return
    unit = flags.micro_batch_size * flags.data_parallel_size
    if wrong := [size for size in sizes if size % unit]:
        yield f"batches of {wrong[0]} sequences are not multiples of {unit} = {_microbatch(flags)}", f"use {unit}, ..."
    if flags.rampup_batch_size is not None:
        yield "--step-batch-size-schedule and --rampup-batch-size both set the batch size", "keep one of them"
    if flags.global_batch_size not in (None, max(sizes)):
        yield (
            f"--global-batch-size {flags.global_batch_size}, but the largest batch of --step-batch-size-schedule has "
            f"{max(sizes)} sequences",
            "leave --global-batch-size out",
        )


def evaluation_batches_are_whole(flags: RuleFlags) -> Violations:
    """Evaluations use the buffers of training, and every rank runs the same number of microbatches."""
    micro = flags.eval_micro_batch_size or flags.micro_batch_size
    if micro > flags.micro_batch_size:
        yield (
            f"--eval-micro-batch-size {micro} exceeds --micro-batch-size {flags.micro_batch_size}, which sizes buffers",
            f"use {flags.micro_batch_size} or less",
        )
    if micro != flags.micro_batch_size and flags.cuda_graph_impl != "none":
        yield conflict(
            f"--eval-micro-batch-size {micro}",
            f"CUDA graphs that were captured for {counted(flags.micro_batch_size, 'sequence')}",
            "leave out --eval-micro-batch-size",
        )
    full = derive.global_batch_size(flags, flags.data_parallel_size)
    size, unit = flags.eval_global_batch_size or full, micro * flags.data_parallel_size
    if size % unit and (flags.eval_global_batch_size or flags.eval_micro_batch_size):
        yield (
            f"an evaluation batch of {size} is not a multiple of {unit} = {micro} x "
            f"{counted(flags.data_parallel_size, 'data-parallel rank')}",
            f"--eval-global-batch-size {max(unit, round(size / unit) * unit)}",
        )


def train_length_given_once(flags: RuleFlags) -> Violations:
    """The length of a run is given either in iterations or in samples."""
    if flags.train_iters is None and flags.train_samples is None:
        yield "the length of the run is not given", "set --train-iters or --train-samples"
    elif flags.train_iters is not None and flags.train_samples is not None:
        yield "the length of the run is given twice", "keep --train-iters or --train-samples"


def train_samples_fill_one_batch(flags: RuleFlags) -> Violations:
    """A run needs enough samples for at least one global batch."""
    first = flags.rampup_batch_size[0] if flags.rampup_batch_size else flags.global_batch_size
    if sizes := derive.step_batch_sizes(flags):
        first = sizes[0][1]
    if flags.train_samples is not None and first is not None and flags.train_samples < first:
        remedy = "train on more samples, or use a smaller batch"
        yield f"--train-samples {flags.train_samples} does not fill one batch of {first}", remedy


def lr_schedule_unit_matches_run(flags: RuleFlags) -> Violations:
    """The learning-rate schedule and the length of the run must be given in the same unit, iterations or samples."""
    if flags.train_iters is not None and (
        flags.lr_decay_samples or flags.lr_warmup_samples or flags.lr_wsd_decay_samples
    ):
        remedy = "use the --lr-*-iters flags"
        yield "the run length is given in iterations, but the learning-rate schedule in samples", remedy
    elif flags.train_samples is not None and (
        flags.lr_decay_iters or flags.lr_warmup_iters or flags.lr_wsd_decay_iters
    ):
        remedy = "use the --lr-*-samples flags"
        yield "the run length is given in samples, but the learning-rate schedule in iterations", remedy


def warmup_given_once(flags: RuleFlags) -> Violations:
    """The warm-up length is given once: as a fraction of the decay length, or in iterations or samples."""
    if flags.lr_warmup_fraction is not None and (flags.lr_warmup_iters or flags.lr_warmup_samples):
        other = "--lr-warmup-iters" if flags.lr_warmup_iters else "--lr-warmup-samples"
        yield f"--lr-warmup-fraction and {other} both set the length of warm-up", "remove one of them"


def warmup_ends_before_decay(flags: RuleFlags) -> Violations:
    """The learning rate rises during warm-up and decays afterwards; the decay length includes the warm-up."""
    for unit, length, decay, warmup in (
        ("iterations", flags.train_iters, flags.lr_decay_iters, flags.lr_warmup_iters),
        ("samples", flags.train_samples, flags.lr_decay_samples, flags.lr_warmup_samples),
    ):
        end = length if decay is None else decay
        if length is not None and end is not None and warmup >= end:
            remedy = "shorten the warm-up, or let the decay end later"
            yield f"warm-up of {warmup} {unit} does not end before the decay, which ends after {end}", remedy


def learning_rates_are_ordered(flags: RuleFlags) -> Violations:
    """--lr is the maximum of the schedule, so --min-lr and --lr-warmup-init must not exceed it."""
    if flags.min_lr > flags.lr:
        remedy = "lower --min-lr or raise --lr"
        yield f"the smallest learning rate {flags.min_lr:g} is above the largest {flags.lr:g}", remedy
    elif flags.lr_warmup_init > flags.lr:
        remedy = "lower --lr-warmup-init"
        yield f"warm-up starts at {flags.lr_warmup_init:g}, above the largest learning rate {flags.lr:g}", remedy


def decoupled_learning_rates_are_ordered(flags: RuleFlags) -> Violations:
    """The minimum learning rate of embedding and output layer must not exceed the maximum, --decoupled-lr."""
    smallest = flags.min_lr if flags.decoupled_min_lr is None else flags.decoupled_min_lr
    if flags.decoupled_lr is None:
        if flags.decoupled_min_lr is not None:
            yield lacks("--decoupled-min-lr", "--decoupled-lr", "set --decoupled-lr")
    elif smallest > flags.decoupled_lr:
        remedy = f"--decoupled-min-lr {flags.decoupled_lr:g} or less"
        yield f"the smallest decoupled learning rate {smallest:g} is above the largest {flags.decoupled_lr:g}", remedy


def wsd_decay_has_length(flags: RuleFlags) -> Violations:
    """WSD keeps the learning rate constant, then anneals it in a final phase, whose length must be given."""
    if flags.lr_decay_style == "WSD" and flags.lr_wsd_decay_iters is None and flags.lr_wsd_decay_samples is None:
        remedy = "set --lr-wsd-decay-iters or --lr-wsd-decay-samples"
        yield "--lr-decay-style WSD requires the length of its annealing phase", remedy


def wsd_phases_fit_in_run(flags: RuleFlags) -> Violations:
    """WSD has consecutive warm-up, stable and annealing phases, which must fit into the decay length."""
    for unit, length, decay, warmup, annealing in (
        ("iterations", flags.train_iters, flags.lr_decay_iters, flags.lr_warmup_iters, flags.lr_wsd_decay_iters),
        ("samples", flags.train_samples, flags.lr_decay_samples, flags.lr_warmup_samples, flags.lr_wsd_decay_samples),
    ):
        end = length if decay is None else decay
        if flags.lr_decay_style != "WSD" or length is None or end is None or annealing is None:
            continue
        rise = warmup if flags.lr_warmup_fraction is None else round(flags.lr_warmup_fraction * end, 6)
        if rise + annealing > end:
            yield (
                f"{annealing} {unit} of annealing and {rise} of warm-up exceed the {end} {unit} until the decay ends",
                "shorten one of the two phases",
            )


def weight_decay_ramp_is_complete(flags: RuleFlags) -> Violations:
    """A weight-decay schedule needs a start value and an end value that is not smaller; a constant weight decay is set
    by --weight-decay."""
    if flags.weight_decay_incr_style == "constant":
        if flags.start_weight_decay is not None or flags.end_weight_decay is not None:
            remedy = "use --weight-decay, or --weight-decay-incr-style linear"
            yield "a constant weight decay has no start and end values", remedy
    elif flags.start_weight_decay is None or flags.end_weight_decay is None:
        yield "a weight-decay schedule needs start and end values", "set --start-weight-decay and --end-weight-decay"
    elif flags.end_weight_decay < flags.start_weight_decay:
        remedy = "use a larger end value"
        yield f"weight decay cannot grow from {flags.start_weight_decay:g} to {flags.end_weight_decay:g}", remedy


def resumed_lr_schedule_has_one_source(flags: RuleFlags) -> Violations:
    """On resume, the learning-rate schedule is taken either from the command line or from the checkpoint."""
    if flags.override_opt_param_scheduler and flags.use_checkpoint_opt_param_scheduler:
        yield "--override-opt_param-scheduler contradicts --use-checkpoint-opt_param-scheduler", "use one of them"


def one_parameter_dtype(flags: RuleFlags) -> Violations:
    """All parameters have one dtype."""
    if flags.bf16 + flags.fp16 + flags.fp64 > 1:
        yield "several parameter dtypes are requested", "use one; the default is fp32"
