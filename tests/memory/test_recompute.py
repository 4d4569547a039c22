"""Recompute and discarded outputs: results are bitwise identical, and memory is freed until backward."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_moe.config.attention import AttentionConfig
from megatron_moe.config.memory import MemoryConfig, RecomputeConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.model import LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import MoEConfig, SharedExpertsConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.data.batch import MicroBatch
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.memory.recompute import checkpoint
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.gpt import GPT, LossOutput, training_objective
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.rng import RNGKey
from tests.helpers import tiny
from tests.helpers.pipelines import train
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import HIDDEN, build, gradients, microbatch, mla_config, mlp_config, randn
from tests.helpers.tolerances import EXACT
from tests.memory.alive import Alive

MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
BATCH, SEQ = 2, 9


def selective(*modules: str) -> RecomputeConfig:
    return RecomputeConfig(recompute_modules=modules)


def full(method: str, num_layers: int) -> RecomputeConfig:
    return RecomputeConfig(recompute_method=method, recompute_num_layers=num_layers)


WAYS = {
    **{module: selective(module) for module in MODULES},
    "small ones together": selective("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "shared_experts"),
    "all together": selective(*MODULES),
    "uniform, layer by layer": full("uniform", 1),
    "uniform, two at a time": full("uniform", 2),
    "block, the first two": full("block", 2),
    "block, more than there are": full("block", 9),
}


def moe() -> MoEConfig:
    """MoE layer with all side effects that a second forward could repeat: losses, counts and jitter."""
    router = tiny.router(
        balancing=("aux_loss", "seq_aux_loss", "global_aux_loss"),
        aux_loss_coeffs=(0.02, 0.01, 0.03),
        z_loss_coeff=0.01,
        score_function="sigmoid",
        expert_bias=True,
        input_jitter_eps=0.1,
    )
    return tiny.moe(router, shared=SharedExpertsConfig(mlp=mlp_config(ffn_hidden_size=16), gate=True))


def layers(
    mixer: AttentionConfig | MLAConfig, *, hidden_dropout: float = 0.0, dropout: float = 0.1, sinks: bool = True
) -> tuple[LayerConfig, ...]:
    """Builds one dense layer and two MoE layers with this mixer."""
    mixer = replace(mixer, core=replace(mixer.core, dropout=dropout, sinks=sinks))
    kinds = (mlp_config(), moe(), moe())
    return tuple(
        LayerConfig(mixer=mixer, feed_forward=kind, norm=tiny.NORM, hidden_dropout=hidden_dropout) for kind in kinds
    )


@cache
def models() -> dict[str, ModelConfig]:
    gqa, mla = tiny.attention(qk_norm="per_head", output_gate=True), mla_config()
    return {
        "GQA": tiny.model(layers=layers(gqa, hidden_dropout=0.1), embedding_dropout=0.1),
        "MLA": tiny.model(layers=layers(mla), mtp=MTPConfig(num_layers=2, loss_scaling_factor=0.3)),
        "MLA without latent queries": tiny.model(layers=layers(mla_config(q_lora_rank=None), hidden_dropout=0.1)),
        "repeated MTP": tiny.model(
            layers=layers(gqa), mtp=MTPConfig(num_layers=2, loss_scaling_factor=0.3, repeated_layer=True)
        ),
    }


def results(config: ModelConfig, recompute: RecomputeConfig) -> dict[str, Tensor]:
    """Losses, metrics, gradients and router statistics of two microbatches."""
    net, metrics = build(config, saved_tensors=SavedTensorPolicy(recompute)), MetricAccumulator()
    found: dict[str, Tensor] = {}
    for number in range(2):
        given = microbatch(BATCH, SEQ, seed=number, rng=RNGKey(1, 2, number), metrics=metrics)
        scalar, _ = training_objective(losses_of(net, given), given, mtp=config.mtp, per_token=False)
        scalar.backward()
        found[f"loss {number}"] = scalar.detach()
        # as in training, gradients are collected after every backward
        found |= {f"gradient {number} of {name}": gradient for name, gradient in gradients(net).items()}
        net.zero_grad()
    for (name, layer), entry in metrics.take_all().entries.items():
        found |= {f"metric {name} {layer}": entry.value, f"count of {name} {layer}": entry.count}
    return found | {f"buffer {name}": buffer for name, buffer in net.named_buffers()}


@cache
def without_recompute(name: str) -> dict[str, Tensor]:
    found = results(models()[name], RecomputeConfig())
    assert any("tokens_since_update" in name and value.any() for name, value in found.items())
    assert any("load_balancing_loss" in name for name in found)
    return found


@pytest.mark.parametrize("name", ["GQA", "MLA", "MLA without latent queries", "repeated MTP"])
@pytest.mark.parametrize("way", WAYS)
def test_losses_metrics_gradients_and_statistics_are_identical_to_the_bit(way, name):
    """Recompute counts balancing losses and expert load only once, and repeats the dropout masks."""
    EXACT.check_all(results(models()[name], WAYS[way]), without_recompute(name), f"{name}, {way}")


@pytest.mark.parametrize(
    ("way", "model", "pipeline"),
    [
        ("small ones together", "MLA", PipelineConfig()),
        ("uniform, two at a time", "MLA", PipelineConfig()),
        ("small ones together", "GQA", PipelineConfig(overlap=True, delay_wgrad_compute=True)),
    ],
    ids=["selective", "full", "selective, overlapped"],
)
def test_whole_steps_are_identical_to_the_bit(way, model, pipeline):
    """Whole steps include gradient buffers, the optimizer and router updates; overlapped layers run node by node."""
    plain = tiny.plan(model=models()[model], pipeline=pipeline)
    recomputed = replace(plain, memory=MemoryConfig(recompute=WAYS[way]))
    alone = ParallelContext.single()
    EXACT.check_all(train(recomputed, alone, steps=2), train(plain, alone, steps=2), way)


def test_weight_gradients_are_computed_once(monkeypatch):
    """Every gradient accumulator is called once per microbatch, as without recompute."""

    def num_head_uses(recompute: RecomputeConfig) -> dict[str, int]:
        net, calls = build(models()["GQA"], saved_tensors=SavedTensorPolicy(recompute)), dict.fromkeys((), 0)
        for name, parameter in net.named_parameters():
            parameter.grad_accumulator = _Counting(name, parameter, calls)
        losses_of(net, batch()).loss_BS.sum().backward()
        return calls

    plain = num_head_uses(RecomputeConfig())
    assert len(plain) > 10 and set(plain.values()) == {1}
    for way in ("all together", "uniform, two at a time"):
        assert num_head_uses(WAYS[way]) == plain, way


class _Counting:
    def __init__(self, name: str, parameter: Tensor, calls: dict[str, int]) -> None:
        self.name, self.parameter, self.calls = name, parameter, calls

    def add(self, compute) -> None:
        compute(torch.empty_like(self.parameter), False)
        self.calls[self.name] = self.calls.get(self.name, 0) + 1


def batch() -> MicroBatch:
    return microbatch(BATCH, SEQ, rng=RNGKey(1, 2, 3))


def losses_of(net: GPT, given: MicroBatch) -> LossOutput:
    output = net(given)
    assert isinstance(output, LossOutput)
    return output


def kept_bytes(config: ModelConfig, recompute: RecomputeConfig) -> int:
    """Returns the bytes allocated between forward and backward, and checks that only gradients remain afterwards."""
    context = ParallelContext.single(dtype=torch.float32)
    kernels = select_kernels(KernelConfig(kernel_backend="torch_native"), context.device, context.dtype)
    net = GPT(config, context, kernels, saved_tensors=SavedTensorPolicy(recompute))
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
"""Bytes of an element, number of tokens, and number of expert rows, which is two per token."""


@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        # Both MoE layers save act(gate) * up.
        ("moe_act", 2 * NUM_ROWS * 24),
        # Three layers save the outputs of both norms, which are not part of the residual stream.
        ("layernorm", 3 * 2 * TOKENS * HIDDEN),
        # Three layers save q and k with 9 channels, and k and v before their split, with 5 and 9 channels.
        ("mla_up_proj", 3 * TOKENS * 3 * (9 + 9 + 5 + 9)),
    ],
)
def test_discarded_outputs_are_freed_until_backward(module, numbers):
    # v_head_dim equals the width of keys; otherwise, attention on the CPU would save padded copies.
    config = tiny.model(layers=layers(mla_config(v_head_dim=9), dropout=0.0, sinks=False))
    saved = kept_bytes(config, RecomputeConfig()) - kept_bytes(config, selective(module))
    rotations = TOKENS * 4 * NUMBER  # the recomputed up-projection saves the rotation angles of the microbatch
    assert 0 <= numbers * NUMBER - saved <= rotations


@pytest.mark.parametrize("module", ["core_attn", "mlp", "moe", "shared_experts"])
def test_recomputed_modules_save_only_their_inputs(module):
    config = tiny.model(layers=layers(tiny.attention()))
    assert kept_bytes(config, selective(module)) < kept_bytes(config, RecomputeConfig())


def test_full_recompute_saves_one_hidden_state_per_group():
    config = tiny.model(layers=layers(tiny.attention()) * 2)
    with_accumulate, in_threes = (kept_bytes(config, full("uniform", number)) for number in (1, 3))
    assert with_accumulate - in_threes == (6 - 2) * TOKENS * HIDDEN * NUMBER
    first_two = kept_bytes(config, full("block", 2))
    assert in_threes < with_accumulate < first_two < kept_bytes(config, RecomputeConfig())


def test_outputs_with_other_references_are_kept_and_recomputed_once():
    x, calls = randn(4, 3).requires_grad_(), []

    def make(given: Tensor) -> Tensor:
        calls.append(given)
        return given.exp()

    saved_tensors = SavedTensorPolicy(selective("layernorm"))
    y = x.exp()
    with saved_tensors.discard_output("layernorm", make, (x,), y):
        out = (y * y).sum() + (y.t()[1:] * 2.0 * y.t()[1:]).sum()
    elsewhere = y[2].clone()
    out.backward()
    EXACT.check(y[2], elsewhere, "the output with another reference")
    assert len(calls) == 1, "recomputed once for all consumers"
    plain = x.detach().requires_grad_()
    z = plain.exp()
    ((z * z).sum() + (z.t()[1:] * 2.0 * z.t()[1:]).sum()).backward()
    EXACT.check(x.grad, plain.grad, "gradient")


def test_nothing_is_recomputed_in_no_grad_mode():
    calls = []

    def run(x: Tensor) -> Tensor:
        calls.append(x)
        return x * 2

    with torch.no_grad():
        assert checkpoint(run, run, randn(2)).grad_fn is None
    assert len(calls) == 1


def test_parameters_get_gradients_if_no_input_requires_one():
    weight = randn(3).requires_grad_()
    checkpoint(lambda x: x * weight, lambda x: x * weight, randn(3)).sum().backward()
    EXACT.check(weight.grad, randn(3), "gradient of the weight")


def test_replicated_inputs_can_be_saved_as_shards():
    """Without sequence parallelism, all tensor-parallel ranks have the same residual stream, so each saves a shard."""

    def kept_and_gradient(context: ParallelContext, tp: str | None) -> tuple[int, Tensor]:
        group = None if tp is None else context.group(tp)
        saved_tensors = SavedTensorPolicy(
            replace(full("uniform", 1), distribute_saved_activations=tp is not None), tp=group
        )
        x, mb = randn(SEQ, BATCH, HIDDEN).requires_grad_(), batch().context
        with Alive() as alive:
            out = saved_tensors.checkpoint(lambda hidden, mb: (hidden * 2).sin(), x * 3, mb=mb)
            kept = alive.bytes() - out.nbytes
            out.sum().backward()
        return kept, x.grad

    config = ParallelConfig(world_size=2, tp=2)
    whole, parts = (on_threads(config, partial(kept_and_gradient, tp=tp)) for tp in (None, "tp"))
    for (kept, gradient), (kept_part, gradient_from_parts) in zip(whole, parts, strict=True):
        EXACT.check(gradient_from_parts, gradient, "gradient")
        assert 0 < kept_part == kept // 2


def test_fake_tensors_are_recomputed_too():
    """Memory emulation runs recompute on fake tensors.

    The model has dense layers only, because reference experts read row counts on the host.
    """
    config = tiny.model(layers=layers(mla_config())[:1] * 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for way in ("small ones together", "uniform, two at a time"):
            net = GPT(config, ParallelContext.single(), reference.bundle(), saved_tensors=SavedTensorPolicy(WAYS[way]))
            losses_of(net, microbatch(BATCH, SEQ)).loss_BS.sum().backward()
            assert all(gradient.shape == net.get_parameter(name).shape for name, gradient in gradients(net).items())
