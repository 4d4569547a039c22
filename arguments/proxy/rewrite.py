"""`--proxy`: rewrites the flags of a large run into those of a small run with the same code paths."""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd, lcm
from types import MappingProxyType
from typing import Any

from arguments import derive
from arguments.checks.run import FULL_SIZE_RULES, broken_rules
from arguments.errors import FlagErrors
from arguments.parser import Setting, Settings
from arguments.proxy.fold import FoldRequest, Sizes, fold
from arguments.proxy.layers import select_layers
from arguments.resolve import check_layers, parallel_config
from arguments.resolve_model import layer_configs
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.text import counted
from megatron_moe.parallel.grid import ParallelSizesError

ITERATIONS = 5
_LINEAR = (
    ("mamba_num_groups", "mamba_num_heads", "mamba_state_dim", "mamba_head_dim"),
    ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
)
"""Flags with the numbers and the dims of key and value heads of Mamba and of linear attention."""
_TOKENS = 8
"""Tokens and entries to which a query of sparse or compressed attention attends, and tokens of a group."""
_HIDDEN, _DENSE, _EXPERT, _HEAD, _LATENT, _VOCABULARY = 64, 128, 64, 16, 32, 512
_MAX_TOPK, _NUM_EXPERTS, _MAX_GROUPS = 4, 8, 4
_SEQUENCE, _WINDOW = 64, 16
_BUCKET_SIZE = 16384
"""Number of elements per gradient bucket, small enough that the proxy has several buckets."""

_RANDOM_TOKENS = "random tokens"
_SHORT_RUN = f"a run of {ITERATIONS} iterations"
_INPUTS = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path"),
    *("per_split_data_args_path", "data_cache_path", "multiple_validation_sets", "split"),
    *("tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern", "tokenizer_special_tokens"),
    *("tiktoken_num_special_tokens", "null_tokenizer_eod_id", "null_tokenizer_pad_id", "trust_remote_code"),
)
_FOLDERS = (
    *("run_dir", "save", "load", "pretrained_checkpoint", "ckpt_step", "exit_on_missing_checkpoint", "save_interval"),
    *("tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_entity", "wandb_save_dir"),
)
_LENGTHS = (
    *("train_samples", "rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"),
    *("lr_decay_iters", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples", "exit_interval"),
    *("exit_duration_in_mins", "iterations_to_skip", "skip_train"),
)
_PLACEMENT = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
"""Flags other than the pipeline layout that assign layers to stages."""
UNUSED_BY_PROXY = frozenset((*_INPUTS, *_FOLDERS, *_LENGTHS, "tokenizer_type", "train_iters", "mock_data")) - {"split"}
"""Flags whose full-size values a proxy does not use; they may refer to unset environment variables."""
_AXES: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_model_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    }
)


class Draft:
    """Modifiable copy of the settings. Values given after `--proxy` are pinned and cannot be replaced."""

    def __init__(self, settings: Settings, pinned: Mapping[str, Setting]) -> None:
        self.settings = replace(settings, values=dict(settings.values))
        self.pinned = pinned
        self.notes: list[str] = []
        """One line per replaced value."""

    def value(self, name: str) -> Any:
        """Current value of a flag."""
        return self.settings.setting(name).value

    def override(self, name: str, value: object, reason: str) -> None:
        """Replaces a value and adds a note, unless the value is pinned or already equal."""
        old = self.value(name)
        if name in self.pinned or old == value:
            return
        self.settings.values[name] = Setting(value, "proxy")
        flag = self.settings.registry.flags[name]
        self.notes.append(f"proxy: {flag.option} {flag.text(old)} -> {flag.text(value)} ({reason})")

    def lower(self, name: str, limit: int, reason: str) -> None:
        """Lowers the value of a flag to `limit` if it is set and larger."""
        if self.value(name) is not None and self.value(name) > limit:
            self.override(name, limit, reason)

    def reset(self, reason: str, *names: str) -> None:
        """Replaces values by their defaults."""
        for name in names:
            self.override(name, self.settings.registry.flags[name].default, reason)


def proxy_settings(settings: Settings, pinned: Mapping[str, Setting], num_ranks: int) -> tuple[Settings, list[str]]:
    """Returns the settings of a small run on `num_ranks` ranks, and one line per rewritten flag.

    Args:
        settings: full-size settings with all required flags.
        pinned: settings given after `--proxy`, which are not rewritten.

    Raises:
        FlagErrors: the full-size model violates a rule, or the pinned sizes do not fit the ranks.
    """
    draft = Draft(settings, pinned)
    _replace_inputs(draft)
    _shorten_run(draft)
    _replace_hardware(draft)
    problems = list(broken_rules(draft.settings, ProcessInfo(), FULL_SIZE_RULES))
    if problems:
        raise FlagErrors([replace(problem, what=f"at full size: {problem.what}") for problem in problems])
    check_layers(layer_configs(draft.settings.flags), parallel_config(draft.settings.flags, ProcessInfo()))
    try:
        sizes = fold(fold_request(draft.settings, pinned), num_ranks)
    except ParallelSizesError as error:
        raise FlagErrors.of(str(error), "fix fewer sizes, or use another number of ranks") from None
    _reduce_layers(draft, sizes)
    _reduce_heads(draft, sizes)
    _reduce_compressed_attention(draft)
    _reduce_linear_heads(draft, sizes)
    _reduce_widths(draft, sizes)
    if draft.value("num_experts"):
        _reduce_experts(draft, sizes)
    _fold_ranks(draft, sizes)
    draft.settings.values |= pinned
    _shorten_sequence(draft, sizes)
    _reduce_batch(draft, sizes)
    return draft.settings, draft.notes


def fold_request(settings: Settings, pinned: Mapping[str, Setting]) -> FoldRequest:
    """Returns the full-size layout to fold, with dp 2 and edp 2 in place of the unknown data-parallel sizes."""
    value = {axis: settings.setting(name).value for axis, name in _AXES.items()}
    etp = value["etp"]
    value |= {"etp": etp or value["tp"], "ep": value["ep"] if settings.setting("num_experts").value else 1}
    fixed = {axis: pinned[name].value for axis, name in _AXES.items() if name in pinned and pinned[name].value}
    return FoldRequest(
        sizes=Sizes(dp=2, edp=2, **value),
        etp_is_tp=etp is None and "etp" not in fixed,
        hierarchical_cp="a2a+p2p" in settings.setting("cp_comm_type").value,
        fixed=fixed,
    )


def _replace_inputs(draft: Draft) -> None:
    draft.override("mock_data", True, _RANDOM_TOKENS)
    draft.reset(_RANDOM_TOKENS, *_INPUTS)
    draft.override("tokenizer_type", "NullTokenizer", _RANDOM_TOKENS)
    draft.override("num_workers", 0, _RANDOM_TOKENS)
    if draft.value("dataloader_type") == "external":
        draft.reset(_RANDOM_TOKENS, "dataloader_type")
    if draft.value("moe_use_upcycling"):
        draft.reset("no dense checkpoint of this size", "moe_use_upcycling", "moe_upcycling_granularity")
    draft.reset("directories of the full-size run", *_FOLDERS)
    if "save" in draft.pinned:
        draft.override("save_interval", ITERATIONS, "a checkpoint at the end of the run")


def _shorten_run(draft: Draft) -> None:
    draft.reset(_SHORT_RUN, *_LENGTHS)
    in_samples = "train_samples" in draft.pinned
    draft.override("train_iters", None if in_samples else ITERATIONS, _SHORT_RUN)
    draft.lower("lr_warmup_iters", 0 if in_samples else 1, _SHORT_RUN)
    draft.override("lr_wsd_decay_iters", 2 if draft.value("lr_decay_style") == "WSD" else None, _SHORT_RUN)
    draft.lower("eval_interval", ITERATIONS, _SHORT_RUN)
    draft.lower("eval_iters", 1, _SHORT_RUN)
    draft.override("log_interval", 1, _SHORT_RUN)


def _replace_hardware(draft: Draft) -> None:
    draft.reset("device of this machine", "device")
    draft.reset("kernels of this machine", "kernel_backend", "kernel_per_op")
    draft.reset("CUDA graphs need a GPU", "cuda_graph_impl", "cuda_graph_modules", "delay_offload_until_cuda_graph")
    if draft.value("moe_token_dispatcher_type") == "flex":
        draft.override("moe_token_dispatcher_type", "alltoall", "the libraries of flex need GPUs")
    if draft.value("fp16"):
        draft.override("fp16", False, "a short run finds no loss scale")
        draft.override("bf16", True, "replaces fp16")
    if draft.value("fp8_format") or draft.value("fp4_format"):
        draft.override("emulate_low_precision", True, "the same numbers on any device")
    fp64 = "fp64" in draft.pinned and draft.pinned["fp64"].value
    if fp64:
        draft.reset("double precision", "moe_router_padding_for_quantization")
    for name, flag in draft.settings.registry.flags.items():
        if flag.group == "precision" and fp64:
            draft.reset("double precision", name)
        if draft.settings.known(name) and (flag.group == "precision" or flag.declaration.harmless):
            if not flag.available(draft.value(name)):
                draft.reset("not available", name)


def _reduce_layers(draft: Draft, sizes: Sizes) -> None:
    """Reduces the model to the fewest layers that include every kind, on stages that resemble the full-size stages."""
    num_layers = draft.value("num_layers")
    patterns = _patterns(draft, num_layers)
    full = derive.pipeline_layout(draft.settings.flags)
    vpp = 2 if full.vpp > 1 and sizes.pp > 1 else 1
    if sizes.pp * vpp > len(full.stages):
        what = f"--pipeline-model-parallel-size {sizes.pp} after --proxy needs {sizes.pp * vpp} pipeline stages"
        remedy = "split the full-size model into as many: give the flag before --proxy"
        raise FlagErrors.of(f"{what}, but the full-size model has {counted(len(full.stages), 'stage')}", remedy)
    draft.lower("mtp_num_layers", 2, "two consecutive MTP layers suffice")
    selected = select_layers(
        list(zip(*patterns.values(), strict=True)),
        full,
        pp=sizes.pp,
        vpp=vpp,
        num_mtp=min(draft.value("mtp_num_layers") or 0, 2),
        min_layers=draft.pinned["num_layers"].value if "num_layers" in draft.pinned else None,
    )
    draft.override("num_layers", len(selected.layers), "one layer of every kind per stage")
    by_id = patterns.pop("moe_n_hash_layers")
    draft.lower("moe_n_hash_layers", sum(by_id[layer] for layer in selected.layers), "fewer layers route by token id")
    for name, entries in patterns.items():
        reduced = tuple(entries[layer] for layer in selected.layers)
        if name in derive.LAYER_NUMBERS and draft.value(name):
            reduced += draft.value(name)[num_layers:][: draft.value("mtp_num_layers")]
        _put_pattern(draft, name, reduced)
    draft.lower("recompute_num_layers", 1, "stages have few layers")
    draft.lower("cpu_offloading_num_layers", 1, "stages have few layers")
    draft.reset("replaced by the layout" if selected.layout else "a single stage", *_PLACEMENT)
    reason = "the full-size stages with fewer layers" if selected.layout else "a single stage"
    draft.override("pipeline_model_parallel_layout", selected.layout, reason)


def _patterns(draft: Draft, num_layers: int) -> dict[str, tuple[Any, ...]]:
    """Returns flag name -> tuple with one entry per layer, for the flags whose value can differ between layers."""
    moe = derive.moe_layers(num_layers, draft.value("num_experts"), draft.value("moe_layer_freq"))
    mixers, feed_forwards = (derive.repeat_names(draft.value(name), num_layers) for name in ("mixer", "feed_forward"))
    windowed = derive.windowed_layers(num_layers, draft.value("window_size"), draft.value("window_attn_skip_freq"))
    rotated = derive.rotated_layers(num_layers, draft.value("no_rope_freq"))
    variant, linear_freq = draft.value("experimental_attention_variant"), draft.value("linear_attention_freq")
    return {
        "moe_layer_freq": tuple(map(int, moe)),
        "moe_n_hash_layers": tuple(layer < draft.value("moe_n_hash_layers") for layer in range(num_layers)),
        "window_attn_skip_freq": tuple(map(int, windowed)),
        "no_rope_freq": tuple(int(not rope) for rope in rotated),
        "linear_attention_freq": tuple(map(int, derive.linear_attention_layers(num_layers, variant, linear_freq))),
        "cp_comm_type": derive.context_exchanges(num_layers, draft.value("cp_comm_type")),
        "mixer": mixers,
        "feed_forward": feed_forwards,
        **{name: (draft.value(name) or (0,) * num_layers)[:num_layers] for name in derive.LAYER_NUMBERS},
    }


def _put_pattern(draft: Draft, name: str, entries: tuple[Any, ...]) -> None:
    """Sets a flag to the per-layer list `entries`, unless its value is an interval that yields the same list."""
    old = draft.value(name)
    if old is None or (name in ("cp_comm_type", "mixer", "feed_forward") and len(old) == 1):
        return
    if isinstance(old, int) and (name != "no_rope_freq" or len(entries) % old == 0):
        if _patterns(draft, len(entries))[name] == entries:
            return
    draft.override(name, entries, "the remaining layers")


def _reduce_heads(draft: Draft, sizes: Sizes) -> None:
    """Reduces head dims and the numbers of heads and query groups. The number of rotated dims remains even.

    Each rank has one or two query groups with one or two heads each, or more if an all-to-all of heads needs them.
    Query groups that are shared by several ranks remain shared.
    """
    tp = draft.value("tensor_model_parallel_size")
    heads, grouped = draft.value("num_attention_heads"), draft.value("group_query_attention")
    if draft.value("multi_latent_attention"):
        for name, limit in (("q_lora_rank", _LATENT), ("kv_lora_rank", _LATENT), ("qk_head_dim", _HEAD)):
            draft.lower(name, limit, "narrower")
        draft.lower("v_head_dim", _HEAD, "narrower")
        draft.lower("qk_pos_emb_head_dim", _HEAD // 2, "narrower")
    else:
        full = derive.head_dim(draft.settings.flags)
        rotary = draft.value("rotary_percent") if draft.value("position_embedding_type") in ("rope", "yarn") else 1.0
        dims = [dim for dim in (_HEAD, 2 * _HEAD, 4 * _HEAD) if dim < full]
        even = [dim for dim in dims if int(dim * rotary) > 0 and int(dim * rotary) % 2 == 0]
        draft.override("kv_channels", min(even, default=full), "narrower")
    groups = draft.value("num_query_groups") if grouped else heads
    per_rank, per_group = min(max(groups // tp, 1), 2), min(heads // max(groups, tp), 2)
    a2a_ranks = sizes.cp if "a2a" in draft.value("cp_comm_type") else 1  # a2a+p2p exchanges heads between two ranks
    if a2a_ranks > 1:
        per_rank = per_rank if a2a_ranks % per_rank == 0 else 1
        per_group *= a2a_ranks // gcd(per_rank * per_group, a2a_ranks)
    draft.override("num_attention_heads", sizes.tp * per_rank * per_group, "fewer heads")
    if grouped:
        ranks_per_group = gcd(max(tp // groups, 1), sizes.tp)
        draft.override("num_query_groups", sizes.tp * per_rank // ranks_per_group, "fewer heads")


def _reduce_compressed_attention(draft: Draft) -> None:
    """Reduces the sizes of indexers and of compressed attention, whose groups of tokens must fit into the sequence."""
    for name, limit in (("dsa_indexer_n_heads", 2), ("dsa_indexer_head_dim", _HEAD), ("dsa_indexer_topk", _TOKENS)):
        draft.lower(name, limit, "smaller indexer")
    if not derive.has_compressed_attention(draft.settings.flags):
        return
    draft.override("o_groups", gcd(draft.value("o_groups"), draft.value("num_attention_heads")), "fewer heads")
    draft.lower("o_lora_rank", _LATENT, "narrower")
    draft.lower("csa_window_size", _TOKENS, "shorter sequences")
    ratios = tuple(min(ratio, _TOKENS) for ratio in draft.value("csa_compress_ratios"))
    draft.override("csa_compress_ratios", ratios, "shorter sequences")


def _reduce_linear_heads(draft: Draft, sizes: Sizes) -> None:
    """Reduces head dims and numbers of heads of Mamba and of linear attention. Each rank has one or two groups of key
    heads, each with one or two value heads."""
    full = draft.value("tensor_model_parallel_size") * draft.value("context_parallel_size")
    named = set(derive.DELTA_NETS.values()) & set(draft.value("mixer"))
    linear = draft.value("linear_attention_freq") is not None or bool(named)
    num_heads = derive.mamba_heads(draft.settings.flags), draft.value("linear_num_value_heads")
    for used, num_values, (keys, values, *dims) in zip(
        ("mamba" in draft.value("mixer"), linear), num_heads, _LINEAR, strict=True
    ):
        if used:
            per_rank, shared = min(draft.value(keys) // full, 2), min(num_values // draft.value(keys), 2)
            number = sizes.tp * sizes.cp * max(per_rank, 1)
            draft.override(keys, number, "fewer heads")
            draft.override(values, number * shared, "fewer heads")
            for dim in dims:
                draft.lower(dim, _HEAD, "narrower")


def _reduce_widths(draft: Draft, sizes: Sizes) -> None:
    draft.lower("hidden_size", _HIDDEN, "narrower")
    draft.lower("ffn_hidden_size", _multiple(_DENSE, sizes.tp), "narrower")
    draft.lower("moe_ffn_hidden_size", _multiple(_EXPERT, sizes.etp), "narrower")
    draft.lower("moe_shared_expert_intermediate_size", _multiple(_EXPERT, sizes.tp), "narrower")
    draft.lower("moe_latent_size", _LATENT, "narrower")
    size = _multiple(_VOCABULARY, sizes.tp)
    draft.override("vocab_size", min(draft.value("vocab_size") or size, size), "a smaller vocabulary")
    draft.lower("make_vocab_size_divisible_by", _VOCABULARY // 4, "a smaller vocabulary")
    if draft.value("padded_vocab_size") is not None:
        draft.override("padded_vocab_size", size, "a smaller vocabulary")


def _reduce_experts(draft: Draft, sizes: Sizes) -> None:
    """Reduces experts, groups and top-k. If the full-size model has several experts per rank, or selects several
    experts per group, so does the reduced model."""
    full, full_topk = draft.value("num_experts"), draft.value("moe_router_topk")
    full_groups, full_limit = draft.value("moe_router_num_groups") or 1, draft.value("moe_router_group_topk")
    groups = min(full_groups, _MAX_GROUPS)
    limit = full_limit and min(full_limit, max(groups // 2, 1))
    topk = min(full_topk, _MAX_TOPK)
    if limit:
        topk = limit * max(1, min(full_topk // full_limit, _MAX_TOPK // limit))
    unit = lcm(sizes.ep, groups)
    per_rank = 2 if full > draft.value("expert_model_parallel_size") else 1
    experts = _multiple(max(_NUM_EXPERTS, per_rank * sizes.ep, 2 * topk, groups * -(-topk // (limit or groups))), unit)
    if full_topk == full or (full < experts and full % unit == 0):
        experts = full
    draft.override("num_experts", experts, "fewer experts")
    draft.override("moe_router_topk", experts if full_topk == full else topk, "fewer experts")
    if draft.value("moe_num_echo_experts"):
        draft.override("moe_num_echo_experts", sizes.ep, "fewer experts")
    if draft.value("moe_router_num_groups"):
        draft.override("moe_router_num_groups", groups, "fewer experts")
        draft.override("moe_router_group_topk", limit, "fewer experts")


def _fold_ranks(draft: Draft, sizes: Sizes) -> None:
    reason = "folded to the available ranks"
    for axis, name in _AXES.items():
        if axis != "etp" or draft.value(name) is not None:
            draft.override(name, sizes.axes[axis], reason)
    if draft.value("hierarchical_context_parallel_sizes") is not None:
        levels = (2, sizes.cp // 2) if sizes.cp % 2 == 0 else (1, sizes.cp)
        draft.override("hierarchical_context_parallel_sizes", levels, reason)
    replicas = draft.value("num_distributed_optimizer_instances")
    if replicas > 1:
        replicas = gcd(replicas, sizes.dp, sizes.edp)
        draft.override("num_distributed_optimizer_instances", replicas, reason)
        if replicas == 1:
            draft.reset("one replica of the sharded weights", "outer_dp_sharding_strategy")
    alltoall = sizes.ep * sizes.etp > 1 and draft.value("moe_token_dispatcher_type") == "alltoall"
    if alltoall and draft.value("moe_paged_stash"):
        draft.reset("alltoall buffers have no unused rows", "moe_paged_stash")


def _shorten_sequence(draft: Draft, sizes: Sizes) -> None:
    """Shortens the sequence, keeping it divisible among tp x cp ranks, and reduces windows and maximum positions."""
    reason, full = "a shorter sequence", draft.value("seq_length")
    unit = lcm(2 * sizes.cp if sizes.cp > 1 else 1, sizes.cp * sizes.tp)
    draft.override("seq_length", _multiple(min(full, _SEQUENCE), unit), reason)
    length = draft.value("seq_length")
    draft.lower("max_position_embeddings", length, reason)
    if draft.value("window_size") is not None:
        draft.override("window_size", tuple(min(side, _WINDOW - 1) for side in draft.value("window_size")), reason)
    limit = draft.value("max_seqlen_per_dp_cp_rank")
    if limit is not None:
        draft.override("max_seqlen_per_dp_cp_rank", max(1, limit * length // full), reason)


def _reduce_batch(draft: Draft, sizes: Sizes) -> None:
    reason = "a smaller batch"
    draft.lower("micro_batch_size", 2, reason)
    if draft.value("global_batch_size") is not None or sizes.pp > 1:
        draft.override("global_batch_size", 2 * sizes.pp * draft.value("micro_batch_size") * sizes.dp, reason)
    if draft.value("microbatch_group_size_per_virtual_pipeline_stage") is not None:
        draft.override("microbatch_group_size_per_virtual_pipeline_stage", sizes.pp, reason)
    if draft.value("overlap_grad_reduce") and draft.value("ddp_num_buckets") is None:
        draft.override("ddp_bucket_size", _BUCKET_SIZE, "several buckets, as at full size")


def _multiple(number: int, unit: int) -> int:
    """Rounds `number` up to a multiple of `unit`."""
    return -(-number // unit) * unit
