"""Hyper-connections against the formulas, against Hugging Face's modules, and against the plain residual connection."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as published

from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.memory import RecomputeConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.reference.hyper_connections import sinkhorn
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.layers.resources import ModelResources
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.hyper_connections import HyperConnection, StreamsHead
from megatron_moe.model.init import init_parameters
from megatron_moe.model.rope import Rotations
from megatron_moe.model.transformer_layer import TransformerLayer
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.modules import standalone_resources
from tests.helpers.tiny_models import HIDDEN, UNIT_GAIN, layer_config, make_mb, moe_config, randn
from tests.helpers.tolerances import EXACT, FP32_MODEL, FP32_PARITY, FP64_REF

CONFIG = HyperConnectionsConfig(num_streams=3, sinkhorn_iterations=5, norm_eps=1e-3, eps=1e-2)
LAYER = layer_config(feed_forward=moe_config(), residual=CONFIG)


def make(
    config: LayerConfig, *recomputed: str, dtype: torch.dtype = torch.float64, backend: str = "reference"
) -> TransformerLayer:
    """Layer whose connections run on a kernel backend; all other ops are those of the reference."""
    saved = SavedTensorPolicy(RecomputeConfig(recompute_modules=recomputed))
    per_op = tuple((f"hyper_connection_{op}", backend) for op in ("read", "sum", "write"))
    context = ParallelContext.single(dtype=dtype)
    kernels = select_kernels(KernelConfig(kernel_backend="reference", kernel_per_op=per_op), context.device, dtype)
    layer = TransformerLayer(config, 0, "decoder.layers.0", ModelResources(context, kernels, saved))
    init_parameters(layer, 5, UNIT_GAIN)
    return layer


def run(layer: TransformerLayer, stream: Tensor) -> dict[str, Tensor]:
    """Output and all gradients, for a loss in which every output element has another weight."""
    stream = stream.clone().requires_grad_()
    mb = Rotations([layer.config.mixer], ParallelContext.single()).attach(make_mb(2, 5))
    out = layer(stream, mb)
    (out * randn(*out.shape, seed=3)).sum().backward()
    return {"output": out, "stream": stream.grad, **{name: each.grad for name, each in layer.named_parameters()}}


class ByHand(torch.nn.Module):
    """Computes the formulas of a connection token by token with Python operators."""

    def __init__(self, connection: HyperConnection) -> None:
        super().__init__()
        self.matrix, self.scale, self.bias = connection.parameters_of_streams
        self.config = connection.config

    def weights(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`streams` [n, H] of one token."""
        config, n = self.config, self.config.num_streams
        flat = streams.reshape(-1)
        normed = self.matrix @ (flat / torch.sqrt((flat**2).mean() + config.norm_eps))
        factors = torch.cat([self.scale[index].expand(size) for index, size in enumerate((n, n, n * n))])
        h = normed * factors + self.bias
        mix = torch.exp(h[2 * n :].reshape(n, n))
        mix = mix / mix.sum(1, keepdim=True) + config.eps
        for step in range(2 * config.sinkhorn_iterations - 1):
            mix = mix / (mix.sum(step % 2, keepdim=True) + config.eps)
        return 1 / (1 + torch.exp(-h[:n])) + config.eps, 2 / (1 + torch.exp(-h[n : 2 * n])), mix

    def around(self, stream: Tensor, module) -> Tensor:
        seq, batch, _ = stream.shape
        tokens = stream.reshape(seq, batch, self.config.num_streams, -1)
        weights = [[self.weights(tokens[s, b]) for b in range(batch)] for s in range(seq)]
        read = torch.stack([torch.stack([weights[s][b][0] @ tokens[s, b] for b in range(batch)]) for s in range(seq)])
        out = module(read)
        rows = []
        for s in range(seq):
            for b in range(batch):
                _, post, mix = weights[s][b]
                rows.append(mix.T @ tokens[s, b] + torch.outer(post, out[s, b]))
        return torch.stack(rows).reshape(stream.shape)


def test_layer_and_its_gradients_equal_the_formulas():
    layer, stream = make(LAYER), randn(5, 2, 3 * HIDDEN)
    found = run(layer, stream)
    layer.zero_grad()
    mixer, mlp = (ByHand(layer.connections[name]) for name in ("self_attention", "mlp"))
    mb = Rotations([layer.config.mixer], ParallelContext.single()).attach(make_mb(2, 5))
    stream = stream.clone().requires_grad_()
    out = mixer.around(stream, lambda x: layer.self_attention(layer.input_layernorm(x), mb))
    out = mlp.around(out, lambda x: layer.mlp(layer.pre_mlp_layernorm(x), mb))
    (out * randn(*out.shape, seed=3)).sum().backward()
    expected = {"output": out, "stream": stream.grad, **{n: each.grad for n, each in layer.named_parameters()}}
    FP64_REF.check_all(found, expected, "hyper-connections")


@pytest.mark.parametrize("recomputed", [("mhc",), ("mhc", "layernorm", "moe")], ids=" ".join)
def test_recompute_changes_no_number(recomputed: tuple[str, ...]):
    stream = randn(5, 2, 3 * HIDDEN)
    EXACT.check_all(run(make(LAYER, *recomputed), stream), run(make(LAYER), stream), "recompute")


def test_recompute_changes_no_number_of_the_triton_kernels():
    stream, fp32 = randn(5, 2, 3 * HIDDEN).float(), torch.float32
    layers = [make(LAYER, *modules, dtype=fp32, backend="triton") for modules in (("mhc",), ())]
    recomputed, saved = (run(layer, stream) for layer in layers)
    EXACT.check_all(recomputed, saved, "recompute")
    FP32_MODEL.check_all(saved, run(make(LAYER, dtype=fp32), stream), "plain torch")


def test_matrices_are_doubly_stochastic():
    matrices = sinkhorn(randn(50, 4, 4), 20, 1e-9)
    assert (matrices > 0).all()
    for dim in (-1, -2):
        assert (matrices.sum(dim) - 1).abs().max() < 1e-6


def test_one_stream_with_neutral_weights_is_the_plain_residual_connection():
    config = replace(CONFIG, num_streams=1, eps=0.0)
    layer, plain = make(replace(LAYER, residual=config)), make(layer_config(feed_forward=moe_config()))
    plain.load_state_dict({name: each for name, each in layer.state_dict().items() if "hyper_connection" not in name})
    for connection in layer.connections.values():
        with torch.no_grad():
            connection.scale.zero_()
            connection.bias.copy_(torch.tensor([50.0, 0.0, 7.0]))  # sigmoid(50) is 1 in fp64
    stream = randn(5, 2, HIDDEN)
    found, expected = run(layer, stream), run(plain, stream)
    EXACT.check(found["output"], expected["output"], "output")
    FP64_REF.check_all({name: found[name] for name in expected}, expected, "gradients")


class NoNorm(torch.nn.Identity):
    forward_unquantized = torch.nn.Identity.forward


def test_weights_equal_those_of_hugging_face():
    config = HyperConnectionsConfig(num_streams=4, norm_eps=1e-5)
    family = DeepseekV4Config(hidden_size=HIDDEN, hc_mult=4, rms_norm_eps=1e-5, num_hidden_layers=1)
    context = ParallelContext.single(dtype=torch.float32)
    resources = standalone_resources(context, reference.bundle())
    ours, theirs = HyperConnection(config, HIDDEN, resources), published.DeepseekV4HyperConnection(family)
    head, their_head = StreamsHead(config, HIDDEN, resources), published.DeepseekV4HyperHead(family)
    for module in (ours, head):
        init_parameters(module, 5, UNIT_GAIN)
    with torch.no_grad():
        for module, prefix, parameters in ((theirs, "", ours), (their_head, "hc_", head)):
            names = (f"{prefix}{each}" for each in ("fn", "scale", "base"))
            for name, value in zip(names, parameters.parameters_of_streams, strict=True):
                getattr(module, name).copy_(value)
    stream = randn(5, 2, 4 * HIDDEN).float()
    streams_BSNH = stream.unflatten(-1, (4, HIDDEN)).transpose(0, 1)
    post, mix, read = theirs(streams_BSNH.contiguous())
    found = ours.sublayer_input(stream, NoNorm())
    weights = found.stream_weights
    by_token = {"post": weights.post_TN, "mix": weights.mix_TNN, "read": found.normed_SBH.flatten(0, 1)}
    expected = {"post": post, "mix": mix, "read": read}
    FP32_PARITY.check_all(by_token, {name: each.transpose(0, 1).flatten(0, 1) for name, each in expected.items()}, "")
    FP32_PARITY.check(head(stream), their_head(streams_BSNH).transpose(0, 1), "head")
