"""Initial values depend only on seed, parameter name and expert id."""

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_moe.config.attention import NormConfig
from megatron_moe.config.model import InitConfig, MTPConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.pipeline_layout import even_layout
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.gpt import GPT
from megatron_moe.model.init import init_parameters, standard_deviation
from megatron_moe.parallel import rng
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import new_parameter
from tests.helpers.tiny_models import (
    HIDDEN,
    attention_config,
    build,
    layer_config,
    mla_config,
    mlp_config,
    model_config,
    moe_config,
)
from tests.helpers.tolerances import EXACT

LAYER_NORM = NormConfig(kind="LayerNorm")
EVERYTHING = model_config(
    layer_config(attention_config(qkv_bias=True, qk_norm="per_head", core={"sinks": True}), norm=LAYER_NORM),
    layer_config(mla_config(), moe_config(score_function="sigmoid", expert_bias=True)),
    mtp=MTPConfig(num_layers=1),
    position_embedding="learned_absolute",
)


def values(model: GPT) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def initial_values(shape: tuple[int, ...], meta: ParamMeta, name: str, seed: int, config: InitConfig) -> Tensor:
    """Initial values of the only parameter of a module."""
    module = nn.Module()
    module.register_parameter(name, new_parameter(shape, meta, ParallelContext.single(dtype=torch.float32)))
    init_parameters(module, seed, config)
    return module.get_parameter(name).detach()


def test_stages_have_the_values_of_the_whole_model():
    whole = values(build(EVERYTHING))
    layout = even_layout(2, pp=2, num_mtp=EVERYTHING.mtp.num_layers if EVERYTHING.mtp else 0)
    stages = [build(EVERYTHING, chunks=[stage]) for stage in layout.stages]
    seen = set()
    for stage in stages:
        EXACT.check_all(values(stage), {name: whole[name] for name in values(stage)}, "stage")
        seen |= values(stage).keys()
    assert seen == whole.keys()


def test_values_change_with_the_seed_and_between_parameters():
    first, second = (dict(build(EVERYTHING, seed=seed).named_parameters()) for seed in (1, 2))
    assert not [name for name in first if torch.equal(first[name], second[name])]
    same_shape = [p for p in first.values() if p.shape == (HIDDEN,)]
    assert len({tuple(p.tolist()) for p in same_shape}) == len(same_shape) > 5


def test_values_do_not_depend_on_the_dtype():
    models = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        models[dtype] = GPT(EVERYTHING, ParallelContext.single(dtype=dtype), reference.bundle())
        init_parameters(models[dtype], 7, EVERYTHING.init)
    for name, wide in models[torch.float64].named_parameters():
        EXACT.check(models[torch.float32].get_parameter(name), wide, name)
        EXACT.check(models[torch.bfloat16].get_parameter(name), wide.bfloat16(), name)


def test_expert_values_depend_on_the_expert_id():
    meta = ParamMeta(role="matrix", grid="expert", num_experts=4, fan_in=9)
    stack = initial_values((4, 5, 9), meta, "stack", 7, InitConfig(std=0.5))
    for expert in range(4):
        generator = rng.generator((7, "stack", expert))
        EXACT.check(stack[expert], 0.5 * torch.randn(5, 9, generator=generator), f"expert {expert}")


@pytest.mark.parametrize(
    ("init", "std"), [("normal", 0.02), ("output", 0.005), ("embedding", 0.3), ("zeros", 0.0), ("ones", 0.0)]
)
def test_standard_deviations_follow_the_kind_of_parameter(init, std):
    config = InitConfig(std=0.02, output_std=0.005, embedding_std=0.3)
    drawn = initial_values((100, 100), ParamMeta(role="matrix", init=init), "w", 7, config)
    assert drawn.mean().item() == pytest.approx(1.0 if init == "ones" else 0.0, abs=4 * std / 100)
    assert drawn.std().item() == pytest.approx(std, rel=0.03)


def test_embeddings_use_embedding_std_if_set():
    meta = ParamMeta(role="embedding", init="embedding")
    assert standard_deviation(meta, InitConfig(std=0.02)) == 0.02
    assert standard_deviation(meta, InitConfig(std=0.02, embedding_std=1.0)) == 1.0


def test_plain_initial_values_of_a_model():
    config = InitConfig(std=0.02, output_std=0.001)
    model = build(model_config(*EVERYTHING.layers, layer_config(feed_forward=mlp_config(bias=True)), init=config))
    for name, p in model.named_parameters():
        if p.meta.role == "norm":
            EXACT.check(p, torch.ones_like(p), name)
        elif name.endswith(".bias"):
            EXACT.check(p, torch.zeros_like(p), name)
        elif p.numel() > 50:
            writes = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            assert p.std().item() == pytest.approx(0.001 if writes else 0.02, rel=0.5), name
    assert not model.get_buffer("decoder.layers.1.mlp.router.expert_bias").any()


def test_unit_gain_scales_by_fan_in_and_randomises_norms_and_biases():
    model = build(EVERYTHING)
    for name, p in model.named_parameters():
        if p.meta.role == "norm":
            assert 0.02 < (p - 1).std() < 0.2, name
        elif p.meta.role == "bias":
            assert 0.02 < p.std() < 0.2, name
        elif p.meta.role != "sink":
            assert p.std().item() == pytest.approx(1 / math.sqrt(p.meta.fan_in), rel=0.3), name
    assert model.get_buffer("decoder.layers.1.mlp.router.expert_bias").std() > 0.02


def test_fan_in_of_matrices_is_their_input_size():
    for name, p in build(EVERYTHING).named_parameters():
        if p.meta.role in ("matrix", "head", "router"):
            assert p.meta.fan_in == p.shape[-1], name


def test_norms_biases_and_sinks_have_no_weight_decay():
    for name, p in build(EVERYTHING).named_parameters():
        assert p.meta.decay == (p.meta.role not in ("norm", "bias", "sink")), name


def test_xavier_matrices_are_uniform_within_their_bound():
    config, matrix = InitConfig(std=9.0, method="xavier_uniform"), ParamMeta(role="matrix", fan_in=50)
    drawn = initial_values((100, 50), matrix, "w", 7, config)
    bound = math.sqrt(6 / 150)
    assert 0.99 * bound < drawn.abs().max() <= bound
    assert drawn.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert drawn.mean().abs() < 0.05 * bound
    norm = initial_values((50,), ParamMeta(role="norm", init="ones"), "n", 7, config)
    EXACT.check(norm, torch.ones(50), "norm")
    stack = initial_values(
        (4, 100, 50), ParamMeta(role="matrix", grid="expert", num_experts=4, fan_in=50), "e", 7, config
    )
    assert 0.99 * bound < stack.abs().max() <= bound


def test_embedding_std_applies_with_xavier():
    config, table = (
        InitConfig(embedding_std=2.0, method="xavier_uniform"),
        ParamMeta(role="embedding", init="embedding"),
    )
    drawn = initial_values((100, 50), table, "w", 7, config)
    assert drawn.std().item() == pytest.approx(2.0, rel=0.03)
