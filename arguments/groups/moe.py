"""Mixture-of-Experts flags."""

from dataclasses import dataclass
from typing import Annotated, Literal

from arguments.flag import differs, flag, new_flag
from arguments.values import FilePath, LayerPattern
from megatron_moe.config.registry import BALANCING, SCORE_FUNCTIONS, TRANSPORTS
from megatron_moe.config.transport import SYMMETRIC

_WIRE = "requires the flex dispatcher with symmetric or deepep; Megatron-LM supports only mxfp8, with ncclep"


@dataclass(frozen=True, kw_only=True)
class MoEFlags:
    """MoE layers: router, load balancing, expert capacity, experts and token dispatch."""

    num_experts: int | None = flag(None, least=0, below=65_536, essential=True)
    """Number of routed experts per MoE layer. Default: no experts, as with 0."""
    moe_layer_freq: LayerPattern = flag(1, essential=True)
    """MoE layers: an interval n (layers 0, n, 2n, ...), or a list with 1 for MoE, 0 for dense: "([0]*3+[1]*58)"."""
    moe_ffn_hidden_size: int | None = flag(None, least=1, essential=True)
    """Hidden size of each routed expert. Default: `--ffn-hidden-size`."""
    moe_router_topk: int = flag(2, least=1, essential=True)
    """Number of experts each token is routed to."""
    moe_router_score_function: Annotated[str, SCORE_FUNCTIONS] = flag("softmax")
    """Function that converts router logits to scores; imported files may add functions (see `--import`).
    `renormalized_softmax` is softmax over all experts, whose selected scores are divided by their sum; it supports an
    expert bias (not in Megatron-LM)."""
    moe_router_pre_softmax: bool = flag(False)
    """Apply softmax over all experts before the top-k selection, without renormalising the selected probabilities."""
    moe_router_num_groups: int | None = flag(None, least=1)
    """Number of groups into which experts are divided for group-limited routing. Default: no group limit."""
    moe_router_group_topk: int | None = flag(None, least=1)
    """Number of expert groups from which each token may select experts. Requires `--moe-router-num-groups`."""
    moe_router_topk_scaling_factor: float | None = flag(None, least=0)
    """Factor by which the final routing probabilities are multiplied. Default: 1."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(None)
    """Dtype of the router GEMM. Default: the dtype of the activations."""
    moe_input_jitter_eps: float | None = differs(None, "during training only", least=0, below=1)
    """Multiply the router input by uniform noise in [1 - eps, 1 + eps]."""
    moe_router_force_load_balancing: bool = flag(False)
    """Replace router logits by random values, to measure speed with balanced experts."""
    moe_router_force_biased: float | None = differs(
        None, "a positive value draws the bias once per step, not in every forward pass"
    )
    """Replace router logits by random values plus a random bias per expert, to measure speed with unbalanced experts.
    The absolute value is the standard deviation of the bias; a negative value draws the bias once per layer."""
    moe_router_force_skew: float | None = new_flag(None, least=1)
    """Replace router logits by random values under which the busiest expert receives this many times the mean load, to
    measure speed with unbalanced experts. Expert popularity is log-normal. Its order is drawn for every step and layer
    from the seed, and is the same for all layouts."""
    moe_enable_routing_replay: bool = differs(False, "no effect: expert choices can always be recorded and replayed")
    """Let a program record expert choices and replay them (`megatron_moe.moe.routing_replay`)."""

    moe_router_load_balancing_type: tuple[Annotated[str, BALANCING], ...] = differs(
        ("aux_loss",),
        "Megatron-LM has no expert_choice; global_aux_loss is independent of the number of data-parallel ranks, while "
        "Megatron-LM divides it by that number (docs/moe.md)",
    )
    """Load balancing: `none`, one or more auxiliary losses, or one method that replaces the top-k selection. The losses
    are computed per microbatch (aux_loss), sequence (seq_aux_loss) or global batch (global_aux_loss). Imported files
    may add losses (see `--import`)."""
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,), least=0)
    """Coefficient of each balancing loss, in the order of `--moe-router-load-balancing-type`."""
    moe_z_loss_coeff: float | None = flag(None, least=0)
    """Coefficient of the router z-loss, which keeps logits small. Default: no z-loss."""
    moe_router_enable_expert_bias: bool = differs(False, "the bias is not updated in skipped steps")
    """Add a bias per expert to the selection scores, updated once per global batch to balance the load."""
    moe_router_bias_update_rate: float = flag(1e-3, least=0)
    """Amount by which the expert bias changes per step. The bias increases for experts with fewer tokens than the
    mean and decreases for experts with more."""
    moe_router_quantile_balancing_ema: float = flag(0.0, least=0, below=1)
    """Weight of the previous thresholds in the exponential moving average that quantile balancing uses."""

    moe_expert_capacity_factor: float | None = flag(None)
    """Maximum number of tokens per expert as a multiple of the mean over experts. Not set or negative: no limit."""
    moe_token_drop_policy: Literal["probs", "position"] = flag("probs")
    """Tokens to drop if an expert exceeds its capacity: those with the lowest probability (probs) or at the last
    positions (position)."""
    moe_pad_expert_input_to_capacity: bool = flag(False)
    """Pad the input of every expert to its capacity."""
    moe_expert_rank_capacity_factor: float | None = differs(
        None,
        "used by the exchange through symmetric memory and by hybridep; a step that needs more rows is repeated with a "
        "larger bound, no token is dropped",
        least=0,
    )
    """Bound on the tokens that the experts of a rank receive, as a multiple of the mean over ranks; it sizes the
    buffers. Default: 1.25."""

    moe_enable_echo: bool = differs(
        False, "Megatron-LM has it as a prototype (pull request 2368), with other planners too"
    )
    """Clone busy experts on expert-parallel ranks with fewer tokens, so that all ranks process similar numbers of
    tokens. A planner on the device chooses the clones of every microbatch; weights are sent to them, and their
    gradients are added to those of the expert. Results do not change. Requires
    `--moe-token-dispatcher-type alltoall`, which then uses NCCL."""
    moe_num_echo_experts: int | None = flag(None, least=1)
    """Number of clones that a layer can have on all expert-parallel ranks together, a multiple of
    `--expert-model-parallel-size`. Requires `--moe-enable-echo`."""
    moe_echo_expert_dispatch_overlap: bool = flag(False)
    """Send weights to clones while the experts of the rank compute. Requires `--moe-enable-echo`."""
    moe_echo_recompute_expert_dispatch: bool = flag(False)
    """Free the weights of clones after forward, and send them again in backward. Requires `--moe-enable-echo`."""
    moe_router_padding_for_quantization: bool = differs(
        False, "rows are padded on the rank of the expert, after the exchange; results do not change"
    )
    """Pad the rows of every expert to a multiple of the block length of FP8 and FP4 GEMMs: 128 for blockwise and nvfp4,
    32 for mxfp8, 16 for other recipes."""
    moe_grouped_gemm: bool = flag(False)
    """Compute all experts of a rank with one grouped GEMM instead of a loop."""
    moe_expert_wgrad_interval: int = new_flag(1, least=1)
    """Number of microbatches whose expert weight gradients are computed in one GEMM: the gradient buffer is read and
    written only once, but the GEMM inputs of all these microbatches stay in memory."""
    moe_shared_expert_intermediate_size: int | None = flag(None, least=0)
    """Total hidden size of the shared experts. Default: no shared experts, as with 0."""
    moe_shared_expert_gate: bool = flag(False)
    """Multiply the output of the shared experts by a gate: the sigmoid of a learned projection of each token."""
    moe_shared_expert_overlap: bool = differs(False, "available with every dispatcher")
    """Overlap shared experts with expert-parallel communication."""
    moe_latent_size: int | None = flag(None, least=1)
    """Input and output size of routed experts. Tokens are projected to this size before the experts and back to the
    hidden size after them."""
    moe_apply_probs_on_input: bool = flag(False)
    """Multiply tokens by their routing probability before the expert; requires top-1 routing."""
    moe_memory_efficient_permutation: bool = new_flag(True, "always on in Megatron-LM")
    """Apply routing probabilities before the second expert GEMM, so that expert outputs are not saved for backward.
    Off: apply the probabilities in the unpermutation, for comparison."""
    moe_use_upcycling: bool = differs(False, "scales only the second matrix of each expert (docs/moe.md)")
    """Convert the dense checkpoint of `--load` into experts and continue training."""
    moe_upcycling_granularity: int = flag(1, least=1)
    """Number of slices into which upcycling divides each dense MLP; every expert is initialised with one slice."""
    moe_per_layer_logging: bool = flag(False)
    """Log balancing losses per layer."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = differs(
        "allgather",
        "if one rank holds all experts, every type is the same local permutation; between hosts, flex and alltoall "
        "send a token once per host",
    )
    """Token exchange between expert-parallel ranks: all ranks receive all tokens (allgather), each token is sent once
    per selected expert (alltoall), or once per rank that holds selected experts (flex)."""
    moe_alltoall_backend: Literal["auto", "nccl"] = new_flag("auto")
    """Transport of `--moe-token-dispatcher-type alltoall`. auto: symmetric memory, as in flex, if the expert ranks are
    GPUs of one host and no expert selects its tokens; otherwise NCCL. nccl: always sends one row per choice over
    NCCL."""
    moe_flex_dispatcher_backend: Annotated[str, TRANSPORTS] = differs(
        SYMMETRIC.name,
        "the default, symmetric, is not in Megatron-LM: it writes directly to the memory of the other GPUs. It "
        "replaces ncclep, and also deepep and hybridep if their library is not installed or does not support the "
        "expert ranks",
    )
    """Transport of the flex dispatcher. `copies`: copy engines send all tokens to all ranks and need no SMs, which
    pays if exchanges are overlapped. Between hosts, `symmetric` is `hierarchical`, which sends each token once per
    host, over NCCL. Imported files may add transports (see `--import`)."""
    moe_flex_require_backend: bool = new_flag(False)
    """Reject the run if another transport would replace that of `--moe-flex-dispatcher-backend`."""
    moe_flex_dispatcher_num_sms: int | None = flag(None, least=1)
    """Number of SMs that the flex dispatcher uses. Default: all SMs (symmetric), 20 (deepep) or the library's default
    (hybridep). No effect with copies."""
    moe_dispatch_fwd_dtype: Literal["bf16", "mxfp8", "fp8"] = differs("bf16", _WIRE)
    """Format in which dispatch sends tokens: bf16 (the dtype of the activations), or with the blockwise (fp8) or mxfp8
    recipe quantised elements and their scales. Each token is quantised once, and fc1 multiplies the received
    elements."""
    moe_combine_bwd_dtype: Literal["bf16", "mxfp8", "fp8"] = differs("bf16", _WIRE)
    """Format in which the backward of combine sends gradients; see `--moe-dispatch-fwd-dtype`. Expert outputs and the
    gradients of dispatched tokens are always sent in bf16."""
    moe_permute_fusion_into_hybridep: bool = flag(False)
    """Let hybridep sort tokens by expert in its send and receive kernels."""
    moe_hybridep_num_blocks_permute: int | None = flag(None, least=1)
    """Number of thread blocks with which hybridep sorts received tokens. Default: the library's default."""
    moe_hybridep_num_blocks_unpermute: int | None = flag(None, least=1)
    """Number of thread blocks with which hybridep sums expert outputs before it returns them. Default: the library's
    default."""
    moe_hybridep_num_sms_preprocessing: int = flag(108, least=1)
    """Number of SMs with which hybridep computes the layout of an exchange."""
    moe_n_hash_layers: int = flag(0, least=0)
    """Number of layers, counted from the first, in which a table with the experts of every token id replaces the
    selection of experts by their scores. Probabilities are computed from the scores; these layers have no expert
    bias."""
    moe_routing_trace_path: FilePath | None = differs(
        None, "also traces replays of CUDA graphs; records have the index of the microbatch in the global batch"
    )
    """Folder to which every rank writes the selected experts of each router call as JSON lines, in
    router_trace_rank0.jsonl and so on."""
    moe_routing_trace_max_training_iters: int | None = flag(None, least=1)
    """Number of iterations after which tracing of routing decisions ends. Default: all. A record takes about four bytes
    per token and selected expert."""
    moe_routing_replay_path: FilePath | None = new_flag(None)
    """Folder with the routing decisions of an earlier run (see `--moe-routing-trace-path`), which replace those of the
    routers in training. Probabilities are computed from the logits. Expert- and tensor-parallel sizes may differ from
    those of the earlier run. If this run has more iterations or microbatches, the replay begins again with the first
    ones."""
