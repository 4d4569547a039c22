"""Derives values from flags by Megatron's rules, such as defaults that depend on other flags."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from arguments.flags import Flags
from arguments.values import LayerPattern
from megatron_moe.config.attention import ContextExchange
from megatron_moe.config.data import MOCK_DOCUMENTS
from megatron_moe.config.pipeline_layout import PipelineLayout, even_layout, parse_layout, virtual_stages
from megatron_moe.config.transport import TransportChoice, choose_transport
from megatron_moe.cost_model.stage_costs import StageCosts
from megatron_moe.planner.auto_layout import auto_layout

AUTO: Final = "auto"
"""Value of `--pipeline-model-parallel-layout` that requests a layout balanced by cost."""
YARN_LENGTH: Final = 4096
"""Default of the original context length for YaRN, in tokens."""


MAMBA_CONV_WIDTH: Final = 4
"""Kernel size, in tokens, of the convolution of Mamba-2. Megatron has no flag for it."""
FP8_WGRAD_ROWS: Final = 2048
"""Mean number of rows per expert in a microbatch from which FP8 weight gradients may be faster. On an H200, writing the
gradients in fp32 takes as long as computing them in FP8 at about 900 rows."""
FP8_WGRAD_WIDTH: Final = 1280
"""Minimum of hidden size x FFN width / (hidden size + FFN width) from which FP8 weight gradients of experts are faster:
the GEMM saves time in proportion to hidden size x FFN width, and the casts take time in proportion to their sum.
Estimated from the rates of single kernels on an H200, not from whole steps."""


def ffn_hidden_size(flags: Flags) -> int:
    """FFN width. The default is 4 * hidden size; with SwiGLU 8 / 3 * hidden size, rounded down to a multiple of 64."""
    if flags.ffn_hidden_size is not None:
        return flags.ffn_hidden_size
    return int(4 * flags.hidden_size * 2 / 3 / 64) * 64 if flags.swiglu else 4 * flags.hidden_size


def head_dim(flags: Flags) -> int:
    """Head dimension; defaults to hidden size / number of attention heads."""
    return flags.hidden_size // flags.num_attention_heads if flags.kv_channels is None else flags.kv_channels


def mamba_heads(flags: Flags) -> int:
    """Number of heads of Mamba; defaults to 2 * hidden size / head dimension."""
    return flags.mamba_num_heads or 2 * flags.hidden_size // flags.mamba_head_dim


def conv_width(flags: Flags) -> int:
    """Kernel size, in tokens, of the widest convolution of linear attention or Mamba; 0 if no layer has one."""
    mixers = {*flags.mixer, flags.mtp_mixer}
    if "auto" in flags.mixer:
        mixers.add(DELTA_NETS.get(flags.experimental_attention_variant or ""))
    width = MAMBA_CONV_WIDTH if "mamba" in mixers else 0
    return width if mixers.isdisjoint(DELTA_NETS.values()) else max(width, flags.linear_conv_kernel_dim)


def capacity_factor(flags: Flags) -> float | None:
    """Expert capacity as a multiple of the mean number of tokens per expert; None if unlimited (flag not set or
    negative)."""
    factor = flags.moe_expert_capacity_factor
    return None if factor is None or factor < 0 else factor


def moe_layers(
    num_layers: int, num_experts: int | None, moe_layer_freq: LayerPattern, feed_forward: tuple[str, ...] = ("auto",)
) -> tuple[bool, ...]:
    """For each layer, whether it has experts. An integer n selects every n-th layer, starting with the first; a
    feed-forward module other than auto overrides this."""
    if not num_experts:
        return (False,) * num_layers
    selected = LAYER_PATTERNS["moe_layer_freq"](num_layers, moe_layer_freq)
    names = repeat_names(feed_forward, num_layers)
    return tuple(on if name == "auto" else name == "moe" for on, name in zip(selected, names, strict=True))


def repeat_names(names: tuple[str, ...], num_layers: int) -> tuple[str, ...]:
    """Name of every layer's mixer or feed-forward module; the names repeat over the layers. No names mean auto."""
    names = names or ("auto",)
    return tuple(names[layer % len(names)] for layer in range(num_layers))


def expert_tensor_parallel_size(flags: Flags) -> int:
    """Expert tensor-parallel size; defaults to the tensor-parallel size."""
    return flags.expert_tensor_parallel_size or flags.tensor_model_parallel_size


def expert_ranks(flags: Flags) -> int:
    """Number of ranks that together hold one copy of a layer's experts (expert-parallel x expert-tensor-parallel)."""
    return flags.expert_model_parallel_size * expert_tensor_parallel_size(flags)


def fp8_expert_wgrad(flags: Flags) -> bool:
    """Whether the weight gradients of routed experts are computed in low precision, if those of other layers are."""
    if flags.fp8_expert_wgrad != AUTO:
        return flags.fp8_expert_wgrad == "always"
    if flags.fp8_recipe != "blockwise" or flags.fp8_format is None or not flags.num_experts:
        return True
    rows = flags.micro_batch_size * flags.seq_length * flags.moe_router_topk / flags.num_experts
    rows *= expert_ranks(flags) / (flags.tensor_model_parallel_size * flags.context_parallel_size)
    hidden = flags.moe_latent_size or flags.hidden_size
    ffn = (flags.moe_ffn_hidden_size or ffn_hidden_size(flags)) / expert_tensor_parallel_size(flags)
    return rows >= FP8_WGRAD_ROWS and 1 / (1 / hidden + 1 / ffn) >= FP8_WGRAD_WIDTH


def row_capacity_factor(flags: Flags) -> float:
    """Bound on the rows of a rank's experts as a multiple of the mean over ranks; defaults to 1.25."""
    factor = flags.moe_expert_rank_capacity_factor
    return 1.25 if factor is None else factor


def shares_memory(flags: Flags) -> bool:
    """Whether GPUs of one host may exchange tokens through each other's memory."""
    return flags.device != "cpu" and not flags.fp64  # the push kernels do not support fp64


def transport_backend(flags: Flags) -> str:
    """Value of the flag that requests a transport: that of the flex dispatcher, or of alltoall for other
    dispatchers."""
    is_flex = flags.moe_token_dispatcher_type == "flex"
    return flags.moe_flex_dispatcher_backend if is_flex else flags.moe_alltoall_backend


def expert_transport(flags: Flags, ranks_per_host: int, missing_libraries: Sequence[str] = ()) -> TransportChoice:
    """Chooses the transport of the token dispatcher from the flags; see `choose_transport`. `missing_libraries`: names
    of libraries that are not installed."""
    ranks = expert_ranks(flags)
    return choose_transport(
        flags.moe_token_dispatcher_type,
        transport_backend(flags),
        num_ranks=ranks,
        ranks_per_host=ranks_per_host,
        spans_hosts=ranks_per_host % ranks != 0,
        shares_memory=shares_memory(flags),
        expert_choice="expert_choice" in flags.moe_router_load_balancing_type,
        pads_experts=flags.moe_pad_expert_input_to_capacity,
        missing_libraries=missing_libraries,
        clones_experts=flags.moe_enable_echo,
    )


def experts_are_captured(flags: Flags, ranks_per_host: int) -> bool:
    """Whether CUDA graphs capture the experts if `--cuda-graph-modules` is not given. Experts are captured only if
    tokens are exchanged through symmetric memory (libraries may be missing on the machine of the run), if the exchange
    does not overlap with another microbatch, if rows are not stored in pages or kept for deferred weight gradients, and
    if GEMMs are grouped and not in fp32; other GEMMs read token counts on the host."""
    if not (flags.bf16 and flags.moe_grouped_gemm) or flags.moe_paged_stash or flags.moe_expert_wgrad_interval > 1:
        return False
    ranks = expert_ranks(flags)
    may_exchange = ranks == 1 or not flags.overlap_moe_expert_parallel_comm
    transport = expert_transport(flags, ranks_per_host).transport
    return may_exchange and transport.is_captured and transport.library is None


def default_expert_modules(flags: Flags, ranks_per_host: int) -> tuple[Literal["moe", "moe_router"]]:
    """The module of MoE layers that CUDA graphs capture if `--cuda-graph-modules` is not given."""
    return ("moe",) if experts_are_captured(flags, ranks_per_host) else ("moe_router",)


def captured_modules(flags: Flags, ranks_per_host: int) -> tuple[str, ...]:
    """Returns the modules that CUDA graphs of modules capture: the given ones or the defaults, which the model may
    lack."""
    if flags.cuda_graph_impl in ("none", "full_iteration"):
        return ()
    if flags.cuda_graph_modules:
        return flags.cuda_graph_modules
    experts = default_expert_modules(flags, ranks_per_host)
    return ("attn", "mlp", *experts) if selects_keys_in_every_layer(flags) else ("mlp", *experts)


def _every_nth(num_layers: int, pattern: LayerPattern | None) -> tuple[bool, ...]:
    assert pattern is not None
    if isinstance(pattern, int):
        return tuple(layer % pattern == 0 for layer in range(num_layers))
    return tuple(entry == 1 for entry in pattern)


def _not_exempt(
    num_layers: int, pattern: LayerPattern | None, *, listed: int = 1, unset: bool = True
) -> tuple[bool, ...]:
    """Whether each layer is included. An interval n excludes layers n, 2n, ... (counted from 1), and a list excludes
    all layers whose entry is not `listed`. None includes all layers if `unset`, otherwise none."""
    if pattern is None:
        return (unset,) * num_layers
    if isinstance(pattern, int):
        return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    return tuple(entry == listed for entry in pattern)


LAYER_PATTERNS: Mapping[str, Callable[[int, LayerPattern | None], tuple[bool, ...]]] = MappingProxyType(
    {
        "moe_layer_freq": _every_nth,
        "window_attn_skip_freq": _not_exempt,
        "linear_attention_freq": partial(_not_exempt, unset=False),
        "no_rope_freq": partial(_not_exempt, listed=0),
    }
)
"""Flags that select layers -> whether a value of the flag selects each of a number of layers."""


LAYER_NUMBERS = ("csa_compress_ratios",)
"""Flags with a number per layer, and possibly one more for the layer of multi-token prediction."""


LAYER_COUNTS = ("moe_n_hash_layers",)
"""Flags that state how many of the first layers have a property."""


def offloaded_modules(flags: Flags) -> tuple[str, ...]:
    """Modules of `--offload-modules`, with the parts of fused_group_mlp in its place."""
    parts = {"fused_group_mlp": ("expert_fc1", "moe_act")}
    return tuple(dict.fromkeys(part for name in flags.offload_modules for part in parts.get(name, (name,))))


def windowed_layers(
    num_layers: int, window_size: tuple[int, int] | None, window_attn_skip_freq: LayerPattern | None
) -> tuple[bool, ...]:
    """For each layer, whether attention has a window. An integer n exempts layers n, 2n, ... (counted from 1)."""
    if window_size is None:
        return (False,) * num_layers
    return LAYER_PATTERNS["window_attn_skip_freq"](num_layers, window_attn_skip_freq)


DELTA_NETS = MappingProxyType(
    {
        "gated_delta_net": "gated_delta_net",
        "gdn": "gated_delta_net",
        "kimi_delta_attention": "kimi_delta_attention",
        "kda": "kimi_delta_attention",
    }
)
"""Values of `--experimental-attention-variant` with a delta rule -> name of the mixer."""


def mla_has_yarn(flags: Flags) -> bool:
    """Whether multi-latent attention has YaRN, which is the default."""
    return flags.rope_type not in ("rope", "none")


def has_sparse_attention(flags: Flags) -> bool:
    """Whether sparse attention (DSA) is the mixer of some layer."""
    named = "dsa" in (*flags.mixer, flags.mtp_mixer)
    return named or (flags.experimental_attention_variant == "dsa" and "auto" in flags.mixer)


def selects_keys_in_every_layer(flags: Flags) -> bool:
    """Whether no layer attends to keys that an earlier layer has selected, so that attention can be captured alone."""
    return flags.dsa_indexer_topk_freq == 1


def has_compressed_attention(flags: Flags) -> bool:
    """Whether compressed attention (DeepSeek-V4) is the mixer of some layer."""
    named = "compressed_attention" in (*flags.mixer, flags.mtp_mixer)
    return named or (flags.experimental_attention_variant == "dsv4_hybrid" and "auto" in flags.mixer)


def indexer_sizes(flags: Flags) -> dict[str, int | None]:
    """Maps each flag for a size of the indexer of sparse or compressed attention to its value, None if it is not
    given."""
    return {
        "--dsa-indexer-n-heads": flags.dsa_indexer_n_heads,
        "--dsa-indexer-head-dim": flags.dsa_indexer_head_dim,
        "--dsa-indexer-topk": flags.dsa_indexer_topk,
    }


def linear_attention_layers(
    num_layers: int, experimental_attention_variant: str | None, linear_attention_freq: LayerPattern | None
) -> tuple[bool, ...]:
    """Whether each layer has linear attention. An integer n exempts layers n, 2n, ... (counted from 1)."""
    if experimental_attention_variant not in DELTA_NETS:
        return (False,) * num_layers
    return LAYER_PATTERNS["linear_attention_freq"](num_layers, linear_attention_freq)


def rotated_layers(num_layers: int, no_rope_freq: LayerPattern | None) -> tuple[bool, ...]:
    """Whether each layer has rotary embeddings. An integer n exempts layers n, 2n, ... (counted from 1)."""
    return LAYER_PATTERNS["no_rope_freq"](num_layers, no_rope_freq)


def yarn_betas(flags: Flags) -> tuple[float, float]:
    """YaRN's (beta_fast, beta_slow). Dimensions with more than beta_fast rotations over the original context keep
    their frequency; dimensions with fewer than beta_slow rotations are interpolated."""
    fast, slow = flags.yarn_beta_fast, flags.yarn_beta_slow
    return 32.0 if fast is None else fast, 1.0 if slow is None else slow


def context_exchanges(num_layers: int, cp_comm_type: tuple[str, ...]) -> tuple[ContextExchange, ...]:
    """Context-parallel communication type of each layer; a single `cp_comm_type` applies to all layers."""
    kinds: tuple[Any, ...] = tuple("allgather" if kind == "all_gather" else kind for kind in cp_comm_type)
    return kinds * num_layers if len(kinds) == 1 else kinds


def sharding_strategy(flags: Flags) -> str:
    """State that data-parallel ranks shard, as a value of `--data-parallel-sharding-strategy`."""
    if flags.use_megatron_fsdp:
        return flags.data_parallel_sharding_strategy
    return "optim" if flags.use_distributed_optimizer else "no_shard"


def shards_gradients(flags: Flags) -> bool:
    """Whether data-parallel ranks shard gradients, and possibly weights, layer by layer (ZeRO-2 and ZeRO-3)."""
    return sharding_strategy(flags) in ("optim_grads", "optim_grads_params")


def gathers_into_two_buffers(flags: Flags) -> bool:
    """Whether sharded weights are gathered into two buffers. CUDA graphs need their fixed addresses."""
    captured = flags.cuda_graph_impl != "none" and sharding_strategy(flags) == "optim_grads_params"
    return flags.fsdp_double_buffer or captured


def global_batch_size(flags: Flags, data_parallel_size: int) -> int:
    """Global batch size in sequences; defaults to one microbatch per data-parallel rank."""
    if sizes := step_batch_sizes(flags):
        return max(size for _, size in sizes)
    size = flags.global_batch_size
    return flags.micro_batch_size * data_parallel_size if size is None else size


def step_batch_sizes(flags: Flags) -> tuple[tuple[int, int], ...]:
    """Entries of `--step-batch-size-schedule` as (consumed samples, global batch size from there on); empty if it is
    not set or invalid, which a rule reports. Its thresholds are tokens, with the suffixes K, M, B and T for powers of
    1000."""
    found = []
    for entry in (flags.step_batch_size_schedule or "").split():
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):([1-9]\d*)", entry.upper())
        if match is None:
            return ()
        tokens = float(match[1]) * 1000 ** " KMBT".index(match[2] or " ")
        found.append((int(tokens) // flags.seq_length, int(match[3])))
    starts = [first for first, _ in found]
    return tuple(found) if starts[:1] == [0] and starts == sorted(set(starts)) else ()


def tokenizer_type(flags: Flags) -> str | None:
    """Tokenizer type. Without `--tokenizer-type`, GPT2BPETokenizer if a vocabulary or merge file is given, as in
    `pretrain_gpt.py`, otherwise None."""
    has_files = flags.vocab_file or flags.merge_file
    return "GPT2BPETokenizer" if flags.tokenizer_type is None and has_files else flags.tokenizer_type


def eval_iters(flags: Flags, train_iters: int) -> int:
    """Number of batches per evaluation. The default is 100; on mock data, the smaller of 100 and `train_iters`."""
    if flags.eval_iters is not None:
        return flags.eval_iters
    return min(100, train_iters) if flags.mock_data else 100


def mock_documents(flags: Flags) -> int:
    """Number of documents of `--mock-data`: Megatron's for sequences of 2,048 tokens or more, and in proportion to the
    length for shorter ones, since the index of millions of short samples takes a second at every start."""
    return max(MOCK_DOCUMENTS // 100, min(MOCK_DOCUMENTS, MOCK_DOCUMENTS * flags.seq_length // 2048))


def save_folder(flags: Flags) -> Path | None:
    """Checkpoint folder: `--save`, otherwise `checkpoints` in the run folder. None if the run saves no checkpoints."""
    if flags.save or not flags.run_dir:
        return Path(flags.save) if flags.save else None
    saves = flags.save_interval or flags.save_hf_interval or flags.moe_use_upcycling or flags.ckpt_step is not None
    return Path(flags.run_dir) / "checkpoints" if saves or not flags.mock_data else None


def residual_connection(flags: Flags) -> str:
    """Name of the residual connection of all layers, in registry `RESIDUALS`."""
    if flags.residual_connection != "auto":
        return str(flags.residual_connection)
    return "hyper_connections" if flags.enable_hyper_connections else "added"


def padded_vocab_size(flags: Flags, vocab_size: int) -> int:
    """Number of embedding rows: `--padded-vocab-size` if given, else `vocab_size` plus the requested padding."""
    if flags.padded_vocab_size is not None:
        return flags.padded_vocab_size
    unit = flags.make_vocab_size_divisible_by * flags.tensor_model_parallel_size if flags.pad_vocab_size else 1
    return -(-vocab_size // unit) * unit


def pipeline_layout(flags: Flags, costs: StageCosts | None = None) -> PipelineLayout:
    """Assigns layers to pipeline stages. Layout `auto` balances `costs`, or the number of layers if `costs` is None.

    Raises LayoutError.
    """
    num_layers, num_mtp = flags.num_layers, flags.mtp_num_layers or 0
    pp, vpp = flags.pipeline_model_parallel_size, flags.num_virtual_stages_per_pipeline_rank or 1
    for_embedding, for_loss = flags.account_for_embedding_in_pipeline_split, flags.account_for_loss_in_pipeline_split
    if flags.num_layers_per_virtual_pipeline_stage is not None:
        counted = num_layers + for_embedding + for_loss
        vpp = virtual_stages(counted, pp=pp, per_virtual_stage=flags.num_layers_per_virtual_pipeline_stage)
    if flags.pipeline_model_parallel_layout == AUTO:
        costs = costs or StageCosts(layers=(1.0,) * num_layers)
        return auto_layout(costs, pp=pp, vpp=vpp, num_mtp=num_mtp)
    if flags.pipeline_model_parallel_layout is not None:
        return parse_layout(flags.pipeline_model_parallel_layout, pp=pp, num_layers=num_layers, num_mtp=num_mtp)
    return even_layout(
        num_layers,
        pp=pp,
        vpp=vpp,
        num_mtp=num_mtp,
        first=flags.decoder_first_pipeline_num_layers,
        last=flags.decoder_last_pipeline_num_layers,
        account_for_embedding=for_embedding,
        account_for_loss=for_loss,
    )
