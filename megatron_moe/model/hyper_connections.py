"""Manifold-constrained hyper-connections (arXiv 2512.24880); `config/hyper_connections.py` has the formulas.

The streams [S, B, n H] of a token are processed in promote(fp32, dtype), in chunks of tokens, and saved in their own
dtype. The n (n + 2) mixing coefficients of a token are recomputed in backward from their saved projection, so that no
Sinkhorn iteration is saved.

With `--recompute-modules mhc`, a layer saves its input streams and the outputs of its sublayers. The input of a
sublayer and the streams between the sublayers are computed again in backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_moe.config.hyper_connections import CHUNK, HyperConnectionsConfig
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.layers.components import Connection, SublayerInput
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.memory.saved_tensors import DiscardScope
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.parameter import Parameter, new_parameter


def sinkhorn(logits_TNN: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic matrices: softmax of the rows, then alternating normalisation of columns and rows. The last
    step normalises columns, so rows sum to 1 only up to the convergence error."""
    matrix_TNN = logits_TNN.softmax(dim=-1) + eps
    matrix_TNN = matrix_TNN / (matrix_TNN.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix_TNN = matrix_TNN / (matrix_TNN.sum(dim=-1, keepdim=True) + eps)
        matrix_TNN = matrix_TNN / (matrix_TNN.sum(dim=-2, keepdim=True) + eps)
    return matrix_TNN


class StreamWeights(NamedTuple):
    """Mixing coefficients of every token at one hyper-connection, in the internal dtype."""

    pre_TN: Tensor
    """Coefficients of the n streams in the sublayer's input."""
    post_TN: Tensor
    """Coefficients with which the sublayer's output is added to the n streams."""
    mix_TNN: Tensor
    """Coefficient [j, k] of old stream j in new stream k."""


def stream_weights(logits_TM: Tensor, scale: Tensor, bias: Tensor, config: HyperConnectionsConfig) -> StreamWeights:
    """Computes the mixing coefficients from the normed projection of the streams, [T, n (n + 2)]."""
    n = config.num_streams
    parts = zip(logits_TM.split([n, n, n * n], dim=-1), scale, bias.split([n, n, n * n]), strict=True)
    pre_TN, post_TN, mix_TM = (logits * factor + offset for logits, factor, offset in parts)
    mix_TNN = sinkhorn(mix_TM.unflatten(-1, (n, n)), config.sinkhorn_iterations, config.eps)
    return StreamWeights(pre_TN.sigmoid() + config.eps, 2 * post_TN.sigmoid(), mix_TNN)


def head_weights(logits_TN: Tensor, scale: Tensor, bias: Tensor, config: HyperConnectionsConfig) -> tuple[Tensor]:
    """Computes the coefficients with which the head sums the streams."""
    return ((logits_TN * scale + bias).sigmoid() + config.eps,)


def _chunks(stream_SBW: Tensor) -> Iterator[slice]:
    num_tokens = stream_SBW.shape[0] * stream_SBW.shape[1]
    return (slice(start, min(start + CHUNK, num_tokens)) for start in range(0, num_tokens, CHUNK))


class _ReadStreams(AutogradFunction):
    """(streams, W, scale, bias) -> (streams, their weighted sum [S, B, H], weights).

    The streams are returned so that their gradient is added in the backward of this function."""

    @staticmethod
    def forward(
        ctx: Any, stream_SBW: Tensor, matrix_MW: Tensor, scale: Tensor, bias: Tensor, function: Any, config: Any
    ) -> tuple[Tensor, ...]:
        rows_TW, dtype = stream_SBW.flatten(0, 1), internal_dtype(stream_SBW.dtype)
        projected_TM = rows_TW.new_empty(len(rows_TW), len(matrix_MW), dtype=dtype)
        factor_T1 = rows_TW.new_empty(len(rows_TW), 1, dtype=dtype)
        wide_MW = matrix_MW.to(dtype)
        for part in _chunks(stream_SBW):
            wide = rows_TW[part].to(dtype)
            torch.matmul(wide, wide_MW.t(), out=projected_TM[part])
            factor_T1[part] = (wide.square().mean(dim=-1, keepdim=True) + config.norm_eps).rsqrt()
        weights = function(projected_TM * factor_T1, scale.to(dtype), bias.to(dtype), config)
        out_SBH = weighted_sum(stream_SBW, weights[0])
        ctx.function, ctx.config = function, config
        ctx.save_for_backward(stream_SBW, matrix_MW, scale, bias, projected_TM, factor_T1, weights[0])
        ctx.set_materialize_grads(False)
        return stream_SBW.view_as(stream_SBW), out_SBH, *weights

    @staticmethod
    def backward(ctx: Any, grad_stream: Tensor | None, grad_out: Tensor, *grad_weights: Tensor | None) -> Any:
        stream_SBW, matrix_MW, scale, bias, projected_TM, factor_T1, pre_TN = ctx.saved_tensors
        dtype, config = projected_TM.dtype, ctx.config
        rows_TNH, wide_MW = _by_stream(stream_SBW, config.num_streams), matrix_MW.to(dtype)
        grad_out_TH, grad_TW = grad_out.flatten(0, 1), torch.empty_like(stream_SBW).flatten(0, 1)
        # gradient of the coefficients of the weighted sum
        grad_pre_TN = torch.empty_like(pre_TN)
        for part in _chunks(stream_SBW):
            grad_pre_TN[part] = torch.einsum("tnh,th->tn", rows_TNH[part].to(dtype), grad_out_TH[part].to(dtype))
        if grad_weights[0] is not None:
            grad_pre_TN += grad_weights[0]
        # gradient through the mixing coefficients, which are recomputed
        with torch.enable_grad():
            inputs = [(projected_TM * factor_T1).detach(), scale.to(dtype), bias.to(dtype)]
            inputs = [each.detach().requires_grad_() for each in inputs]
            weights = ctx.function(*inputs, config)
        grads = (grad_pre_TN, *grad_weights[1:])
        grad_logits_TM, grad_scale, grad_bias = torch.autograd.grad(weights, inputs, grads)
        grad_projected_TM = grad_logits_TM * factor_T1
        # d factor / d mean square = -factor^3 / 2, and the mean square has the derivative 2 x / W
        width = stream_SBW.shape[-1]
        pull_T1 = -(grad_logits_TM * projected_TM).sum(dim=-1, keepdim=True) * factor_T1**3 / width
        grad_matrix_MW = torch.zeros_like(wide_MW)
        for part in _chunks(stream_SBW):
            wide_TW = rows_TNH[part].to(dtype).flatten(1)
            grad_matrix_MW.addmm_(grad_projected_TM[part].t(), wide_TW)
            grad = torch.addmm(wide_TW * pull_T1[part], grad_projected_TM[part], wide_MW)
            grad.unflatten(-1, (config.num_streams, -1)).addcmul_(pre_TN[part, :, None], grad_out_TH[part, None, :])
            if grad_stream is not None:
                grad += grad_stream.flatten(0, 1)[part]
            grad_TW[part] = grad
        of_parameters = grad_matrix_MW.to(matrix_MW.dtype), grad_scale.to(scale.dtype), grad_bias.to(bias.dtype)
        return grad_TW.view_as(stream_SBW), *of_parameters, None, None


class _WriteStreams(AutogradFunction):
    """(streams, sublayer's output [S, B, H], post, mix) -> new streams."""

    @staticmethod
    def forward(ctx: Any, stream_SBW: Tensor, out_SBH: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
        ctx.save_for_backward(stream_SBW, out_SBH, post_TN, mix_TNN)
        return written_streams(stream_SBW, out_SBH, post_TN, mix_TNN)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        stream_SBW, out_SBH, post_TN, mix_TNN = ctx.saved_tensors
        n, dtype = post_TN.shape[1], post_TN.dtype
        rows_TNH, grad_TNH, out_TH = _by_stream(stream_SBW, n), _by_stream(grads[0], n), out_SBH.flatten(0, 1)
        grad_stream, grad_out = torch.empty_like(stream_SBW), torch.empty_like(out_SBH)
        grad_post_TN, grad_mix_TNN = torch.empty_like(post_TN), torch.empty_like(mix_TNN)
        for part in _chunks(stream_SBW):
            grad = grad_TNH[part].to(dtype)
            _by_stream(grad_stream, n)[part] = mix_TNN[part] @ grad
            grad_mix_TNN[part] = rows_TNH[part].to(dtype) @ grad.mT
            grad_out.flatten(0, 1)[part] = (post_TN[part, None, :] @ grad).squeeze(1)
            grad_post_TN[part] = (grad @ out_TH[part].to(dtype).unsqueeze(-1)).squeeze(-1)
        return grad_stream, grad_out, grad_post_TN, grad_mix_TNN


def _by_stream(stream_SBW: Tensor, num_streams: int) -> Tensor:
    """View [T, n, H] of the streams."""
    return stream_SBW.flatten(0, 1).unflatten(-1, (num_streams, -1))


def weighted_sum(stream_SBW: Tensor, pre_TN: Tensor) -> Tensor:
    """Sum of the streams weighted by `pre_TN`, [S, B, H], in the dtype of the streams."""
    rows_TNH, (seq, batch, _) = _by_stream(stream_SBW, pre_TN.shape[1]), stream_SBW.shape
    out_TH = rows_TNH.new_empty(len(rows_TNH), rows_TNH.shape[-1])
    for part in _chunks(stream_SBW):
        out_TH[part] = (pre_TN[part, None, :] @ rows_TNH[part].to(pre_TN.dtype)).squeeze(1)
    return out_TH.unflatten(0, (seq, batch))


def written_streams(stream_SBW: Tensor, out_SBH: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
    """Streams after a sublayer with the output `out_SBH`, in the dtype of the streams."""
    new_SBW, n, dtype = torch.empty_like(stream_SBW), post_TN.shape[1], post_TN.dtype
    rows_TNH, new_TNH, out_TH = _by_stream(stream_SBW, n), _by_stream(new_SBW, n), out_SBH.flatten(0, 1)
    for part in _chunks(stream_SBW):
        written = torch.baddbmm(
            post_TN[part, :, None] * out_TH[part, None, :].to(dtype), mix_TNN[part].mT, rows_TNH[part].to(dtype)
        )
        new_TNH[part] = written
    return new_SBW


@dataclass(frozen=True)
class _Writing:
    """Coefficients with which a sublayer's output is written to the streams, and the saved-tensor scope of the
    streams."""

    post_TN: Tensor
    mix_TNN: Tensor
    scope: DiscardScope


class _Projection(nn.Module):
    """Parameters of the projection from the residual streams to their mixing coefficients."""

    def __init__(self, specs: Any, resources: ModelResources) -> None:
        super().__init__()
        created = {spec.name: new_parameter(spec.shape, spec.meta, resources.ctx) for spec in specs}
        self.mapping_proj = nn.ParameterDict({"weight": created["mapping_proj.weight"]})
        self.scale: Parameter = created["scale"]
        self.bias: Parameter = created["bias"]

    @property
    def parameters_of_streams(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.mapping_proj["weight"], self.scale, self.bias


class HyperConnection(_Projection, Connection):
    """Hyper-connection of one sublayer: reads its input from the residual streams and writes its output to them."""

    def __init__(self, config: HyperConnectionsConfig, hidden_size: int, resources: ModelResources) -> None:
        super().__init__(config.parameters(hidden_size, resources.ctx.config), resources)
        self.config = config
        self._saved_tensors = resources.saved_tensors

    def read(self, stream: Tensor, norm: Norm) -> SublayerInput:
        return self._read(stream, norm, DiscardScope())

    def write(self, stream: Tensor, weights: _Writing, out_SBH: Tensor) -> Tensor:
        with weights.scope:
            new_SBW: Tensor = _WriteStreams.apply(stream, out_SBH, weights.post_TN, weights.mix_TNN)
        return new_SBW

    def write_and_read(self, stream: Tensor, weights: _Writing, out_SBH: Tensor, norm: Norm) -> SublayerInput:
        new_SBW, inputs = self.write(stream, weights, out_SBH), (stream, out_SBH, weights.post_TN, weights.mix_TNN)
        with weights.scope:
            scope = self._saved_tensors.discard_output("mhc", written_streams, inputs, new_SBW)
        return self._read(new_SBW, norm, scope)

    def _read(self, stream: Tensor, norm: Norm, scope: DiscardScope) -> SublayerInput:
        """Reads the sublayer's input from the streams. `scope`: saved-tensor scope in which the streams are saved."""
        saved_tensors = self._saved_tensors
        with scope:
            stream, hidden_SBH, pre_TN, post_TN, mix_TNN = _ReadStreams.apply(
                stream, *self.parameters_of_streams, stream_weights, self.config
            )
            remake = saved_tensors.discard_output("mhc", weighted_sum, (stream, pre_TN.detach()), hidden_SBH)
            with remake:
                normed_SBH = norm(hidden_SBH)
                discard = saved_tensors.discard_output("layernorm", norm.unquantized, (hidden_SBH,), normed_SBH)
        return SublayerInput(stream, normed_SBH, discard, _Writing(post_TN, mix_TNN, scope))


class StreamsHead(_Projection):
    """Reduces several residual streams to one, before the final norm."""

    def __init__(self, config: HyperConnectionsConfig, hidden_size: int, resources: ModelResources) -> None:
        super().__init__(config.head_parameters(hidden_size, resources.ctx.config), resources)
        self.config = config

    def forward(self, stream: Tensor) -> Tensor:
        """[S, B, n H] -> [S, B, H]."""
        _, hidden_SBH, _ = _ReadStreams.apply(stream, *self.parameters_of_streams, head_weights, self.config)
        out_SBH: Tensor = hidden_SBH
        return out_SBH
