"""What runs again in the backward changes no bit of a step, and what is forgotten is really gone until then."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_moe.data.batch import MicroBatch
from megatron_moe.kernels import reference
from megatron_moe.kernels.choose import choose
from megatron_moe.logs.tally import Tally
from megatron_moe.memory.keeping import Keeping
from megatron_moe.memory.recompute import run_twice
from megatron_moe.model.gpt import GPT, LossOutput, objective
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.attention import AttentionSpec, MLASpec
from megatron_moe.specs.memory import MemorySpec, RecomputeSpec
from megatron_moe.specs.model import LayerSpec, ModelSpec, MTPSpec
from megatron_moe.specs.moe import MoESpec, SharedExpertsSpec
from megatron_moe.specs.parallel import ParallelSpec
from megatron_moe.specs.pipeline.spec import PipelineSpec
from megatron_moe.specs.run import KernelSpec
from tests import tiny
from tests.memory.alive import Alive
from tests.pipelines import train
from tests.ranks import on_threads
from tests.tiny_models import HIDDEN, build, gradients, microbatch, mla_spec, mlp_spec, randn
from tests.tolerances import EXACT

MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
BATCH, SEQ = 2, 9


def selective(*modules: str) -> RecomputeSpec:
    return RecomputeSpec(granularity="selective", modules=modules)


def full(method: str, num_layers: int) -> RecomputeSpec:
    return RecomputeSpec(granularity="full", method=method, num_layers=num_layers)


WAYS = {
    **{module: selective(module) for module in MODULES},
    "small ones together": selective("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "shared_experts"),
    "all together": selective(*MODULES),
    "uniform, layer by layer": full("uniform", 1),
    "uniform, two at a time": full("uniform", 2),
    "block, the first two": full("block", 2),
    "block, more than there are": full("block", 9),
}


def moe() -> MoESpec:
    """Everything that a second forward could do twice: losses, counts, jitter, and a gated shared expert."""
    router = tiny.router(
        balancing=("aux_loss", "seq_aux_loss", "global_aux_loss"),
        aux_loss_coeffs=(0.02, 0.01, 0.03),
        z_loss_coeff=0.01,
        score_function="sigmoid",
        expert_bias=True,
        input_jitter_eps=0.1,
    )
    return tiny.moe(router, shared=SharedExpertsSpec(mlp=mlp_spec(ffn_hidden_size=16), gate=True))


def layers(
    mixer: AttentionSpec | MLASpec, *, hidden_dropout: float = 0.0, dropout: float = 0.1, sinks: bool = True
) -> tuple[LayerSpec, ...]:
    """A dense one and two with experts."""
    mixer = replace(mixer, core=replace(mixer.core, dropout=dropout, sinks=sinks))
    kinds = (mlp_spec(), moe(), moe())
    return tuple(
        LayerSpec(mixer=mixer, feed_forward=kind, norm=tiny.NORM, hidden_dropout=hidden_dropout) for kind in kinds
    )


@cache
def models() -> dict[str, ModelSpec]:
    gqa, mla = tiny.attention(qk_norm="per_head", output_gate=True), mla_spec()
    return {
        "GQA": tiny.model(layers=layers(gqa, hidden_dropout=0.1), embedding_dropout=0.1),
        "MLA": tiny.model(layers=layers(mla), mtp=MTPSpec(num_layers=2, loss_scaling_factor=0.3)),
        "MLA without latent queries": tiny.model(layers=layers(mla_spec(q_lora_rank=None), hidden_dropout=0.1)),
        "repeated MTP": tiny.model(
            layers=layers(gqa), mtp=MTPSpec(num_layers=2, loss_scaling_factor=0.3, repeated_layer=True)
        ),
    }


def figures(spec: ModelSpec, recompute: RecomputeSpec) -> dict[str, Tensor]:
    """Losses, what was recorded, gradients and statistics of the routers, of two microbatches."""
    net, tally = build(spec, keeping=Keeping(recompute)), Tally()
    found: dict[str, Tensor] = {}
    for number in range(2):
        given = microbatch(BATCH, SEQ, seed=number, random_key=(1, 2, number), tally=tally)
        scalar, _ = objective(losses_of(net, given), given, mtp=spec.mtp, per_token=False)
        scalar.backward()
        found[f"loss {number}"] = scalar.detach()
        # As in a step: what autograd leaves is taken away after every backward.
        found |= {f"gradient {number} of {name}": gradient for name, gradient in gradients(net).items()}
        net.zero_grad()
    for (name, layer), entry in tally.cut().entries.items():
        found |= {f"metric {name} {layer}": entry.value, f"count of {name} {layer}": entry.count}
    return found | {f"buffer {name}": buffer for name, buffer in net.named_buffers()}


@cache
def kept_whole(name: str) -> dict[str, Tensor]:
    found = figures(models()[name], RecomputeSpec())
    assert any("tokens_since_update" in name and value.any() for name, value in found.items())
    assert any("load_balancing_loss" in name for name in found)
    return found


@pytest.mark.parametrize("name", ["GQA", "MLA", "MLA without latent queries", "repeated MTP"])
@pytest.mark.parametrize("way", WAYS)
def test_losses_metrics_gradients_and_statistics_are_the_same_bits(way, name):
    """Counted twice, the balancing losses or the load for the expert bias would differ; drawn anew, dropout."""
    EXACT.check_all(figures(models()[name], WAYS[way]), kept_whole(name), f"{name}, {way}")


@pytest.mark.parametrize("way", ["small ones together", "uniform, two at a time"])
def test_whole_steps_are_the_same_bits(way):
    """With gradients in buffers, the optimizer and the routers' update."""
    plain = tiny.plan(model=models()["MLA"])
    again = replace(plain, memory=MemorySpec(recompute=WAYS[way]))
    alone = ParallelContext.single()
    EXACT.check_all(train(again, alone, steps=2), train(plain, alone, steps=2), way)


def test_weight_gradients_are_computed_once(monkeypatch):
    """Sinks are given every product once a microbatch, whatever runs twice."""

    def num_products(recompute: RecomputeSpec) -> dict[str, int]:
        net, calls = build(models()["GQA"], keeping=Keeping(recompute)), dict.fromkeys((), 0)
        for name, parameter in net.named_parameters():
            parameter.sink = _Counting(name, parameter, calls)
        losses_of(net, batch()).loss_BS.sum().backward()
        return calls

    plain = num_products(RecomputeSpec())
    assert len(plain) > 10 and set(plain.values()) == {1}
    for way in ("all together", "uniform, two at a time"):
        assert num_products(WAYS[way]) == plain, way


class _Counting:
    def __init__(self, name: str, parameter: Tensor, calls: dict[str, int]) -> None:
        self.name, self.parameter, self.calls = name, parameter, calls

    def add(self, compute) -> None:
        compute(torch.empty_like(self.parameter), False)
        self.calls[self.name] = self.calls.get(self.name, 0) + 1


def batch() -> MicroBatch:
    return microbatch(BATCH, SEQ, random_key=(1, 2, 3))


def losses_of(net: GPT, given: MicroBatch) -> LossOutput:
    output = net(given)
    assert isinstance(output, LossOutput)
    return output


def kept_bytes(spec: ModelSpec, recompute: RecomputeSpec) -> int:
    """What exists between forward and backward, and nothing must exist of it afterwards but gradients."""
    context = ParallelContext.single(dtype=torch.float32)
    kernels = choose(KernelSpec(backend="torch_native"), context.device, context.dtype)
    net = GPT(spec, context, kernels, keeping=Keeping(recompute))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    with Alive() as alive:
        loss = losses_of(net, batch()).loss_BS.sum()
        kept = alive.bytes()
        loss.backward()
        del loss
    gradients = sum(parameter.grad.nbytes for parameter in net.parameters())
    assert alive.bytes() <= gradients + 4096, f"{alive.bytes()} bytes are left, gradients have {gradients}"
    return kept


NUMBER, TOKENS, NUM_ROWS = 4, BATCH * SEQ, BATCH * SEQ * 2
"""Bytes of a number; tokens; rows of the experts: two per token."""


@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        # of both MoE layers: gate times up
        ("moe_act", 2 * NUM_ROWS * 24),
        # of three layers: both norms, which are nothing's residual
        ("layernorm", 3 * 2 * TOKENS * HIDDEN),
        # of three layers: q and k of 9 channels, and k and v before they part
        ("mla_up_proj", 3 * TOKENS * 3 * (9 + 9 + 5 + 9)),
    ],
)
def test_forgotten_outputs_are_gone_until_the_backward(module, numbers):
    # attention on the CPU keeps copies where values have another width than keys
    spec = tiny.model(layers=layers(mla_spec(v_head_dim=9), dropout=0.0, sinks=False))
    saved = kept_bytes(spec, RecomputeSpec()) - kept_bytes(spec, selective(module))
    rotations = TOKENS * 4 * NUMBER  # the way up holds those of the microbatch
    assert 0 <= numbers * NUMBER - saved <= rotations


@pytest.mark.parametrize("module", ["core_attn", "mlp", "moe", "shared_experts"])
def test_modules_that_run_again_keep_their_inputs_alone(module):
    spec = tiny.model(layers=layers(tiny.attention()))
    assert kept_bytes(spec, selective(module)) < kept_bytes(spec, RecomputeSpec())


def test_whole_layers_keep_one_hidden_state_for_every_chunk():
    spec = tiny.model(layers=layers(tiny.attention()) * 2)
    one_by_one, in_threes = (kept_bytes(spec, full("uniform", number)) for number in (1, 3))
    assert one_by_one - in_threes == (6 - 2) * TOKENS * HIDDEN * NUMBER
    first_two = kept_bytes(spec, full("block", 2))
    assert in_threes < one_by_one < first_two < kept_bytes(spec, RecomputeSpec())


def test_what_somebody_else_holds_is_not_freed_and_not_made_again():
    x, calls = randn(4, 3).requires_grad_(), []

    def make(given: Tensor) -> Tensor:
        calls.append(given)
        return given.exp()

    keeping = Keeping(selective("layernorm"))
    y = x.exp()
    with keeping.forget("layernorm", make, (x,), y):
        out = (y * y).sum() + (y.t()[1:] * 2.0 * y.t()[1:]).sum()
    elsewhere = y[2].clone()
    out.backward()
    EXACT.check(y[2], elsewhere, "the output that is still held")
    assert len(calls) == 1, "one for all who saved it"
    plain = x.detach().requires_grad_()
    z = plain.exp()
    ((z * z).sum() + (z.t()[1:] * 2.0 * z.t()[1:]).sum()).backward()
    EXACT.check(x.grad, plain.grad, "gradient")


def test_without_gradients_nothing_runs_twice():
    calls = []

    def run(x: Tensor) -> Tensor:
        calls.append(x)
        return x * 2

    with torch.no_grad():
        assert run_twice(run, run, randn(2)).grad_fn is None
    assert len(calls) == 1


def test_parameters_inside_get_gradients_where_no_input_has_one():
    weight = randn(3).requires_grad_()
    run_twice(lambda x: x * weight, lambda x: x * weight, randn(3)).sum().backward()
    EXACT.check(weight.grad, randn(3), "gradient of the weight")


def test_ranks_that_hold_the_same_keep_a_part_each():
    """Tensor parallelism without sequence parallelism: the residual stream is the same on every rank."""

    def kept_and_gradient(context: ParallelContext, tp: str | None) -> tuple[int, Tensor]:
        group = None if tp is None else context.group(tp)
        keeping = Keeping(replace(full("uniform", 1), distribute=tp is not None), tp=group)
        x, meta = randn(SEQ, BATCH, HIDDEN).requires_grad_(), batch().meta
        with Alive() as alive:
            out = keeping.again(lambda hidden, meta: (hidden * 2).sin(), x * 3, meta=meta)
            kept = alive.bytes() - out.nbytes
            out.sum().backward()
        return kept, x.grad

    spec = ParallelSpec(world_size=2, tp=2)
    whole, parts = (on_threads(spec, partial(kept_and_gradient, tp=tp)) for tp in (None, "tp"))
    for (kept, gradient), (kept_part, gradient_from_parts) in zip(whole, parts, strict=True):
        EXACT.check(gradient_from_parts, gradient, "gradient")
        assert 0 < kept_part == kept // 2


def test_an_overlapped_chain_recomputes_its_nodes():
    """Layers run node by node beside another microbatch: the norm's note travels from node to node."""
    spec = models()["GQA"]
    plain, again = (
        tiny.plan(
            model=spec,
            memory=MemorySpec(recompute=recompute),
            pipeline=PipelineSpec(overlap=True, split_backward=True),
        )
        for recompute in (RecomputeSpec(), WAYS["small ones together"])
    )
    alone = ParallelContext.single()
    EXACT.check_all(train(again, alone, steps=1), train(plain, alone, steps=1), "overlapped")


def test_fake_tensors_are_recomputed_too():
    """Emulation runs the same code without memory behind it. Dense layers: reference experts read their counts."""
    spec = tiny.model(layers=layers(mla_spec())[:1] * 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for way in ("small ones together", "uniform, two at a time"):
            net = GPT(spec, ParallelContext.single(), reference.bundle(), keeping=Keeping(WAYS[way]))
            losses_of(net, microbatch(BATCH, SEQ)).loss_BS.sum().backward()
            assert all(gradient.shape == net.get_parameter(name).shape for name, gradient in gradients(net).items())
