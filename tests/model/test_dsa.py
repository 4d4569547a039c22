"""Sparse attention with an indexer against dense attention, and against the formulas in plain torch."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from arguments.errors import FlagErrors
from megatron_moe.build import build_model
from megatron_moe.config.dsa import indexer_schedule
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.cost_model.flops import gemm_flops
from megatron_moe.layers.components import Site, new_module
from megatron_moe.layers.quantized_module import quantizers_of
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.model import sparse_attention
from megatron_moe.model.dsa import hadamard
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters
from tests.helpers.check_cases import on_ranks
from tests.helpers.command_lines import plan_of
from tests.helpers.example_proofs import check_copies, check_layout, check_memory, check_replay, with_fp8
from tests.helpers.mixers import make, run
from tests.helpers.modules import standalone_resources
from tests.helpers.pipelines import KERNELS
from tests.helpers.tiny_models import HIDDEN, dsa_config, make_mb, mla_config, randn
from tests.helpers.tolerances import EXACT, FP64_REF
from tests.parity import cells
from tests.parity.dimensions import cell_of

SEQ = 11
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])
SCALE = 0.7


def trained(config, mb, *, seed=2):
    """Output, input gradient and weight gradients of an objective: the output times random numbers, summed, plus the
    indexer loss."""
    module = make(config)
    x = randn(SEQ, 2, HIDDEN).requires_grad_()
    out = run(module, x, mb)
    (out * randn(SEQ, 2, HIDDEN, seed=seed)).sum().backward()
    return module, out.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


def oracle(module, mb, *, seed=2):
    """Sparse attention in plain torch: [S, S] scores per head, a mask, and autograd for the objective plus the loss."""
    config, indexer = module.config, module.config.indexer
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    x = randn(SEQ, 2, HIDDEN).requires_grad_()

    def rms(v, name):
        return v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + config.norm.eps) * weights[f"{name}.weight"]

    def turned(v, dims, interleaved):  # [S, B, N, dims], positions 0 .. S - 1
        angle = torch.arange(SEQ)[:, None].double() * 10000.0 ** (-torch.arange(0, dims, 2).double() / dims)
        cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
        a, b = (v[..., 0::2], v[..., 1::2]) if interleaved else v.chunk(2, dim=-1)
        pair = (a * cos - b * sin, b * cos + a * sin)
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    nope, dims = config.qk_head_dim, config.qk_rope_dim
    latent = rms(x @ weights["linear_q_down_proj.weight"].T, "q_layernorm")
    q = (latent @ weights["linear_q_up_proj.weight"].T).unflatten(-1, (config.num_heads, -1))
    q = torch.cat([q[..., :nope], turned(q[..., nope:], dims, True)], -1)
    down = x @ weights["linear_kv_down_proj.weight"].T
    shared = turned(down[:, :, None, config.kv_lora_rank :], dims, True)
    kv = rms(down[..., : config.kv_lora_rank], "kv_layernorm") @ weights["linear_kv_up_proj.weight"].T
    kv = kv.unflatten(-1, (config.num_heads, -1))
    k = torch.cat([kv[..., :nope], shared.expand(-1, -1, config.num_heads, -1)], -1)
    logits = torch.einsum("sbnd,tbnd->bnst", q, k) * config.core.softmax_scale

    given, latent = x.detach(), latent.detach()
    q_index = (latent @ weights["indexer.linear_wq_b.weight"].T).unflatten(-1, (indexer.num_heads, -1))
    k_index = torch.nn.functional.layer_norm(
        given @ weights["indexer.linear_wk.weight"].T,
        (indexer.head_dim,),
        weights["indexer.k_norm.weight"],
        weights["indexer.k_norm.bias"],
        indexer.norm.eps,
    )[:, :, None]
    q_index, k_index = (
        torch.cat([turned(v[..., :dims], dims, indexer.rope.interleaved), v[..., dims:]], -1)
        for v in (q_index, k_index)
    )
    pairs = torch.einsum("sbnd,tbd->bnst", q_index, k_index.squeeze(2)) * indexer.head_dim**-0.5
    of_heads = (given @ weights["indexer.linear_weights_proj.weight"].T) * indexer.num_heads**-0.5
    scores = torch.einsum("sbn,bnst->bst", of_heads, pairs.relu() if indexer.relu else pairs)

    seen = torch.ones(SEQ, SEQ).tril().bool()[None].expand(2, -1, -1)
    if mb.tokens.segments_BS is not None:
        seen = seen & (mb.tokens.segments_BS[:, :, None] == mb.tokens.segments_BS[:, None])
    chosen = torch.zeros_like(seen)
    for b in range(2):
        for s in range(SEQ):
            keys = [t for t in range(SEQ) if seen[b, s, t]]
            best = sorted(keys, key=lambda t: (-scores[b, s, t].item(), t))[: indexer.topk]
            chosen[b, s, best] = True
    probs = logits.masked_fill(~chosen[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bnst,tbne->sbne", probs, kv[..., nope:]).flatten(2) @ weights["linear_proj.weight"].T

    allowed = chosen if indexer.sparse_indexer_loss else seen
    target = logits.detach().masked_fill(~allowed[:, None], -torch.inf).softmax(-1).mean(1)
    log = scores.masked_fill(~allowed, -torch.inf).log_softmax(-1).masked_fill(~allowed, 0)
    rows = (target * (target.clamp_min(1e-300).log() - log)).sum(-1)
    valid = torch.ones(2, SEQ) if mb.tokens.valid_BS is None else mb.tokens.valid_BS
    loss = (rows * valid).sum() / valid.sum()
    ((out * randn(SEQ, 2, HIDDEN, seed=seed)).sum() + SCALE * indexer.indexer_loss_coeff * loss).backward()
    return out.detach(), x.grad, {name: w.grad for name, w in weights.items()}, loss.detach()


CASES = {
    "dense loss": ({}, {}),
    "sparse loss": ({"sparse_indexer_loss": True}, {}),
    "documents": ({}, {"segments_BS": DOCUMENTS}),
    "documents, sparse loss": ({"sparse_indexer_loss": True, "topk": 5}, {"segments_BS": DOCUMENTS}),
    "padding": ({}, {"valid_BS": torch.arange(SEQ).repeat(2, 1) < torch.tensor([[8], [11]])}),
    "linear scores": ({"relu": False, "rotate_activation": False}, {}),
    "one key": ({"topk": 1}, {}),
}


@pytest.mark.parametrize("block_bytes", [1, 1 << 28])
@pytest.mark.parametrize("name", CASES)
def test_output_loss_and_gradients_equal_the_formulas(name, block_bytes, monkeypatch):
    monkeypatch.setattr(sparse_attention, "BLOCK_BYTES", block_bytes)
    indexer, tokens = CASES[name]
    metrics = MetricAccumulator()
    mb = make_mb(2, SEQ, aux_loss_scale=SCALE, metrics=metrics, **tokens)
    module, out, of_x, gradients = trained(dsa_config(indexer=indexer), mb)
    expected, expected_of_x, expected_gradients, loss = oracle(module, mb)
    FP64_REF.check(out, expected, "output")
    FP64_REF.check(of_x, expected_of_x, "input gradient")
    FP64_REF.check_all(gradients, expected_gradients, "gradients")
    assert float(metrics.entries["indexer_loss", 0].value) == pytest.approx(float(loss), rel=1e-12)
    assert loss > 1e-3
    assert all(gradient.abs().max() > 1e-9 for name, gradient in gradients.items() if "indexer" in name)


def test_as_many_keys_as_tokens_are_dense_attention():
    mb = make_mb(2, SEQ)
    module, out, of_x, gradients = trained(dsa_config(indexer={"topk": SEQ}), mb)
    dense = make(mla_config())
    dense.load_state_dict({name: value for name, value in module.state_dict().items() if "indexer" not in name})
    x = randn(SEQ, 2, HIDDEN).requires_grad_()
    expected = run(dense, x, mb)
    (expected * randn(SEQ, 2, HIDDEN, seed=2)).sum().backward()
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_x, x.grad, rtol=1e-12, atol=1e-12)
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_without_a_loss_the_indexer_chooses_and_is_not_trained():
    mb = make_mb(2, SEQ)
    _, out, of_x, gradients = trained(dsa_config(), mb)
    _, same, same_of_x, without = trained(dsa_config(indexer={"indexer_loss_coeff": 0.0}), mb)
    EXACT.check(out, same, "output")
    EXACT.check(of_x, same_of_x, "input gradient: the indexer has none")
    for name, gradient in without.items():
        assert (gradient is None) == name.startswith("indexer.")
        assert gradient is None or torch.equal(gradient, gradients[name])


def test_evaluation_has_no_loss():
    metrics = MetricAccumulator()
    mb = make_mb(2, SEQ, training=False, metrics=metrics)
    module = make(dsa_config())
    with torch.no_grad():
        run(module, randn(SEQ, 2, HIDDEN), mb)
    assert not metrics.entries


def test_later_tokens_change_nothing():
    module, mb, x = make(dsa_config()), make_mb(2, SEQ), randn(SEQ, 2, HIDDEN)
    changed = torch.cat([x[:7], randn(SEQ - 7, 2, HIDDEN, seed=9)])
    EXACT.check(run(module, x, mb)[:7].detach(), run(module, changed, mb)[:7].detach(), "earlier outputs")


def test_the_largest_logits_are_those_of_chosen_keys():
    module, mb = make(dsa_config(indexer={"topk": 1})), make_mb(2, SEQ)
    dense = make(dsa_config(indexer={"topk": SEQ}))
    for each in (module, dense):
        each.track_max_logits(-torch.inf)
        run(each, randn(SEQ, 2, HIDDEN), mb)
    assert (module.max_logits <= dense.max_logits).all() and (module.max_logits < dense.max_logits).any()


def test_equal_scores_choose_the_first_keys():
    scores = torch.tensor([[[1.0, 0.0, 0.0, 2.0, 0.0, -1.0]]])
    visible = torch.tensor([[[True, True, True, True, True, True]]])
    assert sparse_attention.select_topk_keys(scores, visible, 4)[0, 0].tolist() == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    visible[..., 1] = False
    assert sparse_attention.select_topk_keys(scores, visible, 4)[0, 0].tolist() == [
        True,
        False,
        True,
        True,
        True,
        False,
    ]
    visible[..., 2:] = False
    assert sparse_attention.select_topk_keys(scores, visible, 4)[0, 0].tolist() == [True, *[False] * 5]


@pytest.mark.parametrize("number", [1, 8, 13])
def test_bits_keep_a_mask(number):
    mask = torch.rand(3, 5, number, generator=torch.Generator().manual_seed(1)) < 0.5
    bits = sparse_attention.pack_bits(mask, 17)
    assert bits.shape == (3, 5, 3) and bits.dtype == torch.uint8
    assert torch.equal(sparse_attention.unpack_bits(bits, number), mask)
    assert not sparse_attention.unpack_bits(bits, 17)[..., number:].any()


def test_the_hadamard_matrix_is_orthogonal():
    matrix = hadamard(16, torch.zeros((), dtype=torch.float64))
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(tp=2, world_size=2, sequence_parallel=True)])
def test_declared_parameters_are_those_of_the_module(parallel):
    context = ParallelContext.fake(parallel, parallel.world_size - 1)
    try:
        config = dsa_config(num_heads=4)
        built = new_module(config, Site("layer", 0), standalone_resources(context, KERNELS))
        found = {name: (p.global_shape, p.meta, p.numel()) for name, p in named_parameters(built)}
    finally:
        context.stop()
    assert {s.name: (s.shape, s.meta, s.local_numel(parallel)) for s in config.parameters(parallel)} == found


def with_indexers(plan, **indexer):
    """Plan with sparse attention in place of multi-latent attention; the loss is a part of what is compared."""
    config = partial(dsa_config, hidden_size=plan.model.hidden_size, num_heads=4)
    layers = []
    for index, layer in enumerate(plan.model.layers):
        mixer = config(norm=layer.mixer.norm, core={"context_exchange": "allgather"}, indexer=indexer)
        mixer = replace(mixer, reuses_topk=mixer.indexer.layer_reuses_topk(index))
        layers.append(replace(layer, mixer=mixer))
    return replace(plan, model=replace(plan.model, layers=tuple(layers)))


@pytest.mark.parametrize(
    ("cell", "sparse"),
    [
        ("attention=mla tp=2 sp=on dp=2 balance=none recompute=small", True),
        ("attention=mla cp=2 documents=packed balance=none cpcomm=allgather", False),
        ("attention=mla cp=2 pp=2 accumulation=2 balance=none recompute=full cpcomm=allgather", True),
        (
            "attention=mla tp=2 sp=on cp=2 ep=2 documents=packed dispatcher=alltoall balance=none cpcomm=allgather",
            False,
        ),
        ("attention=mla pp=2 vpp=2 dp=2 ep=2 dispatcher=alltoall accumulation=2 balance=none mtp=on loss=token", True),
    ],
)
def test_layouts_equal_one_rank(cell, sparse):
    check_layout(with_indexers(cells.plan_of(cell_of(cell)), sparse_indexer_loss=sparse))


def test_copies_between_context_parallel_ranks_equal_one_rank(monkeypatch):
    cell = "attention=mla cp=2 pp=2 accumulation=2 balance=none recompute=full cpcomm=allgather"
    check_copies(with_indexers(cells.plan_of(cell_of(cell))), monkeypatch)


@pytest.mark.parametrize(
    "cell",
    [
        "attention=mla tp=2 sp=on dp=2 balance=none recompute=small",
        "attention=mla cp=2 pp=2 accumulation=2 balance=none recompute=full cpcomm=allgather",
        "attention=mla dp=2 ep=2 dispatcher=flex balance=none graphs=step",
    ],
)
def test_layers_that_share_keys_equal_one_rank(cell):
    check_layout(with_indexers(cells.plan_of(cell_of(cell)), topk_freq=2))


def test_a_layer_without_an_indexer_attends_to_the_keys_of_the_last_one_before_it():
    own = dsa_config(indexer={"topk_freq": 2})
    source, later = make(own), make(replace(own, reuses_topk=True))
    assert not any("indexer" in name for name, _ in later.named_parameters())
    later.load_state_dict(source.state_dict(), strict=False)
    later.layer = source.layer + 1
    x, other, mb = randn(SEQ, 2, HIDDEN), randn(SEQ, 2, HIDDEN, seed=5), replace(make_mb(2, SEQ), selected_keys={})
    expected = run(source, x, mb)
    EXACT.check(run(later, x, mb), expected, "same input and keys")
    assert list(mb.selected_keys) == [source.layer]
    with_own_keys = run(source, other, replace(mb, selected_keys={}))
    assert not torch.allclose(run(later, other, mb), with_own_keys)


def test_layouts_with_fp8_gemms_equal_one_rank():
    """The absorbed up-projection of kv and the indexer are computed in the model's dtype."""
    plan = with_fp8(with_indexers(cells.plan_of(cell_of("attention=mla tp=2 sp=on balance=none"))))
    check_layout(plan)
    names = {quantizer.name for quantizer in quantizers_of(build_model(plan, ParallelContext.single(), KERNELS))}
    linears = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_proj")
    assert {f"decoder.layers.0.self_attention.{name}" for name in linears} <= names
    assert not any("indexer" in name or "linear_kv_up_proj" in name for name in names)


@pytest.mark.parametrize("cell", ["attention=mla balance=none", "attention=mla tp=2 sp=on balance=none"])
def test_replayed_graphs_equal_eager_steps(cell):
    check_replay(with_indexers(cells.plan_of(cell_of(cell))))


@pytest.mark.parametrize("sparse", [False, True])
def test_replicated_positions_equal_one_rank(sparse):
    """Tensor parallelism without sequence parallelism, where every rank scores all queries."""
    plan = with_indexers(cells.plan_of(cell_of("attention=mla balance=none")), sparse_indexer_loss=sparse)
    dense = plan.model.layers[0].feed_forward
    layers = tuple(replace(layer, feed_forward=dense) for layer in plan.model.layers)
    parallel = replace(plan.parallel, tp=2, world_size=2)
    check_layout(replace(plan, parallel=parallel, model=replace(plan.model, layers=layers)))


TRAINED = "--dsa-indexer-loss-coeff 0.1"


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ("", 1),
        (TRAINED, 1),
        (f"{TRAINED} --recompute-granularity selective --recompute-modules core_attn", 1),
        (f"{TRAINED} --qk-layernorm --tensor-model-parallel-size 2 --sequence-parallel --fp8-format e4m3", 2),
        (f"{TRAINED} --qk-layernorm --context-parallel-size 2 --cp-comm-type all_gather", 2),
        (f"{TRAINED} --dsa-indexer-topk-freq 3 --dsa-indexer-skip-topk-offset 2", 1),
    ],
)
def test_emulated_memory_agrees_with_the_cost_model(more, ranks):
    words = "--multi-latent-attention --rope-type rope --experimental-attention-variant dsa --attention-dropout 0"
    words += " --num-layers 8 --moe-layer-freq ([0]*1+[1]*7) --num-attention-heads 32 --kv-lora-rank 256"
    words += " --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 64 --dsa-indexer-topk 128 --q-lora-rank 256"
    words += " --seq-length 1024 --max-position-embeddings 1024 --hidden-size 1024 --ffn-hidden-size 4096 --bf16"
    words += " --no-group-query-attention --transformer-impl local --micro-batch-size 2"
    check_memory(plan_of(f"{words} {more}", environ=on_ranks(ranks)))


def counted_products(config):
    """FLOPs of all matmuls in forward and backward of one sequence."""
    module, mb = make(config), make_mb(1, SEQ)
    with FlopCounterMode(display=False) as counter:
        run(module, randn(SEQ, 1, HIDDEN).requires_grad_(), mb).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("coeff", [0.0, 0.5])
def test_flops_are_those_of_the_gemms(coeff, monkeypatch):
    """The cost model approximates pairs by areas, and excludes recompute, norms and sums over indexer heads."""
    monkeypatch.setattr(sparse_attention, "BLOCK_BYTES", 1)
    config = dsa_config(indexer={"indexer_loss_coeff": coeff, "rotate_activation": False})
    found, indexer = config.flops(SEQ), config.indexer
    latents = SEQ * 6 * (config.q_lora_rank + config.kv_lora_rank)
    projections = gemm_flops(config.parameters(ParallelConfig()), SEQ).attention + found.attention - latents
    slots, pairs = SEQ * indexer.topk, SEQ * (SEQ + 1) // 2
    again = 2 * slots * config.num_heads * config.absorbed_key_width
    core = found.core_attention * 2 * slots // (2 * slots - indexer.topk**2) + again
    sums = pairs * indexer.num_heads * (4 if coeff else 2)
    assert counted_products(config) == projections + core + found.indexer * 2 * pairs // SEQ**2 + sums


def test_flops_count_the_chosen_pairs():
    config = dsa_config(indexer={"topk": 4, "indexer_loss_coeff": 0.0})
    found, trained = config.flops(16), dsa_config(indexer={"topk": 4}).flops(16)
    pairs, heads = 4 * 16 - 4 * 4 // 2, config.num_heads
    width = config.kv_lora_rank + config.qk_rope_dim
    assert found.core_attention == trained.core_attention == 6 * pairs * heads * (width + config.kv_lora_rank)
    assert found.indexer == 2 * 16 * 16 // 2 * 8 * 8
    assert trained.indexer == 16 * 16 // 2 * (6 * 8 * 8 + 2 * heads * width)
    assert found.attention == mla_config().flops(16).attention
    every = dsa_config(indexer={"topk": 99}).flops(16)
    assert every.core_attention == 6 * 16 * 16 // 2 * heads * (width + config.kv_lora_rank)


def test_ring_exchange_is_rejected():
    assert dsa_config().layout_problem(ParallelConfig(cp=2, world_size=2)) is not None
    gathered = dsa_config(core={"context_exchange": "allgather"})
    assert gathered.layout_problem(ParallelConfig(cp=2, world_size=2)) is None


WORDS = (
    "--multi-latent-attention --no-group-query-attention --rope-type rope --experimental-attention-variant dsa "
    "--q-lora-rank 32 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 8 --attention-dropout 0 "
    "--num-layers 8 --moe-layer-freq ([0]*1+[1]*7) --dsa-indexer-topk-freq 3"
)


@pytest.mark.parametrize(("offset", "shared"), [(0, "01101101"), (1, "01101101"), (2, "00110110"), (4, "00001101")])
def test_flags_select_the_layers_that_share_keys(offset, shared):
    layers = plan_of(f"{WORDS} --dsa-indexer-skip-topk-offset {offset} --mtp-num-layers 1").model
    assert "".join(f"{layer.mixer.reuses_topk:d}" for layer in layers.layers) == shared
    assert layers.mtp_layer.mixer.reuses_topk == layers.layers[0].mixer.indexer.layer_reuses_topk(8)
    found = indexer_schedule([layer.mixer.reuses_topk for layer in layers.layers])
    assert found == (3, max(offset, 1))


def test_attention_that_shares_keys_is_not_captured_by_default():
    graphs = f"{WORDS} --hidden-dropout 0 --cuda-graph-impl local"
    assert plan_of(graphs).cuda_graphs.cuda_graph_modules == ("mlp", "moe_router")
    assert "attn" in plan_of(f"{graphs} --dsa-indexer-topk-freq 1").cuda_graphs.cuda_graph_modules


def test_a_pipeline_stage_begins_with_a_layer_that_has_an_indexer():
    layout = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
    assert plan_of(f"{WORDS} {layout} Ettt|tttttL", environ=on_ranks(2)).layout.pp == 2
    with pytest.raises(FlagErrors, match=r"begins with layer 4, which has no indexer"):
        plan_of(f"{WORDS} {layout} Etttt|ttttL", environ=on_ranks(2))


def test_a_schedule_of_indexers_that_flags_cannot_describe_is_not_found():
    assert indexer_schedule([False, True, False, False]) is None
