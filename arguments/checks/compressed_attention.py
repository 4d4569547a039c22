"""Rules about compressed attention (`--experimental-attention-variant dsv4_hybrid`)."""

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations
from megatron_moe.config.compressed_attention import OVERLAPPING_RATIO
from megatron_moe.config.text import counted, divisors


def compressed_attention_has_ratios(flags: RuleFlags) -> Violations:
    """Every layer of compressed attention has a compression ratio, and multi-token prediction layers may have a
    different one."""
    if not derive.has_compressed_attention(flags):
        return
    ratios, layers, depths = flags.csa_compress_ratios, flags.num_layers, flags.mtp_num_layers or 0
    # a ratio for the multi-token prediction layer has no effect without multi-token prediction
    if not isinstance(ratios, tuple) or len(ratios) not in (layers, layers + max(depths, 1)):
        given = "no list" if not isinstance(ratios, tuple) else f"a list for {counted(len(ratios), 'layer')}"
        more = f" or, with those of multi-token prediction, {layers + depths}" if depths else ""
        yield (
            f"compressed attention needs the ratios of {layers} layers{more}, but --csa-compress-ratios has {given}",
            "give a list, such as ([0]*2+[4,128]*20)",
        )
        return
    invalid = sorted({ratio for ratio in ratios if ratio < 0 or ratio == 1})
    if invalid:
        listed = ", ".join(map(str, invalid))
        remedy = "use 0 for no entries, or 2 or more"
        yield f"--csa-compress-ratios holds {listed}, but a group has 2 tokens or more", remedy
    if len(set(ratios[layers:])) > 1:
        yield (
            f"--csa-compress-ratios has the ratios {', '.join(map(str, ratios[layers:]))} for multi-token prediction, "
            "whose layers are equal",
            "use equal ratios for them",
        )
    if max(ratios) > flags.seq_length:
        yield (
            f"groups of {max(ratios)} tokens (--csa-compress-ratios) do not fit into sequences of {flags.seq_length}",
            "use longer sequences or smaller ratios",
        )


def compressed_attention_has_sizes(flags: RuleFlags) -> Violations:
    """Compressed attention is a multi-latent attention with a q latent, groups of heads and, with the ratio 4, an
    indexer."""
    if not derive.has_compressed_attention(flags):
        return
    if not flags.multi_latent_attention:
        yield "compressed attention (dsv4_hybrid) uses flags of multi-latent attention", "add --multi-latent-attention"
    if flags.q_lora_rank is None:
        yield "compressed attention (dsv4_hybrid) has a query latent, whose size is not set", "add --q-lora-rank"
    if flags.v_head_dim < flags.qk_pos_emb_head_dim:
        yield (
            f"--v-head-dim {flags.v_head_dim}, the head dimension of compressed attention, is smaller than the "
            f"{flags.qk_pos_emb_head_dim} rotary channels (--qk-pos-emb-head-dim)",
            f"use --v-head-dim {flags.qk_pos_emb_head_dim} or more",
        )
    if flags.num_attention_heads % flags.o_groups:
        remedy = f"use --o-groups {divisors(flags.num_attention_heads, flags.o_groups)}"
        yield f"--o-groups {flags.o_groups} does not divide {counted(flags.num_attention_heads, 'head')}", remedy
    ratios = flags.csa_compress_ratios
    chooses = isinstance(ratios, tuple) and OVERLAPPING_RATIO in ratios and not flags.csa_dense_mode
    sizes = derive.indexer_sizes(flags)
    missing = [option for option, size in sizes.items() if size is None]
    if chooses and missing:
        remedy = f"add {' and '.join(missing)}, or --csa-dense-mode"
        yield f"layers with the compression ratio {OVERLAPPING_RATIO} need the sizes of an indexer", remedy


def compressed_attention_supports_attention_options(flags: RuleFlags) -> Violations:
    """Compressed attention always uses RMS norms, sinks and the window of `--csa-window-size`, and supports neither
    dropout nor QK-clip."""
    if not derive.has_compressed_attention(flags):
        return
    if flags.attention_dropout:
        remedy = "add --attention-dropout 0"
        yield f"compressed attention has no dropout, but --attention-dropout is {flags.attention_dropout:g}", remedy
    if flags.softmax_type != "vanilla" or flags.window_size is not None:
        remedy = "leave out --softmax-type and --window-size"
        yield "compressed attention always has sinks, and its window is --csa-window-size", remedy
    if flags.normalization != "RMSNorm" or flags.apply_layernorm_1p:
        remedy = "use --normalization RMSNorm without zero-centred weights"
        yield "the norms of compressed attention are RMS norms", remedy
    if flags.qk_clip:
        yield "--qk-clip does not apply to compressed attention, which normalises q and k", "leave it out"
