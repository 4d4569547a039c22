"""Manifold-constrained hyper-connections: several residual streams with learned connections (DeepSeek-V4)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_moe.config.component import MegatronName, NameRule, ParamSpec
from megatron_moe.config.costs import ActivationSizes, SavedActivation, saved_tensor
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.residual import ResidualConfig

MAX_SHARES, TOKENS_PER_SHARE = 6, 256
"""Maximum number of partial gradients of the projection matrix, in fp32, that the kernels write, and the minimum number
of tokens of each but the last."""


@dataclass(frozen=True, kw_only=True)
class HyperConnectionsConfig(ResidualConfig):
    """Manifold-constrained hyper-connections (arXiv 2512.24880).

    For the streams X [n, H] of a token and the sublayer F, with r = 1 / sqrt(mean(X^2) + norm_eps):

        h = (W flatten(X)) r scale + bias, split into n, n and n^2 values; each part has its own scale
        pre = sigmoid(h_1) + eps, post = 2 sigmoid(h_2), mix = sinkhorn(h_3), which is doubly stochastic
        X_k <- sum_j mix[j, k] X_j + post[k] F(norm(sum_j pre[j] X_j))

    The head before the final norm is sum_j pre[j] X_j with parameters of its own. All of this is computed in
    promote(fp32, dtype).
    """

    module: ClassVar[str] = "megatron_moe.model.hyper_connections:HyperConnection"
    head_module: ClassVar[str] = "megatron_moe.model.hyper_connections:StreamsHead"
    submodule: ClassVar[str] = "hyper_connection"
    megatron_names: ClassVar[Mapping[str, MegatronName]] = MappingProxyType(
        {"scale": ("alpha_pre", "alpha_post", "alpha_res")}
    )
    head_megatron_names: ClassVar[Mapping[str, MegatronName]] = MappingProxyType(
        {"mapping_proj.weight": "hc_head_fn", "scale": "hc_head_scale", "bias": "hc_head_base"}
    )

    num_streams: int = 4
    """Number of residual streams (`--num-residual-streams`)."""
    sinkhorn_iterations: int = 20
    """Number of normalisations of rows and columns of the mixing matrix."""
    init_gating_factor: float = 0.01
    """Initial value of the scales."""
    norm_eps: float = 1e-6
    """Constant added to the mean square of the streams (`--norm-epsilon`)."""
    eps: float = 1e-6
    """Constant added to gates and to sums of rows and columns."""

    def as_flags(self) -> Mapping[str, Any]:
        return {
            "enable_hyper_connections": True,
            "num_residual_streams": self.num_streams,
            "mhc_sinkhorn_iterations": self.sinkhorn_iterations,
        }

    @property
    def num_weights(self) -> int:
        """Number of mixing coefficients per token of one connection: n for the sublayer's input, n for its output and
        n^2 between streams."""
        return self.num_streams * (2 + self.num_streams)

    def parameters(self, hidden_size: int, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        return self._projection(hidden_size, self.num_weights, 3, parallel)

    def head_parameters(self, hidden_size: int, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        return self._projection(hidden_size, self.num_streams, 1, parallel)

    def _projection(
        self, hidden_size: int, num_weights: int, num_scales: int, parallel: ParallelConfig
    ) -> Iterator[ParamSpec]:
        """Parameter specs of the projection from the residual streams to the mixing coefficients: matrix, scales and
        biases."""
        width, partial = self.num_streams * hidden_size, parallel.sequence_parallel
        matrix = ParamMeta(role="matrix", fan_in=width, partial_over_tp=partial)
        bias = ParamMeta(role="bias", init="zeros", decay=False, partial_over_tp=partial)
        scale = ParamMeta(
            role="vector", init="constant", constant=self.init_gating_factor, decay=False, partial_over_tp=partial
        )
        for name, shape, meta in (
            ("mapping_proj.weight", (num_weights, width), matrix),
            ("scale", (num_scales,), scale),
            ("bias", (num_weights,), bias),
        ):
            yield ParamSpec(name=name, shape=shape, meta=meta, counted="connections")

    def saved_tensors(
        self, module: str, hidden_size: int, sizes: ActivationSizes, *, is_first: bool, offloaded_by: str
    ) -> Iterator[SavedActivation]:
        tokens, n, size = sizes.residual, self.num_streams, sizes.activation_itemsize
        marks: dict[str, Any] = {"offloaded_by": offloaded_by, "recomputed_by": () if is_first else ("mhc",)}
        yield saved_tensor(module, "streams", "T nH", tokens * n * hidden_size, size, marks)
        # projection of the streams, its norm, and mixing coefficients
        yield saved_tensor(
            module, "stream weights", "T n(n+2)", tokens * (2 * self.num_weights + 1), sizes.internal_itemsize
        )
        yield saved_tensor(module, "written output", "T H", tokens * hidden_size, size)

    def input_fields(self) -> Mapping[str, Any]:
        return {"recomputed_by": ("mhc",)}

    def head_tensors(self, module: str, hidden_size: int, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        tokens, n = sizes.residual, self.num_streams
        yield saved_tensor(module, "streams", "T nH", tokens * n * hidden_size, sizes.activation_itemsize)
        yield saved_tensor(module, "stream weights", "T 2n", tokens * (2 * n + 1), sizes.internal_itemsize)

    def backward_workspace(self, hidden_size: int, sizes: ActivationSizes) -> float:
        # gradients of the streams before and after the connection, and of the sublayer's input or output
        width, tokens = self.num_streams * hidden_size, sizes.residual
        gradients = tokens * (2 * width + hidden_size) * sizes.activation_itemsize
        # gradients of coefficients, projection and mean square, and partial gradients of the projection matrix
        shares = min(MAX_SHARES, -(-tokens // TOKENS_PER_SHARE)) * self.num_weights * width
        return float(gradients + (tokens * (2 * self.num_weights + 1) + shares) * sizes.internal_itemsize)

    def name_rules(self, sublayer: str, model_type: str) -> Iterator[NameRule]:
        return _names("hc_attn" if sublayer == "self_attention" else "hc_ffn")

    def head_name_rules(self, model_type: str) -> Iterator[NameRule]:
        return _names("hc_head")


def _names(prefix: str) -> Iterator[NameRule]:
    """Hugging Face names of the projection of one connection."""
    for name, suffix in (("mapping_proj.weight", "fn"), ("scale", "scale"), ("bias", "base")):
        yield NameRule(name, (f"{prefix}_{suffix}",))
