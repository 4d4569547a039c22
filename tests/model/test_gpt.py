"""GPT model: parameter names, gradients, pipeline stages, nodes and objective."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import NormConfig
from megatron_moe.config.model import MTPConfig
from megatron_moe.config.pipeline_layout import parse_layout
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.cost_model.parameters import count_parameters
from megatron_moe.data.batch import MicroBatch
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.gpt import GPT, LossOutput, training_objective
from megatron_moe.model.init import init_parameters
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.tiny_models import (
    VOCAB,
    attention_config,
    build,
    gradients,
    layer_config,
    microbatch,
    mla_config,
    mlp_config,
    model_config,
    moe_config,
)
from tests.helpers.tolerances import EXACT, FP64_LAYOUT, FP64_REF

MTP = MTPConfig(num_layers=1, loss_scaling_factor=1.0)
DENSE = model_config(layer_config(), layer_config(mla_config(), norm=NormConfig(kind="LayerNorm")), mtp=MTP)
MOE = model_config(
    layer_config(mla_config()),
    layer_config(mla_config(), moe_config(score_function="sigmoid", expert_bias=True)),
    mtp=MTP,
)
MIXED = model_config(layer_config(), *[layer_config(attention_config(), moe_config()), layer_config()] * 2)


def loss_of(model: GPT, batch: MicroBatch) -> Tensor:
    return training_objective(model(batch), batch, mtp=model.config.mtp, per_token=False)[0]


def gradients_of(model: GPT, batch: MicroBatch) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, batch).backward()
    return gradients(model)


def mla_names(prefix: str) -> list[str]:
    inside = ["q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj"]
    norms = ["q_layernorm", "kv_layernorm"]
    return [f"{prefix}.self_attention.{n}.weight" for n in [f"linear_{m}" for m in inside] + norms]


def moe_names(prefix: str) -> list[str]:
    parts = ["router", "experts.linear_fc1", "experts.linear_fc2"]
    parts += ["shared_experts.linear_fc1", "shared_experts.linear_fc2"]
    return [f"{prefix}.mlp.{part}.weight" for part in parts]


def layer_names(prefix: str) -> list[str]:
    return [f"{prefix}.input_layernorm.weight", *mla_names(prefix), f"{prefix}.pre_mlp_layernorm.weight"]


def test_parameters_have_megatrons_names():
    dense = ["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"]
    mtp = [f"mtp.layers.0.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")]
    expected = [
        "embedding.word_embeddings.weight",
        *layer_names("decoder.layers.0"),
        *dense,
        *layer_names("decoder.layers.1"),
        *moe_names("decoder.layers.1"),
        "decoder.final_layernorm.weight",
        *layer_names("mtp.layers.0.transformer_layer"),
        *moe_names("mtp.layers.0.transformer_layer"),
        *mtp,
        "output_layer.weight",
    ]
    model = build(MOE)
    assert sorted(name for name, _ in model.named_parameters()) == sorted(expected)
    saved = sorted(set(model.state_dict()) - set(expected))
    routers = ("decoder.layers.1.mlp", "mtp.layers.0.transformer_layer.mlp")
    assert saved == [f"{mlp}.router.expert_bias" for mlp in routers]


def test_optional_parameters_have_megatrons_names():
    mixer = attention_config(qkv_bias=True, out_bias=True, qk_norm="per_head", core={"sinks": True})
    layer = layer_config(mixer, mlp_config(bias=True), norm=NormConfig(kind="LayerNorm"))
    model = build(model_config(layer, position_embedding="learned_absolute", head_bias=True))
    attention = ["linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight", "linear_proj.bias"]
    attention += ["q_layernorm.weight", "k_layernorm.weight", "sinks"]
    norms = [f"{norm}.{kind}" for norm in ("input_layernorm", "pre_mlp_layernorm") for kind in ("weight", "bias")]
    mlp = [f"mlp.{matrix}.{kind}" for matrix in ("linear_fc1", "linear_fc2") for kind in ("weight", "bias")]
    inside = [*norms, *mlp, *(f"self_attention.{name}" for name in attention)]
    expected = [f"decoder.layers.0.{name}" for name in inside]
    expected += ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight"]
    expected += ["decoder.final_layernorm.weight", "output_layer.weight", "output_layer.bias"]
    assert sorted(name for name, _ in model.named_parameters()) == sorted(expected)


COUNTED = {
    "MoE with MLA and MTP": MOE,
    "mixed": MIXED,
    "dense": DENSE,
    "tied, learned positions": replace(DENSE, tied_embeddings=True, position_embedding="learned_absolute"),
    "repeated MTP layer": replace(DENSE, mtp=MTPConfig(num_layers=3, repeated_layer=True)),
    "everything optional": model_config(
        layer_config(
            attention_config(qkv_bias=True, out_bias=True, qk_norm="full", output_gate=True, core={"sinks": True}),
            mlp_config(bias=True),
            norm=NormConfig(kind="LayerNorm"),
        ),
        head_bias=True,
    ),
}


@pytest.mark.parametrize("config", COUNTED.values(), ids=COUNTED.keys())
def test_parameter_count_equals_the_cost_model(config):
    assert sum(p.numel() for p in build(config).parameters()) == count_parameters(config).total


@pytest.mark.parametrize("config", [DENSE, MOE, MIXED], ids=["dense", "moe", "mixed"])
def test_every_parameter_affects_the_loss_with_unit_gain(config):
    model, batch = build(config), microbatch()
    with torch.no_grad():
        usual = loss_of(model, batch)
        for name, parameter in model.named_parameters():
            if parameter.meta.role in ("norm", "bias"):
                continue
            kept = parameter.clone()
            parameter.zero_()
            assert abs(loss_of(model, batch) - usual) > 1e-3, f"zeroing {name} changes nothing"
            parameter.copy_(kept)


@pytest.mark.parametrize("config", [DENSE, MOE, MIXED], ids=["dense", "moe", "mixed"])
def test_gradients_equal_finite_differences(config):
    model, batch = build(config), microbatch()
    grads = gradients_of(model, batch)
    step, generator = 1e-6, torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            direction = torch.randn(parameter.shape, generator=generator).double()
            direction /= direction.norm()
            losses = []
            for sign in (1, -2):
                parameter.add_(direction, alpha=sign * step)
                losses.append(loss_of(model, batch))
            parameter.add_(direction, alpha=step)
            slope = (losses[0] - losses[1]) / (2 * step)
            assert abs(slope - (grads[name] * direction).sum()) < 1e-6 * max(1, abs(slope)), name


def test_gradient_of_a_tied_embedding_sums_both_uses():
    batch = microbatch()
    for mtp in (None, MTPConfig(num_layers=2)):
        tied = build(model_config(tied_embeddings=True, mtp=mtp))
        untied = build(model_config(mtp=mtp))
        untied.load_state_dict({**tied.state_dict(), "output_layer.weight": tied.embedding.word_embeddings.weight})
        one, two = gradients_of(tied, batch), gradients_of(untied, batch)
        both = two.pop("output_layer.weight") + two["embedding.word_embeddings.weight"]
        FP64_LAYOUT.check_all(one, {**two, "embedding.word_embeddings.weight": both}, "gradients")


def test_gradients_in_flat_buffers_equal_autograd():
    """A tied embedding gets one part of its gradient from the head's accumulator and another from autograd."""
    config = replace(MOE, tied_embeddings=True, mtp=MTPConfig(num_layers=2, repeated_layer=True))
    batches, plain, model = [microbatch(seed=1), microbatch(seed=2)], build(config), build(config)
    parts = [gradients_of(plain, batch) for batch in batches]
    fp64 = PrecisionConfig(params="fp64", grads="fp64", main_params_dtype="fp64")
    buffers = GradBuffers(model.named_parameters(), fp64, ParallelContext.single(), reference.bundle())
    buffers.begin_step()
    for batch in batches:
        loss_of(model, batch).backward()
        buffers.collect_autograd_grads()
    buffers.complete_local_grads()
    actual = {each.name: each.main_grad for each in buffers.main_grads}
    FP64_LAYOUT.check_all(actual, {name: parts[0][name] + parts[1][name] for name in parts[0]}, "gradients")


def run_stages(stages: list[GPT], batch: MicroBatch) -> LossOutput:
    hidden = None
    for stage in stages:
        hidden = stage(batch, hidden)
    return hidden


@pytest.mark.parametrize("layout", ["Et|t||mL", "E|tt|m||L"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_consecutive_stages_equal_the_whole_model(config, tied, layout):
    config, batch = replace(config, tied_embeddings=tied), microbatch(segments_BS=torch.tensor([[0] * 4 + [1] * 5] * 2))
    whole = build(config)
    num_mtp = config.mtp.num_layers if config.mtp else 0
    placed = parse_layout(layout.replace("m", f"m*{num_mtp}"), pp=layout.count("|") + 1, num_layers=2, num_mtp=num_mtp)
    stages = [build(config, chunks=[stage]) for stage in placed.stages]
    scalar = training_objective(run_stages(stages, batch), batch, mtp=config.mtp, per_token=False)[0]
    EXACT.check(scalar, loss_of(whole, batch), "objective")
    scalar.backward()
    summed: dict[str, Tensor] = {}
    for stage in stages:
        for name, grad in gradients(stage).items():
            summed[name] = summed.get(name, 0) + grad
    FP64_LAYOUT.check_all(summed, gradients_of(whole, batch), "gradients, copies of the embedding summed")


@pytest.mark.parametrize("by_node", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_nodes_list_all_parameters(tied, by_node):
    model = build(model_config(mtp=MTPConfig(num_layers=2), tied_embeddings=tied))
    chain = model._chain(microbatch(), 0, by_node=by_node)
    named = {parameter for bound in chain for node in bound.nodes for parameter in node.parameters}
    assert named == set(model.parameters())


@pytest.mark.parametrize("evaluation", [False, True])
def test_schedule_steps_equal_the_forward(evaluation):
    model, batch = build(model_config(mtp=MTPConfig(num_layers=2))), microbatch()
    batch = replace(batch, context=replace(batch.context, training=not evaluation))
    state, expected = None, model(batch)
    for step in model.steps(batch):
        state = step.run(state)
    EXACT.check(state.loss_BS, expected.loss_BS, "loss")
    assert len(state.mtp_losses) == len(expected.mtp_losses) == (0 if evaluation else 2)
    for depth, (actual, wanted) in enumerate(zip(state.mtp_losses, expected.mtp_losses, strict=True), start=1):
        for number in range(3):
            EXACT.check(actual[number], wanted[number], f"depth {depth}, tensor {number}")


def test_logits_match_the_loss():
    model, batch = build(model_config()), microbatch()
    logits_SBV = model.logits(batch.tokens_BS, batch.context)
    assert logits_SBV.shape == (9, 2, VOCAB)
    loss = torch.nn.functional.cross_entropy(logits_SBV.permute(1, 2, 0), batch.labels_BS, reduction="none")
    FP64_REF.check(model(batch).loss_BS, loss, "losses")


def test_objective_is_the_mean_over_tokens_or_their_sum():
    model, batch = build(model_config()), microbatch()
    output, weights = model(batch), batch.loss_mask_BS
    total, tokens = (output.loss_BS * weights).sum(), weights.sum()
    for per_token, expected in ((False, total / tokens), (True, total)):
        scalar, sums = training_objective(output, batch, mtp=None, per_token=per_token)
        FP64_REF.check(scalar, expected, "objective")
        FP64_REF.check(torch.stack(sums["lm loss"]), torch.stack([total, tokens]), "reported sums")


def test_training_on_the_meta_device_reads_no_values():
    """Host reads and data-dependent shapes raise on the meta device."""
    config = replace(DENSE, mtp=MTPConfig(num_layers=2, repeated_layer=True), position_embedding="learned_absolute")
    model = GPT(config, ParallelContext.single(device="meta"), reference.bundle())
    batch = microbatch(segments_BS=torch.zeros(2, 9, dtype=torch.int64), valid_BS=torch.ones(2, 9, dtype=torch.bool))
    tokens = replace(
        batch.context.tokens,
        positions_BS=batch.context.tokens.positions_BS.to("meta"),
        segments_BS=batch.context.tokens.segments_BS.to("meta"),
        valid_BS=batch.context.tokens.valid_BS.to("meta"),
    )
    batch = MicroBatch(
        tokens_BS=batch.tokens_BS.to("meta"),
        labels_BS=batch.labels_BS.to("meta"),
        loss_mask_BS=batch.loss_mask_BS.to("meta"),
        context=replace(batch.context, tokens=tokens),
    )
    loss_of(model, batch).backward()


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_bf16_model_has_bf16_activations_and_fp32_losses(config):
    model = GPT(config, ParallelContext.single(dtype=torch.bfloat16), reference.bundle())
    init_parameters(model, 7, config.init)
    seen = []
    for block in model.decoder.layers.values():
        block.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    batch = microbatch()
    batch = replace(batch, loss_mask_BS=batch.loss_mask_BS.float())
    output = model(batch)
    assert seen == [torch.bfloat16] * 2
    assert output.loss_BS.dtype == torch.float32
    training_objective(output, batch, mtp=config.mtp, per_token=False)[0].backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
