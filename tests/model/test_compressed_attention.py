"""Compressed attention against its formulas, one token at a time."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from arguments.huggingface import model_flags, rebuilt_from_flags
from megatron_moe.build import build_model
from megatron_moe.config.attention import NormConfig, RopeConfig
from megatron_moe.config.compressed_attention import CompressedAttentionConfig
from megatron_moe.config.dsa import IndexerConfig
from megatron_moe.config.model_differences import config_differences
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.cost_model.flops import gemm_flops
from megatron_moe.kernels.reference import sparse_attention
from megatron_moe.layers.quantized_module import quantizers_of
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.model.rope import inverse_frequencies
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters
from tests.helpers.command_lines import plan_of
from tests.helpers.example_proofs import check_copies, check_layout, check_memory, check_replay, with_fp8
from tests.helpers.mixers import make, run
from tests.helpers.pipelines import KERNELS
from tests.helpers.tiny_models import HIDDEN, compressed_config, make_mb, randn
from tests.helpers.tolerances import EXACT, FP64_REF
from tests.parity import cells
from tests.parity.dimensions import cell_of

SEQ = 23
SCALE = 0.7
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 3 + [2] * 11, [0] * 23])
RESTARTED = torch.tensor([[*range(9), *range(3), *range(11)], [*range(23)]])


class Oracle:
    """Computes compressed attention from its formulas, token by token, with gradients from autograd."""

    def __init__(self, module, mb):
        self.config, self.tokens = module.config, mb.tokens
        self.weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        self.frequencies, self.losses = inverse_frequencies(module.config.rope), []

    def output(self, x_SBH):
        columns = [self.sequence(x_SBH[:, b], b) for b in range(x_SBH.shape[1])]
        return torch.stack(columns, dim=1)

    def rms(self, v, name=None):
        normed = v / torch.sqrt(v.pow(2).mean() + self.config.norm.eps)
        return normed if name is None else normed * self.weights[name]

    def turned(self, v, position, sign=1):
        """Rotates the last channels, as complex numbers, by e^(i angle)."""
        dims = self.config.rope.dim
        angle = sign * position * self.frequencies
        a, b = v[-dims::2], v[-dims + 1 :: 2]
        pairs = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)
        return torch.cat([v[:-dims], pairs.flatten()])

    def entries(self, x, segments, positions, name, width):
        """(entry, its last token, its document) of every whole group of every document."""
        ratio, found = self.config.ratio, []
        wkv, wgate, ape = (
            self.weights[f"{name}.{part}"] for part in ("linear_wkv.weight", "linear_wgate.weight", "ape")
        )
        for document in sorted(set(segments)):
            of_document = [t for t in range(len(x)) if segments[t] == document]
            groups = [of_document[i : i + ratio] for i in range(0, len(of_document) - ratio + 1, ratio)]
            for number, group in enumerate(groups):
                half = slice(width, None) if ratio == 4 else slice(None)
                values = [(wkv @ x[t])[half] for t in group]
                gates = [(wgate @ x[t] + ape[j])[half] for j, t in enumerate(group)]
                if ratio == 4 and number:
                    values += [(wkv @ x[t])[:width] for t in groups[number - 1]]
                    gates += [(wgate @ x[t] + ape[j])[:width] for j, t in enumerate(groups[number - 1])]
                entry = torch.stack(
                    [
                        sum(torch.exp(gates[j][c]) * values[j][c] for j in range(len(gates)))
                        / sum(torch.exp(gates[j][c]) for j in range(len(gates)))
                        for c in range(width)
                    ]
                )
                entry = self.turned(self.rms(entry, f"{name}.norm.weight"), positions[group[0]])
                found.append((entry, group[-1], document))
        return found

    def scores(self, x, latent, keys, position):
        """Indexer score of each key."""
        indexer = self.config.indexer
        x, latent = x.detach(), latent.detach()
        q = (self.weights["indexer.linear_wq_b.weight"] @ latent).view(indexer.num_heads, -1)
        w = self.weights["indexer.linear_weights_proj.weight"] @ x / math.sqrt(len(q.flatten()))
        heads = [self.turned(q[h], position) for h in range(indexer.num_heads)]
        return [sum(w[h] * (heads[h] @ key).clamp(min=0) for h in range(indexer.num_heads)) for key, _, _ in keys]

    def divergence(self, scores, weights_of_heads, denominators):
        """KL divergence between the mean of the heads' probabilities and the indexer's softmax."""
        if not scores:
            return 0.0
        sums = [
            sum(weights[e] / total for weights, total in zip(weights_of_heads, denominators, strict=True)).detach()
            for e in range(len(scores))
        ]
        logs = torch.stack(scores).log_softmax(0)
        return sum(p / sum(sums) * ((p / sum(sums)).log() - log) for p, log in zip(sums, logs, strict=True))

    def sequence(self, x, b):
        config, w, out, indexer = self.config, self.weights, [], self.config.indexer
        segments = [0] * len(x) if self.tokens.segments_BS is None else self.tokens.segments_BS[b].tolist()
        positions = self.tokens.positions_BS[b].tolist()
        kv = [
            self.turned(self.rms(w["linear_kv_proj.weight"] @ x[t], "kv_layernorm.weight"), positions[t])
            for t in range(len(x))
        ]
        made = self.entries(x, segments, positions, "compressor", config.head_dim) if config.ratio else []
        if indexer:
            keys = self.entries(x.detach(), segments, positions, "indexer.compressor", indexer.head_dim)
        for i in range(len(x)):
            latent = self.rms(w["linear_q_down_proj.weight"] @ x[i], "q_layernorm.weight")
            q = (w["linear_q_up_proj.weight"] @ latent).view(config.num_heads, -1)
            seen = [j for j in range(i - config.csa_window_size + 1, i + 1) if j >= 0 and segments[j] == segments[i]]
            before = [e for e, (_, end, document) in enumerate(made) if end <= i and document == segments[i]]
            visible = before
            if indexer:
                scores = self.scores(x[i], latent, [keys[e] for e in before], positions[i])
                best = sorted(zip(before, scores, strict=True), key=lambda pair: (-pair[1].item(), pair[0]))
                before = sorted(e for e, _ in best[: indexer.topk])
                scores = dict(zip(visible, scores, strict=True))
            rows = [kv[j] for j in seen] + [made[e][0] for e in before]
            heads, of_entries, totals = [], [], []
            compared = before if indexer and indexer.sparse_indexer_loss else visible
            for n in range(config.num_heads):
                query = self.turned(self.rms(q[n]), positions[i])
                weights = [torch.exp(query @ row / math.sqrt(config.head_dim)) for row in rows]
                total = sum(weights) + torch.exp(w["sinks"][n])
                context = sum(weight * row for weight, row in zip(weights, rows, strict=True)) / total
                heads.append(self.turned(context, positions[i], sign=-1))
                of_entries.append([torch.exp(query @ made[e][0] / math.sqrt(config.head_dim)) for e in compared])
                of_window = sum(weights[: len(seen)]) + torch.exp(w["sinks"][n])
                totals.append(of_window + sum(of_entries[-1]))
            if indexer and (self.tokens.valid_BS is None or self.tokens.valid_BS[b, i]):
                self.losses.append(self.divergence([scores[e] for e in compared], of_entries, totals))
            per_group = config.num_heads // config.o_groups
            matrices = w["linear_o_group_proj"].chunk(config.o_groups)
            latents = [matrices[g] @ torch.cat(heads[g * per_group :][:per_group]) for g in range(config.o_groups)]
            out.append(w["linear_proj.weight"] @ torch.cat(latents))
        return torch.stack(out)


CASES = {
    "window": (0, {}),
    "heavy": (8, {}),
    "few entries": (4, {}),
    "many entries": (4, {"indexer": {"topk": 99}}),
    "linear scores without rotation": (4, {"indexer": {"rotate_activation": False}}),
    "dense": (4, {"indexer": False}),
    "sparse loss": (4, {"indexer": {"sparse_indexer_loss": True}}),
}


TOKENS = {
    "sequences": {},
    "documents": {"segments_BS": DOCUMENTS},
    "documents from 0": {"segments_BS": DOCUMENTS, "positions_BS": RESTARTED},
    "padding": {"valid_BS": torch.arange(SEQ) < torch.tensor([[17], [SEQ]])},
}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        *((name, "sequences") for name in CASES),
        ("heavy", "documents"),
        ("few entries", "documents from 0"),
        ("sparse loss", "padding"),
    ],
)
def test_output_and_gradients_equal_the_formulas(name, tokens, monkeypatch):
    monkeypatch.setattr(sparse_attention, "BLOCK_BYTES", 1 << 12)
    ratio, changes = CASES[name]
    metrics = MetricAccumulator()
    mb = make_mb(2, SEQ, aux_loss_scale=SCALE, metrics=metrics, **TOKENS[tokens])
    module = make(compressed_config(ratio, **changes))
    torch.nn.init.normal_(module.sinks, generator=torch.Generator().manual_seed(4))
    oracle, probe = Oracle(module, mb), randn(SEQ, 2, HIDDEN, seed=2)
    x, same_x = randn(SEQ, 2, HIDDEN).requires_grad_(), randn(SEQ, 2, HIDDEN).requires_grad_()
    out, expected = run(module, x, mb), oracle.output(same_x)
    (out * probe).sum().backward()
    loss = sum(oracle.losses) / max(len(oracle.losses), 1)
    ((expected * probe).sum() + SCALE * 0.5 * loss).backward()
    FP64_REF.check(out, expected, "output")
    FP64_REF.check(x.grad, same_x.grad, "input gradient")
    gradients = {name: p.grad for name, p in module.named_parameters()}
    FP64_REF.check_all(gradients, {name: oracle.weights[name].grad for name in gradients}, "gradients")
    assert all(gradient.abs().max() > 1e-6 for gradient in gradients.values())
    if module.indexer is not None:
        assert float(metrics.entries["indexer_loss", 0].value) == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_later_tokens_change_nothing(name):
    ratio, changes = CASES[name]
    module, mb, x = make(compressed_config(ratio, **changes)), make_mb(2, SEQ), randn(SEQ, 2, HIDDEN)
    changed = torch.cat([x[:14], randn(SEQ - 14, 2, HIDDEN, seed=9)])
    EXACT.check(run(module, x, mb)[:14].detach(), run(module, changed, mb)[:14].detach(), "earlier outputs")


TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 8: "heavily_compressed_attention"}
PUBLISHED = {
    "wq_a": "q_a_proj", "q_norm": "q_a_norm", "wq_b": "q_b_proj", "wkv": "kv_proj", "wgate": "gate_proj",
    "wo_a": "o_a_proj", "wo_b": "o_b_proj", "attn_sink": "sinks", "ape": "position_bias", "norm": "kv_norm",
}  # fmt: skip


def their_name(published):
    """Name that the module of transformers has for a tensor of a published checkpoint."""
    parts = [PUBLISHED.get(part, part) for part in published.removeprefix("attn.").split(".")]
    if parts[0] == "indexer":
        inner = parts[2:] if parts[1] == "compressor" else parts[1:]
        parts = ["compressor", "indexer", *(["scorer"] if inner[0] == "weights_proj" else []), *inner]
    return ".".join(parts)


@pytest.mark.parametrize("name", ["window", "heavy", "few entries", "many entries"])
def test_output_and_gradients_equal_transformers(name):
    ratio, changes = CASES[name]
    config = compressed_config(ratio, **changes)
    indexer, rope = compressed_config().indexer, compressed_config().rope
    published = DeepseekV4Config(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        q_lora_rank=config.q_lora_rank,
        layer_types=[TYPES[ratio]],
        compress_rates={TYPES[4]: 4, TYPES[8]: 8},
        sliding_window=config.csa_window_size,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        index_n_heads=indexer.num_heads,
        index_head_dim=indexer.head_dim,
        index_topk=config.indexer.topk if config.indexer else 1,
        rms_norm_eps=config.norm.eps,
        qk_rope_head_dim=rope.dim,
        compress_rope_theta=rope.base,
        max_position_embeddings=256,
        attn_implementation="eager",
        rope_parameters={
            "rope_type": "yarn",
            "factor": rope.scaling_factor,
            "beta_fast": rope.beta_fast,
            "original_max_position_embeddings": rope.original_max_positions,
        },
    )
    theirs = modeling_deepseek_v4.DeepseekV4Attention(published, 0).double()
    ours, mb = make(config), make_mb(2, SEQ)
    names = {rule.name: their_name(rule.hf_names[0]) for rule in config.name_rules("deepseek_v4")}
    theirs.load_state_dict({names[name]: value for name, value in ours.state_dict().items()})
    x, same_x, probe = (randn(SEQ, 2, HIDDEN, seed=seed) for seed in (1, 1, 2))
    out = run(ours, x.requires_grad_(), mb)
    (out * probe).sum().backward()
    tables = modeling_deepseek_v4.DeepseekV4RotaryEmbedding(published)
    positions = mb.tokens.positions_BS
    positional = {kind: tables(same_x, positions, layer_type=kind) for kind in ("main", "compress")}
    distance = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    mask = torch.where((distance >= 0) & (distance < config.csa_window_size), 0.0, -torch.inf).double()
    same_x.requires_grad_()
    expected, _ = theirs(same_x.transpose(0, 1), positional, positions, mask.expand(2, 1, -1, -1))
    (expected.transpose(0, 1) * probe).sum().backward()
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(out, expected.transpose(0, 1))
    close(x.grad, same_x.grad)
    of_theirs = {name: p.grad for name, p in theirs.named_parameters()}
    for own, parameter in ours.named_parameters():
        if not own.startswith("indexer."):
            close(parameter.grad, of_theirs[names[own]])


def with_entries(plan, **changes):
    """Plan whose layers have all kinds of compressed attention in turn."""
    sizes = {"hidden_size": plan.model.hidden_size, "norm": plan.model.norm, **changes}
    kinds = [compressed_config(4, **sizes), compressed_config(0, **sizes), compressed_config(8, **sizes)]
    layers = tuple(replace(layer, mixer=kinds[index % len(kinds)]) for index, layer in enumerate(plan.model.layers))
    return replace(plan, model=replace(plan.model, layers=layers))


@pytest.mark.parametrize(
    ("cell", "sparse"),
    [
        ("attention=mla cp=2 documents=packed balance=none cpcomm=allgather", True),
        ("attention=mla cp=2 pp=2 accumulation=2 balance=none recompute=full cpcomm=allgather", False),
        ("attention=mla dp=2 ep=2 dispatcher=alltoall balance=none", True),
        ("attention=mla pp=2 vpp=2 dp=2 dispatcher=alltoall accumulation=2 balance=none mtp=on recompute=small", True),
    ],
)
def test_layouts_equal_one_rank(cell, sparse):
    plan = with_entries(cells.plan_of(cell_of(cell)), indexer={"sparse_indexer_loss": sparse})
    check_layout(plan)


def test_copies_between_context_parallel_ranks_equal_one_rank(monkeypatch):
    cell = "attention=mla cp=2 documents=packed balance=none cpcomm=allgather"
    check_copies(with_entries(cells.plan_of(cell_of(cell))), monkeypatch)


def test_layouts_with_fp8_gemms_equal_one_rank():
    plan = with_fp8(with_entries(cells.plan_of(cell_of("attention=mla cp=2 balance=none cpcomm=allgather"))))
    check_layout(plan)
    names = {quantizer.name for quantizer in quantizers_of(build_model(plan, ParallelContext.single(), KERNELS))}
    linears = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_proj", "linear_proj")
    assert {f"decoder.layers.0.self_attention.{name}" for name in linears} <= names
    assert not any("compressor" in name or "indexer" in name for name in names)


def test_replayed_graphs_equal_eager_steps():
    check_replay(with_entries(cells.plan_of(cell_of("attention=mla balance=none"))))


@pytest.mark.parametrize("ratio", [0, 4, 8])
def test_declared_parameters_are_those_of_the_module(ratio):
    config = compressed_config(ratio)
    found = {name: (p.global_shape, p.meta, p.numel()) for name, p in named_parameters(make(config))}
    parallel = ParallelConfig()
    assert {s.name: (s.shape, s.meta, s.local_numel(parallel)) for s in config.parameters(parallel)} == found


def test_tensor_parallel_ranks_are_rejected():
    assert "cannot share" in compressed_config().layout_problem(ParallelConfig(tp=2, world_size=2))
    assert compressed_config().layout_problem(ParallelConfig(cp=2, world_size=2)) is None


WORDS = (
    "--multi-latent-attention --no-group-query-attention --experimental-attention-variant dsv4_hybrid "
    "--attention-dropout 0 --q-lora-rank 256 --v-head-dim 128 --qk-pos-emb-head-dim 32 --o-groups 4 --o-lora-rank 256 "
    "--num-attention-heads 32 --dsa-indexer-n-heads 16 --dsa-indexer-head-dim 64 --dsa-indexer-topk 128 "
    "--csa-window-size 64 --seq-length 1024 --max-position-embeddings 1024 --hidden-size 1024 --ffn-hidden-size 4096 "
    "--bf16 --transformer-impl local --micro-batch-size 2 --csa-compress-ratios"
)


@pytest.mark.parametrize(
    "more",
    [
        "([4]*4) --csa-dense-mode",
        "([4]*4) --recompute-granularity selective --recompute-modules mla_up_proj",
        "([4,4,128,0]) --dsa-indexer-loss-coeff 0.1",
        "([4,4,128,0]) --dsa-indexer-loss-coeff 0.1 --enable-hyper-connections --fp8-format e4m3 "
        "--fp8-recipe blockwise --mhc-sinkhorn-iterations 4",
    ],
)
def test_emulated_memory_agrees_with_the_cost_model(more):
    check_memory(plan_of(f"{WORDS} {more}"))


def test_layers_and_prediction_depths_have_their_ratios():
    plan = plan_of(f"{WORDS} ([0,4,128,4]+[0]) --mtp-num-layers 1 --csa-compress-rotary-base 160000")
    assert [layer.mixer.ratio for layer in plan.model.layers] == [0, 4, 128, 4]
    assert plan.model.mtp.layer.mixer.ratio == 0
    window, chosen = (plan.model.layers[index].mixer for index in (0, 1))
    assert (window.rope.base, chosen.rope.base) == (10000.0, 160000.0)
    assert (window.rope.scaling, chosen.rope.scaling, chosen.rope.concentration) == ("none", "yarn", 1.0)
    assert model_flags(plan.model)["csa_compress_ratios"] == (0, 4, 128, 4, 0)
    assert not config_differences(rebuilt_from_flags(plan.model), plan.model)


def test_flops_count_the_visible_pairs():
    """Counts a window of 3 tokens and 2 selected of (t + 1) // 4 entries, approximated by areas."""
    window, chosen, every = compressed_config(0), compressed_config(4), compressed_config(8)
    pairs = 2 * 3 * 64 - 9
    assert window.flops(64).core_attention == window.q_width * pairs * 6
    assert chosen.flops(64).core_attention == chosen.q_width * (pairs + 2 * (2 * 64 - 2 * 4)) * 6
    assert chosen.flops(64).indexer == (8 * 8 * 6 + chosen.q_width * 2) * 64 * 16 // 2
    assert every.flops(64).core_attention == every.q_width * (pairs + 8 * 64) * 6


@pytest.mark.parametrize("coeff", [0.0, 0.5])
@pytest.mark.parametrize("ratio", [0, 4, 8])
def test_flops_are_those_of_the_gemms(ratio, coeff):
    """The cost model approximates pairs by areas, and excludes recomputed logits and scores, the second attention of
    the indexer loss, and sums over indexer heads."""
    seq, changes = 24, {"indexer_loss_coeff": coeff, "rotate_activation": False}
    config = compressed_config(ratio, indexer=changes)
    module, mb = make(config), make_mb(1, seq)
    with FlopCounterMode(display=False) as counter:
        run(module, randn(seq, 1, HIDDEN).requires_grad_(), mb).sum().backward()
    expected = gemm_flops(config.parameters(ParallelConfig()), seq).attention
    window, chosen, found, indexer = config.csa_window_size, config.num_chosen(seq), config.flops(seq), config.indexer
    slots = seq * (window + chosen)
    assert found.core_attention == 6 * config.q_width * (2 * slots - window**2 - chosen**2 * ratio)
    expected += slots * config.q_width * (12 + 2)
    if indexer is not None:
        sums = seq * seq // ratio * indexer.num_heads
        expected += 2 * found.indexer + sums * (6 if coeff else 2)
        if coeff:
            expected += 2 * sums * (indexer.head_dim + 1) + 4 * seq * window * config.q_width
    assert counter.get_total_flops() == expected


def test_flash_has_the_published_shapes():
    """Sums of the shapes of DeepSeek-V4-Flash's attention."""
    flash = CompressedAttentionConfig(
        hidden_size=4096, num_heads=64, head_dim=512, q_lora_rank=1024, csa_window_size=128, ratio=4,
        indexer=IndexerConfig(num_heads=64, head_dim=128, topk=512, rope=RopeConfig(dim=64), norm=NormConfig()),
        o_groups=8, o_lora_rank=1024, rope=RopeConfig(dim=64), norm=NormConfig(kind="RMSNorm"),
    )  # fmt: skip
    window = 4096 * 1024 + 1024 + 1024 * 64 * 512 + 4096 * 512 + 512 + 64 + 8 * 1024 * 4096 + 8 * 1024 * 4096
    compressor = 2 * 4096 * 1024 + 4 * 1024 + 512
    indexer = 1024 * 64 * 128 + 4096 * 64 + 2 * 4096 * 256 + 4 * 256 + 128
    heavy = 2 * 4096 * 512 + 128 * 512 + 512
    for ratio, expected in ((0, window), (4, window + compressor + indexer), (128, window + heavy)):
        config = replace(flash, ratio=ratio, indexer=flash.indexer if ratio == 4 else None)
        assert sum(spec.elements for spec in config.parameters(ParallelConfig())) == expected
