"""Mixers with linear attention: those of transformers, and the same over tensor- and context-parallel ranks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import KimiLinearConfig, NemotronHConfig, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from megatron_moe.checkpoint.huggingface.linear_attention import FILTERS, by_key_head, by_section
from megatron_moe.checkpoint.huggingface.weight_map import COPY, Transform
from megatron_moe.config.linear_attention import LinearAttentionConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.registry import resolve
from megatron_moe.layers.components import Site, new_module
from megatron_moe.model.init import init_parameters
from megatron_moe.model.linear_attention import LinearAttention
from megatron_moe.model.linear_scan import ChunksOverRanks, WholeSequences
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import SequencePart, select_positions, split_positions
from tests.helpers.eager_graphs import TapeRecorder
from tests.helpers.modules import standalone_resources
from tests.helpers.ranks import on_threads
from tests.helpers.sharded import KERNELS, held, sum_partials, whole
from tests.helpers.tiny_models import HIDDEN, LINEAR_ATTENTION, UNIT_GAIN, make_mb, randn
from tests.helpers.tolerances import FP32_MODEL, FP64_LAYOUT

SEQ, BATCH = 12, 2
PUBLISHED = (
    *("q_proj.weight", "k_proj.weight", "v_proj.weight", "b_proj.weight", "o_proj.weight", "o_norm.weight"),
    *("f_a_proj.weight", "f_b_proj.weight", "g_a_proj.weight", "g_b_proj.weight", "A_log", "dt_bias"),
)
"""Names of the tensors of Kimi delta attention in published files, except those of the convolution."""
DELTA_NET, MAMBA, KIMI = (LINEAR_ATTENTION[name] for name in ("delta", "mamba", "kda"))
MIXERS = pytest.mark.parametrize("config", LINEAR_ATTENTION.values(), ids=LINEAR_ATTENTION)
CHUNKWISE = pytest.mark.parametrize(
    "config", [replace(mixer, cp_mode="chunkwise") for mixer in LINEAR_ATTENTION.values()], ids=LINEAR_ATTENTION
)
LAYOUTS = {
    "tp2": ParallelConfig(world_size=2, tp=2),
    "tp4 with sequence parallelism": ParallelConfig(world_size=4, tp=4, sequence_parallel=True),
    "cp2": ParallelConfig(world_size=2, cp=2),
    "cp2 in contiguous parts": ParallelConfig(world_size=2, cp=2, cp_split="contiguous"),
    "tp2 cp2": ParallelConfig(world_size=4, tp=2, cp=2, sequence_parallel=True),
}


def make(config: LinearAttentionConfig, ctx: ParallelContext) -> LinearAttention:
    return new_module(config, Site("mixer", 0), standalone_resources(ctx, KERNELS))


def run(config: LinearAttentionConfig, ctx: ParallelContext, segments_BS: Tensor | None) -> dict:
    """Output and gradients on one rank, of its part of the positions."""
    module = make(config, ctx)
    init_parameters(module, 5, UNIT_GAIN)
    hidden, probe = (randn(SEQ, BATCH, HIDDEN, seed=seed) for seed in (1, 2))
    mb, positions = make_mb(BATCH, SEQ, segments_BS=segments_BS), torch.arange(SEQ)[None]
    cp, tp = ctx.group("cp"), ctx.group("tp")
    if cp.size > 1:
        parts = split_positions(ctx.config.cp_split, SEQ, cp.size)
        positions = select_positions(positions, parts[cp.rank])
        mb = make_mb(BATCH, positions.shape[1], whole_segments_BS=segments_BS, part=SequencePart(parts, cp.rank))
    if ctx.config.sequence_parallel:
        positions = positions.chunk(tp.size, dim=1)[tp.rank]
    x = hidden[positions[0]].requires_grad_()
    out = module(x, mb)
    (out * probe[positions[0]]).sum().backward()
    sum_partials(module, ctx)
    grads = held(((name, p.grad) for name, p in module.named_parameters()), module)
    return {"positions": positions[0], "out": out.detach(), "x": x.grad, "grads": grads}


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@MIXERS
def test_results_over_ranks_are_those_of_one_rank(config, layout, documents):
    segments_BS = torch.tensor([[0] * 2 + [1] * 7 + [2] * 3, [0] * 12]) if documents else None
    alone = run(config, ParallelContext.single(), segments_BS)
    ranks = on_threads(layout, lambda ctx: run(config, ctx, segments_BS))
    for rank in ranks:
        FP64_LAYOUT.check(rank["out"], alone["out"][rank["positions"]], "output")
        if layout.sequence_parallel or layout.tp == 1:
            FP64_LAYOUT.check(rank["x"], alone["x"][rank["positions"]], "gradient of the input")
    # gradients of context-parallel ranks are sums over their own tokens or heads
    by_tp = [ranks[first :: layout.tp] for first in range(layout.tp)]
    summed = [
        {
            name: replace(each, part=sum(of["grads"][name].part for of in group))
            for name, each in group[0]["grads"].items()
        }
        for group in by_tp
    ]
    FP64_LAYOUT.check_all(whole(summed), whole([alone["grads"]]), "gradients")


CHUNKED = {
    "cp2": ParallelConfig(world_size=2, cp=2),
    "cp4 in contiguous parts": ParallelConfig(world_size=4, cp=4, cp_split="contiguous"),
    "tp2 cp2": ParallelConfig(world_size=4, tp=2, cp=2, sequence_parallel=True),
}


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("layout", CHUNKED.values(), ids=CHUNKED)
@CHUNKWISE
def test_chunks_over_ranks_are_one_sequence(config, layout, documents):
    test_results_over_ranks_are_those_of_one_rank(config, layout, documents)


@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "plain"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_states_pass_through_many_chunks(num_ranks: int, delta: bool):
    """Several chunks of the kernel per rank, one document over all ranks, and documents that end inside and at the end
    of chunks; fp64."""
    length, batch, eps = num_ranks * 80, 2, 1e-6 if delta else None
    shapes = {"q": (3, 7), "k": (3, 7), "v": (6, 5), "decay": (6,), "beta": (6,)}
    inputs = {name: randn(length, batch, *shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    inputs["decay"], inputs["beta"] = -inputs["decay"].abs() / 10, inputs["beta"].sigmoid()
    probe, segments_BS = randn(length, batch, 6, 5, seed=9), torch.zeros(batch, length, dtype=torch.int64)
    for end in (40, 90, 120):
        segments_BS[1, end:] += 1
    parts = split_positions("zigzag", length, num_ranks)

    def results(ctx: ParallelContext) -> dict[str, Tensor]:
        group = ctx.group("cp")
        alone = group.size == 1
        places = torch.arange(length) if alone else select_positions(torch.arange(length)[None], parts[group.rank])[0]
        own = {name: x[places].clone().requires_grad_() for name, x in inputs.items()}
        part = SequencePart(parts, group.rank)
        scan = (
            WholeSequences(KERNELS, segments_BS) if alone else ChunksOverRanks(KERNELS, part, group, segments_BS, batch)
        )
        beta = own["beta"] if delta else None
        out = scan.linear_attention(own["q"], own["k"], own["v"], own["decay"], beta, 0.5, eps)
        (out * probe[places]).sum().backward()
        grads = {name: x.grad for name, x in own.items() if x.grad is not None}
        return {"places": places, "out": out.detach(), **grads}

    one = results(ParallelContext.single())
    for rank in on_threads(ParallelConfig(world_size=num_ranks, cp=num_ranks), results):
        places = rank.pop("places")
        FP64_LAYOUT.check_all(rank, {name: one[name][places] for name in rank}, "results")


def test_states_of_chunks_are_selected_without_host_memory():
    """A rank with two chunks: an index list would be copied to a GPU, which fails in the capture of a CUDA graph."""
    q, k, v, x = (randn(16, BATCH, *shape, seed=seed) for seed, shape in enumerate([(3, 7), (3, 7), (6, 5), (4,)]))
    decay, weight, group = -randn(16, BATCH, 6, seed=4).abs(), randn(4, 3, seed=5), ParallelContext.single().group("cp")

    def results(scan: WholeSequences | ChunksOverRanks) -> list[Tensor]:
        return [scan.short_conv(x, weight, None), scan.linear_attention(q, k, v, decay, None, 0.5)]

    part = SequencePart(((range(8), range(8, 16)),), 0)
    graph = TapeRecorder().capture(lambda: results(ChunksOverRanks(KERNELS, part, group, None, BATCH)), None)
    graph.replay()
    for found, expected in zip(graph.outputs, results(WholeSequences(KERNELS, None)), strict=True):
        FP64_LAYOUT.check(found, expected, "results of chunks")


def test_gated_delta_net_is_that_of_transformers():
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=24,
            linear_value_head_dim=5,
            linear_conv_kernel_dim=4,
            rms_norm_eps=DELTA_NET.norm.eps,
        ),
        0,
    )
    torch.manual_seed(3)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = make(DELTA_NET, ParallelContext.single(dtype=torch.float32))
    projections = by_key_head(4, 8, 24, 5)
    with torch.no_grad():
        ours.in_proj.weight.copy_(projections.from_hf([theirs.in_proj_qkvz.weight, theirs.in_proj_ba.weight]))
        ours.conv1d.weight.copy_(FILTERS.from_hf([theirs.conv1d.weight]))
        for mine, other in (
            (ours.dt_bias, theirs.dt_bias),
            (ours.A_log, theirs.A_log),
            (ours.out_norm.weight, theirs.norm.weight),
            (ours.out_proj.weight, theirs.out_proj.weight),
        ):
            mine.copy_(other)
    hidden = randn(SEQ, BATCH, HIDDEN).float()
    out, expected = ours(hidden, make_mb(BATCH, SEQ)), theirs(hidden.transpose(0, 1)).transpose(0, 1)
    FP32_MODEL.check(out, expected, "output")
    probe = randn(SEQ, BATCH, HIDDEN, seed=4).float()
    (out * probe).sum().backward()
    (expected * probe).sum().backward()
    in_proj = projections.from_hf([theirs.in_proj_qkvz.weight.grad, theirs.in_proj_ba.weight.grad])
    FP32_MODEL.check(ours.in_proj.weight.grad, in_proj, "in_proj")
    FP32_MODEL.check(ours.conv1d.weight.grad, theirs.conv1d.weight.grad.squeeze(1), "conv1d")
    for name in ("dt_bias", "A_log", "out_proj.weight"):
        FP32_MODEL.check(ours.get_parameter(name).grad, theirs.get_parameter(name).grad, name)
    FP32_MODEL.check(ours.out_norm.weight.grad, theirs.norm.weight.grad, "norm")


def test_mamba_is_that_of_transformers():
    theirs = NemotronHMamba2Mixer(
        NemotronHConfig(
            hidden_size=HIDDEN,
            layer_types=["mamba"],
            mamba_num_heads=8,
            mamba_head_dim=5,
            n_groups=4,
            ssm_state_size=24,
            conv_kernel=4,
            chunk_size=4,
            time_step_min=0.0,
            layer_norm_epsilon=MAMBA.norm.eps,
        ),
        0,
    )
    torch.manual_seed(3)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = make(MAMBA, ParallelContext.single(dtype=torch.float32))
    names = {rule.name: rule.hf_names[0].removeprefix("mixer.") for rule in MAMBA.name_rules("nemotron_h")}
    with torch.no_grad():
        for name, mine in ours.named_parameters():
            mine.copy_(theirs.get_parameter(names[name]).view_as(mine))
    hidden, probe = randn(SEQ, BATCH, HIDDEN).float(), randn(SEQ, BATCH, HIDDEN, seed=4).float()
    out, expected = ours(hidden, make_mb(BATCH, SEQ)), theirs(hidden.transpose(0, 1)).transpose(0, 1)
    FP32_MODEL.check(out, expected, "output")
    (out * probe).sum().backward()
    (expected * probe).sum().backward()
    for name, mine in ours.named_parameters():
        FP32_MODEL.check(mine.grad, theirs.get_parameter(names[name]).grad.view_as(mine), name)


def test_kimi_delta_attention_is_that_of_transformers():
    width, heads = 12, 4
    theirs = KimiLinearDeltaAttention(
        KimiLinearConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_heads=heads,
            linear_head_dim=width,
            linear_conv_kernel_dim=3,
            rms_norm_eps=1e-3,
        ),
        0,
    )
    torch.manual_seed(3)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    sizes = {"num_value_heads": heads, "key_head_dim": width, "value_head_dim": width, "conv_width": 3}
    config = replace(KIMI, **sizes)
    ours = make(config, ParallelContext.single(dtype=torch.float32))
    moved = {
        "A_log": "forget_gate.A_log",
        "dt_bias": "forget_gate.dt_bias",
        "f_a_proj.weight": "forget_gate.f_a_proj.weight",
    }
    moved |= {"f_b_proj.weight": "forget_gate.f_b_proj.weight"}

    def published(values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the names of published files, which have the filters of q, k and v apart."""
        found = {name: values[moved.get(name, name)] for name in PUBLISHED if "conv1d" not in name}
        for name, part in zip("qkv", values["conv1d.weight"].chunk(3), strict=True):
            found[f"{name}_conv1d.weight"] = part
        return found

    def as_ours(values: dict[str, Tensor]) -> dict[str, Tensor]:
        rules = {rule.name: rule for rule in config.name_rules("kimi_linear")}
        assert rules.keys() == dict(ours.named_parameters()).keys()
        named, found = published(values), {}
        for name, rule in rules.items():
            transform = COPY if rule.transform == "copy" else resolve(rule.transform)
            transform = transform if isinstance(transform, Transform) else transform(*rule.arguments)
            tensors = [named[each.removeprefix("self_attn.")] for each in rule.hf_names]
            found[name] = transform.from_hf(tensors)
            back = transform.to_hf(found[name])
            assert all(torch.equal(*pair) for pair in zip(back, tensors, strict=True)), name
        return found

    with torch.no_grad():
        for name, value in as_ours(dict(theirs.named_parameters())).items():
            ours.get_parameter(name).copy_(value)
    hidden, probe = (randn(70, BATCH, HIDDEN, seed=seed).float() for seed in (1, 4))
    out, expected = ours(hidden, make_mb(BATCH, 70)), theirs(hidden.transpose(0, 1)).transpose(0, 1)
    FP32_MODEL.check(out, expected, "output")
    (out * probe).sum().backward()
    (expected * probe).sum().backward()
    grads = as_ours({name: parameter.grad for name, parameter in theirs.named_parameters()})
    FP32_MODEL.check_all({name: parameter.grad for name, parameter in ours.named_parameters()}, grads, "gradients")


@pytest.mark.parametrize("transform", [by_key_head(2, 6, 3, 5), by_section(2 * 2 * 3 + 30, 30, 6, 6)])
def test_projections_survive_the_way_to_hugging_face_and_back(transform):
    rows = randn(2 * 2 * 3 + 2 * 30 + 2 * 6, 7)
    tensors = transform.to_hf(rows)
    assert torch.equal(transform.from_hf(tensors), rows)
    assert sum(map(len, tensors)) == len(rows)
