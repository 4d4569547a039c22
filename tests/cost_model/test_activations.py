"""Saved tensors of the cost model equal those that autograd saves in a forward pass.

The model runs in fp32 on the CPU. Tensors that plain torch saves in addition to our fused kernels are subtracted.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_moe.config.attention import AttentionConfig, RopeConfig
from megatron_moe.config.costs import ActivationSizes, SavedActivation
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.model import LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import CapacityConfig, ExpertsConfig, MoEConfig, RouterConfig, SharedExpertsConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline_layout import even_layout
from megatron_moe.config.run import KernelConfig
from megatron_moe.cost_model.activations import layer_tensors, stage_tensors
from megatron_moe.kernels.kernel_set import KernelSet
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.model.gpt import GPT, LossOutput
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.rng import RNGKey
from tests.helpers.tiny_models import attention_config, layer_config, microbatch, mla_config, mlp_config, model_config
from tests.helpers.tolerances import SAVED_BYTES

BATCH, SEQ, HIDDEN, VOCAB = 2, 48, 192, 256
TOKENS = BATCH * SEQ
FP32 = 4
ALONE = ParallelConfig()
SIZES = ActivationSizes(residual=TOKENS, inner=TOKENS, activation_itemsize=FP32, internal_itemsize=FP32, length=SEQ)


def moe(**changes) -> MoEConfig:
    router = RouterConfig(hidden_size=HIDDEN, num_experts=8, topk=3, **changes.pop("router", {}))
    dense = mlp_config(hidden_size=HIDDEN, ffn_hidden_size=80)
    experts = ExpertsConfig(num_experts=8, hidden_size=HIDDEN, ffn_hidden_size=64, activation=dense.activation)
    return replace(MoEConfig(router=router, experts=experts, shared=SharedExpertsConfig(mlp=dense)), **changes)


def wide(mixer: AttentionConfig | MLAConfig) -> AttentionConfig | MLAConfig:
    return replace(mixer, hidden_size=HIDDEN)


def gqa(**changes) -> AttentionConfig:
    rope = RopeConfig(dim=16)
    return attention_config(**{"hidden_size": HIDDEN, "head_dim": 16, "rope": rope, **changes})


def model(*layers: LayerConfig, **changes) -> ModelConfig:
    return model_config(*layers, hidden_size=HIDDEN, vocab_size=VOCAB, **changes)


def layer(mixer: AttentionConfig | MLAConfig | None = None, feed_forward: object = None, **changes) -> LayerConfig:
    return layer_config(
        wide(mixer or gqa()), feed_forward or mlp_config(hidden_size=HIDDEN, ffn_hidden_size=320), **changes
    )


def latent_moe() -> MoEConfig:
    config = moe()
    return replace(config, latent_size=96, experts=replace(config.experts, hidden_size=96))


MODELS = {
    "grouped-query attention, dense": model(layer()),
    "normed queries and keys": model(layer(gqa(qk_norm="per_head"))),
    "queries and keys normed without weights": model(layer(gqa(qk_norm="l2"))),
    "queries and keys normed over all heads": model(layer(gqa(qk_norm="full"))),
    "no rotation": model(layer(gqa(rope=None))),
    "output gate": model(layer(gqa(output_gate=True))),
    "latent attention": model(layer(mla_config(q_lora_rank=40, kv_lora_rank=24))),
    "latent attention without latent queries": model(layer(mla_config(q_lora_rank=None, kv_lora_rank=24))),
    "latent attention without norms": model(layer(mla_config(q_lora_rank=40, kv_lora_rank=24, qk_norm=False))),
    "experts and a shared one": model(layer(feed_forward=moe())),
    "experts with sigmoid scores and a loss": model(
        layer(
            feed_forward=moe(
                router={"score_function": "sigmoid", "balancing": ("seq_aux_loss",), "aux_loss_coeffs": (1e-2,)}
            )
        )
    ),
    "a gate on the shared expert": model(layer(feed_forward=replace(moe(), shared=replace(moe().shared, gate=True)))),
    "experts with biases": model(layer(feed_forward=replace(moe(), experts=replace(moe().experts, bias=True)))),
    "experts weighed behind their second matrix": model(
        layer(feed_forward=replace(moe(), experts=replace(moe().experts, bias=True, probs_on_output=True)))
    ),
    "experts in a latent space": model(layer(feed_forward=latent_moe())),
    "padded experts": model(layer(feed_forward=replace(moe(), capacity=CapacityConfig(factor=1.5, pad=True)))),
    "dropout": model(layer(hidden_dropout=0.1)),
    "multi-token prediction": model(layer(), layer(feed_forward=moe()), mtp=MTPConfig(num_layers=2)),
}


def saved_bytes(config: ModelConfig) -> int:
    """Bytes of all storages that autograd saves in one forward pass, except parameters and buffers."""
    context = ParallelContext.single(dtype=torch.float32)
    kernels: KernelSet = select_kernels(KernelConfig(kernel_backend="torch_native"), context.device, context.dtype)
    net = GPT(config, context, kernels)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    batch = microbatch(BATCH, SEQ, vocab=VOCAB, rng=RNGKey(1, 2, 0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = net(batch)
    assert isinstance(output, LossOutput)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


def listed(config: ModelConfig) -> list[SavedActivation]:
    (stage,) = even_layout(len(config.layers), num_mtp=config.num_mtp).stages
    layers = [each for one in config.layers for each in layer_tensors(one, ALONE, SIZES)]
    return layers + stage_tensors(config, stage, ALONE, SIZES)


def beyond_fused_kernels(config: ModelConfig) -> Iterator[int]:
    """Bytes that only plain torch saves: the normalised input of a norm, the probabilities of MLA attention instead of
    the log-sum-exp, inputs and statistics of per-head norms."""
    blocks = [*config.layers, *([config.layers[-1]] * (config.mtp.num_layers if config.mtp else 0))]
    norms = 2 * len(blocks) + 1 + (3 * config.mtp.num_layers if config.mtp else 0)
    yield norms * TOKENS * HIDDEN * FP32
    for block in blocks:
        mixer = block.mixer
        if isinstance(mixer, MLAConfig):
            heads = TOKENS * mixer.num_heads
            yield heads * (SEQ - 1) * FP32
            yield TOKENS * (mixer.kv_lora_rank + (mixer.q_lora_rank or 0)) * FP32 if mixer.qk_norm else 0
        elif mixer.qk_norm in ("per_head", "full"):
            yield TOKENS * (mixer.q_width + mixer.kv_width) * FP32
            heads = mixer.num_heads + mixer.num_query_groups
            yield TOKENS * (mixer.q_width + heads) * FP32 if mixer.qk_norm == "per_head" else 0


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_equal_those_of_autograd(name):
    config = MODELS[name]
    expected = saved_bytes(config) - sum(beyond_fused_kernels(config))
    SAVED_BYTES.check(float(sum(each.bytes for each in listed(config))), float(expected), name)


def test_tensor_parallelism_divides_saved_bytes():
    """With sequence parallelism, all saved bytes are halved except the router's constants and kv's shared rotary
    part."""
    both = ParallelConfig(tp=2, world_size=2, sequence_parallel=True)
    sizes = replace(SIZES, residual=TOKENS // 2)
    one = layer(gqa(num_heads=8, num_query_groups=4), moe(router={"dtype": "fp32"}))
    whole = {(each.module, each.name): each.bytes for each in layer_tensors(one, ALONE, SIZES)}
    half = {(each.module, each.name): each.bytes for each in layer_tensors(one, both, sizes)}
    assert {name: 2 * size for name, size in half.items()} == whole


def test_expert_rows_by_dispatcher():
    config, tokens = moe(), 100
    over_four = ParallelConfig(ep=4, world_size=4)
    assert config.rows(ALONE, tokens) == 300
    assert replace(config, dispatcher="alltoall").rows(over_four, tokens) == 300
    assert replace(config, dispatcher="allgather").rows(over_four, tokens) == 4 * 100 * 2  # 2 local experts
    padded = replace(config, dispatcher="alltoall", capacity=CapacityConfig(factor=1.0, pad=True))
    assert padded.rows(over_four, tokens) == 4 * 2 * 38  # ceil(37.5) of every rank for every local expert
    sliced = ParallelConfig(ep=2, etp=2, tp=2, world_size=4, sequence_parallel=True)
    assert replace(config, dispatcher="alltoall").rows(sliced, tokens) == 600  # those of both slices' ranks
