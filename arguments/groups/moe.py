"""The Mixture-of-Experts layer: router, balancing, capacity, experts, dispatch."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag
from arguments.values import LayerPattern


@dataclass(frozen=True, kw_only=True)
class MoEFlags:
    """Which layers have experts, how tokens choose them, what keeps them busy, how rows travel."""

    num_experts: int | None = flag(None, least=0, essential=True)
    """Routed experts in every Mixture-of-Experts layer. Not set or 0: all layers are dense."""
    moe_layer_freq: LayerPattern = flag(1, essential=True)
    """Layers with experts: every n-th counted from the first, or a list with 1 for experts: "([0]*3+[1]*58)"."""
    moe_ffn_hidden_size: int | None = flag(None, least=1, essential=True)
    """Width of one routed expert. Not set: that of a dense feed-forward block."""
    moe_router_topk: int = flag(2, least=1, essential=True)
    """Experts that every token visits."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = flag("softmax")
    """How the router's logits become scores."""
    moe_router_pre_softmax: bool = flag(False)
    """Softmax over all experts before the choice; the chosen probabilities are not normalised again."""
    moe_router_num_groups: int | None = flag(None, least=1)
    """Groups of experts for group-limited routing."""
    moe_router_group_topk: int | None = flag(None, least=1)
    """Of `--moe-router-num-groups`: groups of experts that a token may choose from."""
    moe_router_topk_scaling_factor: float | None = flag(None, least=0)
    """Factor on the final probabilities."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(None)
    """Format of the router's matrix product. Not set: that of the activations."""
    moe_input_jitter_eps: float | None = flag(None, least=0, below=1, status="close", note="in training alone")
    """Multiply the router's input by a random factor between 1 - eps and 1 + eps."""
    moe_router_force_load_balancing: bool = flag(False)
    """Random logits, for measuring speed with balanced experts."""
    moe_router_force_biased: float | None = flag(
        None, status="close", note="a positive one is drawn once per step, not in every forward"
    )
    """Random logits with a random bias of this standard deviation per expert, for measuring speed with unbalanced
    experts; negative: drawn once per layer."""
    moe_enable_routing_replay: bool = flag(
        False, status="not yet", harmless=True, note="every forward pass chooses anew"
    )
    """Record and replay the choices of the router."""

    moe_router_load_balancing_type: tuple[
        Literal[
            "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "expert_choice", "none"
        ],
        ...,
    ] = flag(
        ("aux_loss",),
        status="close",
        note="expert_choice is ours; global_aux_loss weighs the same for any number of data-parallel ranks, in "
        "Megatron-LM it is that number of times weaker (docs/moe.md)",
    )
    """What keeps experts equally busy: a loss over the microbatch, over every sequence, over the global batch (several
    may be given), or another way to choose."""
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,), least=0)
    """Weight of every balancing loss, in the order of the types."""
    moe_z_loss_coeff: float | None = flag(None, least=0)
    """Weight of the loss that keeps logits small."""
    moe_router_enable_expert_bias: bool = flag(
        False, status="close", note="it does not move in a step that is left out"
    )
    """Balance by a bias per expert on the choice, moved once per global batch."""
    moe_router_bias_update_rate: float = flag(1e-3, least=0)
    """How far the bias of `--moe-router-enable-expert-bias` moves at once: up for experts with fewer rows than the
    mean, down for those with more."""
    moe_router_quantile_balancing_ema: float = flag(0.0, least=0, below=1)
    """Weight of the old thresholds in quantile balancing."""

    moe_expert_capacity_factor: float | None = flag(None)
    """Rows an expert takes at most, as a multiple of its fair share. Not set or negative: no token is dropped."""
    moe_token_drop_policy: Literal["probs", "position"] = flag("probs")
    """Which rows an expert drops that is full: the least probable or the last."""
    moe_pad_expert_input_to_capacity: bool = flag(False)
    """Every expert gets exactly its capacity, filled with empty rows."""
    moe_expert_rank_capacity_factor: float | None = flag(
        None, status="not yet", harmless=True, note="on one rank the rows have an exact bound"
    )
    """Rows a rank takes at most, as a multiple of its fair share."""

    moe_grouped_gemm: bool = flag(False)
    """One grouped matrix product over all experts instead of a loop."""
    moe_expert_wgrad_interval: int = flag(1, least=1, status="ours")
    """Compute weight gradients of experts once for so many microbatches, in one product: their buffer is read and
    written once for all of them, while rows of the microbatches before the last wait in memory."""
    moe_shared_expert_intermediate_size: int | None = flag(None, least=0)
    """Width of all shared experts together, which every token visits. Not set or 0: none."""
    moe_shared_expert_gate: bool = flag(False)
    """A sigmoid gate per token on the shared experts."""
    moe_shared_expert_overlap: bool = flag(False, status="close", note="with every dispatcher")
    """Run shared experts while rows travel."""
    moe_latent_size: int | None = flag(None, least=1)
    """Width of the space in which routed experts work; tokens are projected into it and back."""
    moe_apply_probs_on_input: bool = flag(False)
    """Multiply rows by their probability before the expert, for one expert per token."""
    moe_memory_efficient_permutation: bool = flag(True, status="ours", note="Megatron-LM always has the first form")
    """Multiply rows by their probability before the second matrix of an expert, so that its results are not kept for
    the backward. Without: after it, as the standard permutation does; to compare the two."""
    moe_use_upcycling: bool = flag(False, status="close", note="the second matrix takes the whole scale (docs/moe.md)")
    """Turn the dense checkpoint of `--load` into experts and train on."""
    moe_upcycling_granularity: int = flag(1, least=1)
    """How many experts a dense feed-forward block is cut into."""
    moe_per_layer_logging: bool = flag(False)
    """Log balancing losses of every layer."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag(
        "allgather",
        status="close",
        note="flex over several ranks is not available yet; where one rank has all experts, all kinds are the same "
        "local permutation",
    )
    """How rows travel between expert-parallel ranks: every rank gets all tokens, rows go to the ranks of their experts,
    or a library does it (`--moe-flex-dispatcher-backend`)."""
    moe_n_hash_layers: int = flag(0, status="not yet", note="every layer with experts has a router")
    """First layers whose tokens choose experts by a hash."""
    moe_routing_trace_path: str | None = flag(
        None, status="not yet", harmless=True, note="expert loads are counted, choices are not kept"
    )
    """Folder for the choices of every step."""
