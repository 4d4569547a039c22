"""Public MoE architectures (data_files/zoo_models.tsv) as command lines and model configs.

Models with unsupported components are omitted: linear attention, sparse-attention indexers, Mamba.
Unsupported routers (the sparsemixer of Phi-3.5-MoE, the corrected softmax of ERNIE) are replaced by supported ones
with the same parameters, ERNIE's by a sigmoid router.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from megatron_moe.config.attention import AttentionConfig, CoreAttentionConfig, NormConfig, RopeConfig, yarn_mscale
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.model import LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import ExpertsConfig, MoEConfig, RouterConfig, SharedExpertsConfig

_FILE = Path(__file__).parents[1] / "data_files" / "zoo_models.tsv"
_VALUES = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "moe-ffn-hidden-size", "num-attention-heads", "rotary-base"),
    *("rotary-percent", "normalization", "norm-epsilon", "num-experts", "moe-router-topk", "moe-layer-freq"),
    *("moe-router-score-function", "moe-router-num-groups", "moe-router-group-topk", "moe-router-topk-scaling-factor"),
    *("vocab-size", "kv-channels", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"),
    "softmax-type",
)
_SWITCHES = ("moe-shared-expert-gate", "moe-router-pre-softmax", "moe-router-enable-expert-bias", "add-qkv-bias")
_RUN = "--micro-batch-size 1 --seq-length 8 --train-iters 1 --max-position-embeddings 64 --mock-data --lr 1e-3 --swiglu"


@dataclass(frozen=True)
class ZooRow:
    """One row of the table: values by flag name, "-" where a flag does not apply."""

    cells: dict[str, str]

    def __str__(self) -> str:
        return self.cells["model"]

    def integer(self, flag: str) -> int:
        return int(self.cells[flag])

    def integer_or_none(self, flag: str) -> int | None:
        return None if self.cells[flag] == "-" else int(self.cells[flag])

    def number(self, flag: str) -> float:
        return float(self.cells[flag])

    def yes(self, flag: str) -> bool:
        return {"True": True, "False": False}[self.cells[flag]]

    @property
    def is_mla(self) -> bool:
        return self.cells["kv-lora-rank"] != "-"


def zoo_rows() -> list[ZooRow]:
    with _FILE.open() as lines:
        return [ZooRow(cells) for cells in csv.DictReader(lines, delimiter="\t")]


def command_line(row: ZooRow) -> list[str]:
    """Command line of a short run on one rank."""
    words = [*_RUN.split(), "--tokenizer-type", "NullTokenizer", "--make-vocab-size-divisible-by", "1"]
    for flag in _VALUES:
        if row.cells[flag] != "-":
            words += [f"--{flag}", row.cells[flag]]
    words += [f"--{flag}" for flag in _SWITCHES if row.yes(flag)]
    words += _attention_flags(row)
    if row.integer("moe-shared-expert-intermediate-size"):
        words += ["--moe-shared-expert-intermediate-size", row.cells["moe-shared-expert-intermediate-size"]]
    if row.integer("mtp-num-layers"):
        words += ["--mtp-num-layers", row.cells["mtp-num-layers"]]
    if not row.yes("tied-embeddings"):
        words.append("--untie-embeddings-and-output-weights")
    if not row.yes("linear-bias"):
        words.append("--disable-bias-linear")
    if row.cells["activation"] == "quick_gelu":
        words.remove("--swiglu")
        words += "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0".split()
    return words


def _attention_flags(row: ZooRow) -> list[str]:
    words = []
    if row.is_mla:
        words += ["--multi-latent-attention", "--position-embedding-type", "rope"]
    else:
        words += ["--group-query-attention", "--num-query-groups", row.cells["num-query-groups"]]
        words += ["--position-embedding-type", "rope" if row.cells["yarn"] == "-" else "yarn"]
    if row.cells["qk-layernorm"] != "False" and row.cells["qk-layernorm"] != "none":
        words.append("--qk-layernorm")
    if row.cells["qk-layernorm"] == "full":
        words += ["--qk-layernorm-over", "all-heads"]
    if row.cells["window-size"] != "-":
        words += ["--window-size", "127,0", "--window-attn-skip-freq", "2"]
    yarn = dict(pair.split("=") for pair in row.cells["yarn"].split()) if row.cells["yarn"] != "-" else {}
    for key, flag in (
        ("factor", "rotary-scaling-factor"),
        ("beta_fast", "yarn-beta-fast"),
        ("mscale", "mscale"),
        ("mscale_all_dim", "mscale-all-dim"),
    ):
        if key in yarn:
            words += [f"--{flag}", yarn[key]]
    if yarn.get("truncate") == "0":
        words.append("--no-yarn-correction-range-round-to-int")
    return words


def model_config(row: ZooRow) -> ModelConfig:
    norm = NormConfig(
        kind="LayerNorm" if row.cells["normalization"] == "LayerNorm" else "RMSNorm", eps=row.number("norm-epsilon")
    )
    num_mtp = row.integer("mtp-num-layers")
    return ModelConfig(
        hidden_size=row.integer("hidden-size"),
        vocab_size=row.integer("vocab-size"),
        layers=tuple(_layer(row, index, norm, is_moe) for index, is_moe in enumerate(_moe_pattern(row))),
        norm=norm,
        position_embedding="rope",
        tied_embeddings=row.yes("tied-embeddings"),
        mtp=MTPConfig(num_layers=num_mtp) if num_mtp else None,
    )


def _moe_pattern(row: ZooRow) -> list[int]:
    """MoE pattern of the layers, from `([0]*3+[1]*58)` or 1."""
    text, num_layers = row.cells["moe-layer-freq"], row.integer("num-layers")
    if text == "1":
        return [1] * num_layers
    pattern: list[int] = []
    for term in text.strip("()").split("+"):
        value, _, times = term.partition("*")
        pattern += [int(value.strip("[]"))] * int(times or 1)
    assert len(pattern) == num_layers, f"{row}: {text}"
    return pattern


def _layer(row: ZooRow, index: int, norm: NormConfig, is_moe: int) -> LayerConfig:
    mixer = _mla(row, norm) if row.is_mla else _attention(row, index, norm)
    feed_forward = _moe(row) if is_moe else _mlp(row, row.integer("ffn-hidden-size"))
    return LayerConfig(mixer=mixer, feed_forward=feed_forward, norm=norm)


def _rope(row: ZooRow, dim: int) -> RopeConfig:
    yarn = dict(pair.split("=") for pair in row.cells["yarn"].split()) if row.cells["yarn"] != "-" else {}
    return RopeConfig(
        dim=dim,
        base=row.number("rotary-base"),
        interleaved=row.is_mla,
        scaling="yarn" if yarn else "none",
        scaling_factor=float(yarn.get("factor", 1)),
        beta_fast=float(yarn.get("beta_fast", 32)),
        mscale=float(yarn.get("mscale", 1)),
        mscale_all_dim=float(yarn.get("mscale_all_dim", 0)),
        truncate=yarn.get("truncate") != "0",
    )


def _attention(row: ZooRow, index: int, norm: NormConfig) -> AttentionConfig:
    head_dim, window = row.integer("kv-channels"), row.cells["window-size"]
    core = CoreAttentionConfig(
        softmax_scale=head_dim**-0.5,
        window=(int(window.split()[0]), 0) if window != "-" and index % 2 == 0 else None,
        sinks=row.cells["softmax-type"] == "learnable",
    )
    return AttentionConfig(
        hidden_size=row.integer("hidden-size"),
        num_heads=row.integer("num-attention-heads"),
        num_query_groups=row.integer("num-query-groups"),
        head_dim=head_dim,
        core=core,
        rope=_rope(row, int(head_dim * row.number("rotary-percent"))),
        qk_norm=row.cells["qk-layernorm"],
        norm=norm,
        qkv_bias=row.yes("add-qkv-bias"),
        out_bias=row.yes("linear-bias"),
    )


def _mla(row: ZooRow, norm: NormConfig) -> MLAConfig:
    head_dim, rope_dim = row.integer("qk-head-dim"), row.integer("qk-pos-emb-head-dim")
    rope = _rope(row, rope_dim)
    gain = yarn_mscale(rope.scaling_factor, rope.mscale_all_dim)
    return MLAConfig(
        hidden_size=row.integer("hidden-size"),
        num_heads=row.integer("num-attention-heads"),
        q_lora_rank=row.integer_or_none("q-lora-rank"),
        kv_lora_rank=row.integer("kv-lora-rank"),
        qk_head_dim=head_dim,
        qk_rope_dim=rope_dim,
        v_head_dim=row.integer("v-head-dim"),
        core=CoreAttentionConfig(softmax_scale=(head_dim + rope_dim) ** -0.5 * gain**2),
        rope=rope,
        qk_norm=row.yes("qk-layernorm"),
        norm=norm,
    )


def _activation(row: ZooRow) -> ActivationConfig:
    if row.cells["activation"] == "quick_gelu":
        return ActivationConfig(kind="quick_gelu", gated=True, clamp=7.0, linear_offset=1.0)
    return ActivationConfig(kind="silu", gated=True)


def _mlp(row: ZooRow, ffn_hidden_size: int) -> MLPConfig:
    return MLPConfig(
        hidden_size=row.integer("hidden-size"),
        ffn_hidden_size=ffn_hidden_size,
        activation=_activation(row),
        bias=row.yes("linear-bias"),
    )


def _moe(row: ZooRow) -> MoEConfig:
    hidden, num_experts, biased = row.integer("hidden-size"), row.integer("num-experts"), row.yes("linear-bias")
    shared_width = row.integer("moe-shared-expert-intermediate-size")
    router = RouterConfig(
        hidden_size=hidden,
        num_experts=num_experts,
        topk=row.integer("moe-router-topk"),
        score_function=row.cells["moe-router-score-function"],
        pre_softmax=row.yes("moe-router-pre-softmax"),
        num_groups=row.integer_or_none("moe-router-num-groups"),
        group_topk=row.integer_or_none("moe-router-group-topk"),
        scaling_factor=None
        if row.cells["moe-router-topk-scaling-factor"] == "-"
        else row.number("moe-router-topk-scaling-factor"),
        expert_bias=row.yes("moe-router-enable-expert-bias"),
        linear_bias=biased,
    )
    experts = ExpertsConfig(
        num_experts=num_experts,
        hidden_size=hidden,
        ffn_hidden_size=row.integer("moe-ffn-hidden-size"),
        activation=_activation(row),
        bias=biased,
    )
    shared = (
        SharedExpertsConfig(mlp=_mlp(row, shared_width), gate=row.yes("moe-shared-expert-gate"))
        if shared_width
        else None
    )
    return MoEConfig(router=router, experts=experts, shared=shared)
