"""Muon: momentum whose matrices are orthogonalised (Jordan et al., https://kellerjordan.github.io/posts/muon), with the
options of Megatron-LM.

For a matrix with gradient G: m = beta m + (1 - beta) G; u = m, or with Nesterov momentum (1 - beta) G + beta m; the
weights move by -lr * scale * O. Newton-Schulz iterations approximate O = U V^T, where u = U S V^T is the singular value
decomposition. Weight decay is decoupled. Every expert of a stack is a matrix, and so are the q, k and v parts of a
projection. A matrix is owned by one data-parallel rank, because the iterations need all of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod, sqrt
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_moe.config.optimizer import MuonConfig, OptimizerConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.update_rules import MOST_BATCHED_ELEMENTS
from megatron_moe.kernels.ops import Kernels, internal_dtype
from megatron_moe.kernels.update_ops import MatrixStep
from megatron_moe.optim.param_slices import ParamSlice
from megatron_moe.optim.state import StepScalars, UpdateOperands
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ProcessGroup

Coefficients = tuple[float, float, float]
_SIMPLE = (3.4445, -4.7750, 2.0315)
COEFFICIENTS = MappingProxyType(
    {
        "simple": (_SIMPLE,),
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        # arXiv 2505.16932, with its safety factor 1.01
        "polar_express": (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        # arXiv 2506.10935
        "cans": (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        "aol": (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        "cubic5": (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        "deepseekv4": (_SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2,
    }
)
"""Value of `--muon-coefficient-type` -> (a, b, c) of each iteration X <- a X + (b A + c A^2) X with A = X X^T."""
_REPEATS_LAST = ("polar_express", "cans", "deepseekv4")
"""Coefficient sets whose last entry is repeated if there are more iterations. Other sets are repeated from their first
entry."""
_EPS = 1e-15


class Muon:
    """Update rule for matrices. The fallback rule updates all other parameters, including embeddings, the output layer
    and matrices with `ParamMeta.mixed_rows`."""

    def __init__(self, config: OptimizerConfig, precision: PrecisionConfig) -> None:
        self._config = config.muon
        self._coefficients = newton_schulz_coefficients(
            self._config.muon_coefficient_type, self._config.muon_num_ns_steps
        )
        self._dtype = None if self._config.muon_fp32_matmul_prec == "high" else torch.bfloat16
        """Dtype of the matmul operands; None means the dtype of the momentum, as in fp64 runs."""
        if precision.main_params_dtype == "fp64":
            self._dtype = None

    def step(self, scalars: StepScalars, operands: UpdateOperands, kernels: Kernels) -> None:
        """Updates weights, master weights and momentum of whole matrices in place (`UpdateRule.step`)."""
        move = MatrixStep(
            lr=scalars.lr_of(operands.buffer_key),
            weight_decay=scalars.weight_decay_of(operands.buffer_key),
            grad_scale=scalars.grad_scale,
            apply_update=scalars.apply_update,
            nonfinite=scalars.nonfinite,
        )
        for params in self._batches(operands.param_slices):
            self._step(scalars, operands, params, move, kernels)

    def _batches(self, params: Iterable[ParamSlice]) -> Iterator[list[ParamSlice]]:
        """Yields slices whose matrices are orthogonalised together, because they have the same shape and shards."""
        open_batches: dict[object, list[ParamSlice]] = {}
        for whole in params:
            for param in whole.chunks(MOST_BATCHED_ELEMENTS):
                key = param.shape, param.whole_shape, param.meta.tp_dim, param.meta.splits, self._splits(param)
                batch = open_batches.setdefault(key, [])
                number = sum(each.num_matrices for each in (*batch, param))
                if batch and number * prod(param.whole_shape) > MOST_BATCHED_ELEMENTS:
                    yield open_batches.pop(key)
                open_batches.setdefault(key, []).append(param)
        yield from open_batches.values()

    def _step(
        self,
        scalars: StepScalars,
        operands: UpdateOperands,
        params: Sequence[ParamSlice],
        move: MatrixStep,
        kernels: Kernels,
    ) -> None:
        """Updates a batch of matrices of equal shape."""
        config, updates = self._config, []
        for param in params:
            momentum = operands.values("momentum", param)
            dtype = self._dtype or momentum.dtype
            flat = operands.grad(param).flatten(), momentum.flatten()
            update = kernels.momentum_(*flat, config.muon_momentum, move, dtype, nesterov=config.muon_nesterov)
            updates.append(update.view(momentum.shape))
        update = updates[0] if len(updates) == 1 else torch.cat(updates)
        del updates  # the iterations need the memory
        orthogonal = self._orthogonal(params[0], update, kernels)
        for param, own in zip(params, orthogonal.split([each.num_matrices for each in params]), strict=True):
            direction, factor = self._scaled(param, self.adapt_direction(scalars, operands, param, own))
            stored, weights = operands.stored_master(param)
            kernels.apply_direction_(stored, direction.flatten(), factor, move, weights)

    def adapt_direction(
        self, scalars: StepScalars, operands: UpdateOperands, param: ParamSlice, orthogonal: Tensor
    ) -> Tensor:
        """Returns the unscaled direction of the update. Subclasses override it and store their additional state."""
        return orthogonal

    def _orthogonal(self, param: ParamSlice, update: Tensor, kernels: Kernels) -> Tensor:
        """Orthogonalises sharded matrices. `update`: this rank's shards, [n, rows, columns]; returns this rank's shards
        of the results."""
        mode = self._mode(param)
        if mode == "duplicated":
            return param.shard_of(self._of_parts(param, param.gathered(update), kernels))
        return self._of_parts(param, update, kernels, param.shards if mode == "distributed" else None)

    def _of_parts(
        self, param: ParamSlice, matrices: Tensor, kernels: Kernels, shards: ProcessGroup | None = None
    ) -> Tensor:
        """Orthogonalises each part of the matrices. `shards`: group over which the matrices are sharded."""
        made = []
        for part in self._parts(param, matrices):
            # the Gram matrix is summed over the sharded dim
            tall = part.shape[-2] > part.shape[-1] if shards is None else param.meta.tp_dim == 0
            made.append(newton_schulz(part, self._coefficients, kernels, tall=tall, shards=shards))
        return param.join(made) if len(made) > 1 else made[0]

    def _scaled(self, param: ParamSlice, shard: Tensor) -> tuple[Tensor, float]:
        """Returns (direction, factor) of a shard, whose parts are multiplied by the scale of their whole matrix."""
        shape = param.shape if self._mode(param) == "blockwise" else param.whole_shape
        parts = self._parts(param, shard.new_empty(1, 1, 1).expand(1, *shape))
        scales = [update_scale(self._config, *part.shape[-2:]) for part in parts]
        if len(parts) == 1:
            return shard, scales[0]
        factors = param.join([torch.full_like(part, scale) for part, scale in zip(parts, scales, strict=True)])
        return shard * (factors if param.shape == factors.shape[-2:] else param.shard_of(factors)), 1.0

    def _parts(self, param: ParamSlice, matrices: Tensor) -> list[Tensor]:
        """Parts of the matrices that are orthogonalised separately."""
        return param.split(matrices) if self._splits(param) else [matrices]

    def _splits(self, param: ParamSlice) -> bool:
        return self._config.muon_split_qkv and param.name.endswith("linear_qkv.weight")

    def _mode(self, param: ParamSlice) -> str:
        if not param.is_sharded:
            return "blockwise"
        return "duplicated" if self._splits(param) and param.meta.even_shards else self._config.muon_tp_mode


def newton_schulz_coefficients(name: str, num_steps: int) -> list[Coefficients]:
    """Coefficients (a, b, c) of each of `num_steps` Newton-Schulz iterations; `name` is a key of `COEFFICIENTS`."""
    table = COEFFICIENTS[name]
    if name in _REPEATS_LAST:
        return [table[min(step, len(table) - 1)] for step in range(num_steps)]
    return [table[step % len(table)] for step in range(num_steps)]


def update_scale(config: MuonConfig, rows: int, columns: int) -> float:
    """Factor of the update of a matrix with `rows` outputs and `columns` inputs."""
    scales = {
        "spectral": sqrt(max(rows, columns)),
        "unit_rms_norm": sqrt(rows / columns),
        "shape_scaling": sqrt(max(1, rows / columns)),
    }
    return scales[config.muon_scale_mode] * config.muon_extra_scale_factor


def newton_schulz(
    x: Tensor,
    coefficients: Sequence[Coefficients],
    kernels: Kernels,
    *,
    tall: bool = False,
    shards: ProcessGroup | None = None,
) -> Tensor:
    """Approximates U V^T of matrices x = U S V^T, [n, rows, columns], in the dtype of x.

    Args:
        tall: computes the Gram matrix x^T x instead of x x^T, which is smaller if x has more rows than columns.
        shards: group over which the dim that the Gram matrix sums over is sharded; None if `x` is not sharded.
    """
    wide = internal_dtype(x.dtype)
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    if shards is not None:
        # collective over tp or etp: one scalar per matrix
        norms = all_reduce_(norms.square(), shards).sqrt()
    y = torch.div(x, norms.clamp(min=_EPS), out=torch.empty_like(x))
    for a, b, c in coefficients:
        gram = kernels.syrk(y.mT if tall else y)
        if shards is not None:
            # collective over tp or etp: one Gram matrix per matrix
            all_reduce_(gram, shards)
        polynomial = kernels.syrk(gram, gram, b, c)
        y = torch.baddbmm(y, *((y, polynomial) if tall else (polynomial, y)), beta=a)
    return y
