"""Hints: notes on legal settings that are likely unintended."""

from collections.abc import Iterator

from arguments import derive
from arguments.checks.memory import given_recompute_layer_options
from arguments.checks.violation import enabled_options
from arguments.flags import Flags
from megatron_moe.config.registry import ACTIVATIONS, BALANCING, SCORE_FUNCTIONS
from megatron_moe.config.transport import COPIES, SYMMETRIC


def query_groups_without_gqa(flags: Flags) -> Iterator[str]:
    """Megatron ignores --num-query-groups without --group-query-attention."""
    if not flags.group_query_attention and flags.num_query_groups != 1:
        yield f"--num-query-groups {flags.num_query_groups} has no effect without --group-query-attention"


def experts_as_wide_as_dense(flags: Flags) -> Iterator[str]:
    """Experts usually are narrower than dense feed-forward blocks."""
    if flags.num_experts and flags.moe_ffn_hidden_size is None:
        yield "experts are as wide as dense feed-forward blocks, since --moe-ffn-hidden-size is not set"


def bf16_router_with_many_experts(flags: Flags) -> Iterator[str]:
    """With many experts, close router scores round to the same bf16 value."""
    experts = flags.num_experts or 0
    if flags.bf16 and flags.moe_router_dtype is None and experts >= 32:
        yield f"--moe-router-dtype fp32 is better for {experts} experts: in bf16, close scores round to the same value"


def no_load_balancing(flags: Flags) -> Iterator[str]:
    """Without an auxiliary loss or an expert bias, nothing balances the load of the experts."""
    kinds = flags.moe_router_load_balancing_type
    losses = not any(BALANCING.get(kind).replaces_topk for kind in kinds)
    weighted = any(coeff for kind, coeff in zip(kinds, flags.moe_aux_loss_coeff, strict=False) if kind != "none")
    if flags.num_experts and losses and not weighted and not flags.moe_router_enable_expert_bias:
        yield "the experts are not balanced: all balancing losses have coefficient 0, and there is no expert bias"


def functions_without_kernels(flags: Flags) -> Iterator[str]:
    """A registered function that no kernel fuses is computed by plain torch, in several passes over memory."""
    score, activation = flags.moe_router_score_function, flags.activation_func
    found = [f"score function {score}"] if flags.num_experts and not SCORE_FUNCTIONS.get(score).fused else []
    found += [f"activation {activation}"] if activation and not ACTIVATIONS.get(activation).fused else []
    if found:
        yield f"{' and '.join(found)}: computed by plain torch, because no kernel fuses it"


def router_groups_without_limit(flags: Flags) -> Iterator[str]:
    """Expert groups have no effect unless the number of groups per token is limited."""
    if flags.moe_router_num_groups and not flags.moe_router_group_topk:
        yield f"--moe-router-num-groups {flags.moe_router_num_groups} has no effect without --moe-router-group-topk"


def rope_type_without_latent_attention(flags: Flags) -> Iterator[str]:
    """Like Megatron, --rope-type has an effect only with multi-latent attention."""
    kind = flags.position_embedding_type
    if not flags.multi_latent_attention and flags.rope_type not in (None, kind):
        yield f"--rope-type {flags.rope_type} without effect: --position-embedding-type {kind} applies"


def unused_rope_scaling(flags: Flags) -> Iterator[str]:
    """Each scaling flag applies to one kind of RoPE scaling and has no effect on models without that kind."""
    yarn = derive.mla_has_yarn(flags) if flags.multi_latent_attention else flags.position_embedding_type == "yarn"
    unused = []
    if flags.rotary_scaling_factor != 1 and not yarn:
        unused.append(f"--rotary-scaling-factor {flags.rotary_scaling_factor:g}")
    if not flags.multi_latent_attention and flags.position_embedding_type not in ("rope", "yarn"):
        unused += ["--use-rope-scaling"] if flags.use_rope_scaling else []
        if flags.rotary_seq_len_interpolation_factor not in (None, 1):
            unused.append(f"--rotary-seq-len-interpolation-factor {flags.rotary_seq_len_interpolation_factor}")
    if unused:
        yield f"{' and '.join(unused)} without effect: this model does not use that RoPE scaling"


def paged_stash_without_unused_rows(flags: Flags) -> Iterator[str]:
    """A paged stash saves memory by omitting unused buffer rows, but with all experts on one rank every row is used."""
    ranks = derive.expert_ranks(flags)
    if flags.moe_paged_stash and ranks <= 1 and (flags.moe_expert_capacity_factor or 0) <= 0:
        yield "--moe-paged-stash saves no memory if all experts are on one rank: every row is used"


def exchange_overlap_without_effect(flags: Flags) -> Iterator[str]:
    """One expert-parallel rank exchanges no tokens, so nothing can overlap with the exchange."""
    given = enabled_options(
        {
            "--moe-shared-expert-overlap": flags.moe_shared_expert_overlap,
            "--overlap-moe-expert-parallel-comm": flags.overlap_moe_expert_parallel_comm,
            "--overlap-dispatch-backward-with-experts-wgrad": flags.overlap_dispatch_backward_with_experts_wgrad,
        }
    )
    if flags.num_experts and given and derive.expert_ranks(flags) == 1:
        yield f"{given} without effect: one expert-parallel rank exchanges no tokens"


def _exchanges_by(flags: Flags, backend: str) -> bool:
    """Whether the flex dispatcher exchanges tokens between several ranks by the transport `backend`."""
    by_flex = flags.moe_token_dispatcher_type == "flex" and flags.moe_flex_dispatcher_backend == backend
    return by_flex and derive.expert_ranks(flags) > 1


def exchange_overlap_without_gain(flags: Flags) -> Iterator[str]:
    """With at most 4 expert-parallel ranks, --overlap-moe-expert-parallel-comm or few SMs for the dispatcher can make a
    step slower."""
    if derive.expert_ranks(flags) == 1 or flags.expert_model_parallel_size > 4:
        return
    num_sms = flags.moe_flex_dispatcher_num_sms
    if _exchanges_by(flags, SYMMETRIC.name) and num_sms is not None:
        yield (
            f"--moe-flex-dispatcher-num-sms {num_sms} is unlikely to increase speed: two H200 reached 466 TFLOP/s "
            "with 16 SMs and 475 with all SMs, because GEMMs and dispatch become slower; leave the flag out"
        )
    if flags.moe_token_dispatcher_type == "alltoall" and flags.overlap_moe_expert_parallel_comm:
        yield (
            "--overlap-moe-expert-parallel-comm is unlikely to increase speed with --moe-token-dispatcher-type "
            "alltoall: on four H200 it gave 215 TFLOP/s instead of 361; flex never waits for the host"
        )


def copies_without_overlap(flags: Flags) -> Iterator[str]:
    """Copy engines are slower than kernels that push tokens, unless computation runs during exchanges."""
    if not _exchanges_by(flags, COPIES.name):
        return
    if flags.moe_flex_dispatcher_num_sms is not None:
        yield f"--moe-flex-dispatcher-num-sms {flags.moe_flex_dispatcher_num_sms} without effect: copies need no SMs"
    if not (
        flags.overlap_moe_expert_parallel_comm
        or flags.moe_shared_expert_overlap
        or flags.overlap_dispatch_backward_with_experts_wgrad
    ):
        yield (
            "--moe-flex-dispatcher-backend copies is slower than symmetric where nothing is computed during exchanges; "
            "add --overlap-dispatch-backward-with-experts-wgrad and, with shared experts, --moe-shared-expert-overlap"
        )


def preprocess_capture_without_effect(flags: Flags) -> Iterator[str]:
    """If experts are on several ranks, moe_preprocess captures nothing: tokens are sorted outside the graphs."""
    ranks = derive.expert_ranks(flags)
    if flags.cuda_graph_impl != "none" and "moe_preprocess" in flags.cuda_graph_modules and ranks != 1:
        exchanged = f"with experts on {ranks} ranks, the dispatcher sorts tokens outside the graph"
        yield f"--cuda-graph-modules moe_preprocess captures nothing: {exchanged}"


def communication_unit_without_effect(flags: Flags) -> Iterator[str]:
    """A collective transfers a whole unit of sharded weights, or a part that fits the receive buffer
    (docs/decisions/0313)."""
    if flags.suggested_communication_unit_size is not None:
        yield (
            f"--suggested-communication-unit-size {flags.suggested_communication_unit_size} has no effect: one "
            "collective transfers the dense or the expert weights of one layer"
        )


def recompute_layers_without_granularity(flags: Flags) -> Iterator[str]:
    """Megatron ignores the other flags of recompute if --recompute-granularity is not set."""
    names = given_recompute_layer_options(flags) + ["--recompute-modules"] * (flags.recompute_modules is not None)
    if flags.recompute_granularity is None and names:
        yield f"{' and '.join(names)} without effect: nothing is recomputed without --recompute-granularity"


def save_interval_without_folder(flags: Flags) -> Iterator[str]:
    """Checkpoints are saved only if --save or --run-dir is given; --save-interval alone has no effect."""
    if not flags.save and not flags.run_dir and flags.save_interval is not None:
        yield "no checkpoint is saved: neither --save nor --run-dir is given"


def mock_run_without_checkpoint(flags: Flags) -> Iterator[str]:
    """A run on mock data writes no final checkpoint unless --save or --save-interval is given."""
    if flags.run_dir and not derive.save_folder(flags):
        yield "mock data: no checkpoint is saved without --save or --save-interval"


def mock_data_overrides_files(flags: Flags) -> Iterator[str]:
    """Mock data replaces all data files."""
    if flags.mock_data and (flags.data_path or flags.train_data_path):
        yield "--mock-data is given, so the data files are not read"
