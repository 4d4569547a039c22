"""Low-precision GEMM operands of linear layers: quantisation of inputs, weights and output gradients."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.precision import LowPrecisionConfig, OperandFormat
from megatron_moe.config.registry import ELEMENTS
from megatron_moe.precision.expert_rows import largest_magnitude
from megatron_moe.precision.quantized_tensor import QuantizedTensor
from megatron_moe.precision.stored_weight import StoredWeight

_INPUT, _WEIGHT, _GRAD = range(3)
_OVERFLOWING = 2.0**64
"""Smallest magnitude whose square overflows in fp32."""


class Quantizers(Protocol):
    """Kernel ops that quantise operands of FP8 and FP4 GEMMs, inherited by `Kernels`."""

    def quantize_rows(
        self,
        x: Tensor,
        fmt: OperandFormat,
        *,
        rowwise: bool,
        columnwise: bool,
        offsets_e: Tensor | None = None,
        scale: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantises inputs or output gradients [R, C] of linear layers. `rowwise`, `columnwise`: requested copies.

        With `offsets_e` (end of each expert's rows), the rows of each expert are quantised separately; rows from
        `offsets_e[-1]` on may have any content and do not affect other rows. `scale`: given scale, by which elements
        are multiplied, of a format with one scale per tensor, fp32 [] or [e]; None if it is computed from the tensor.
        `seed`: seed of stochastic rounding, int64 [] on the device; required by formats that use it."""

    def quantize_weight(
        self,
        weight: Tensor,
        fmt: OperandFormat,
        *,
        columnwise: bool,
        scale: Tensor | None = None,
        out: QuantizedTensor | None = None,
    ) -> QuantizedTensor:
        """Quantises a weight [O, I], or a stack of weights [e, O, I]. The rowwise copy is always made. `scale`: as in
        `quantize_rows`, fp32 [] or [e]. `out`: result for an equal shape and format, which is overwritten and returned;
        None allocates the result."""

    def transpose_weight(self, data: Tensor) -> Tensor:
        """Transposes the bytes of a weight: FP8 [..., O, I] -> contiguous [..., I, O], or packed E2M1 elements uint8
        [..., O, I / 2] -> [..., I, O / 2]."""


class DelayedScaling:
    """Scales of one linear layer for delayed scaling: each is computed from the magnitudes of earlier steps.

    There are three scales, of input, weight and output gradient, or three per expert of the model. All microbatches of
    a step use the same scales, so recomputed operands are equal. The magnitudes of a step, over all ranks of the
    pipeline stage, enter the history at its end. (Transformer Engine updates scales after every microbatch.)
    """

    def __init__(self, config: LowPrecisionConfig, device: torch.device, num_experts: int | None, first: int) -> None:
        """`num_experts`: number of experts of the model; None for a layer that is not the experts. `first`: index of
        this rank's first expert; unused without experts."""
        shape = (3,) if num_experts is None else (3, num_experts)
        self.scales = torch.ones(shape, device=device)
        """Factor by which operands are multiplied before the cast, fp32 [3] or [3, E]."""
        self.history = torch.zeros(config.amax_history_len, *shape, device=device)
        """Largest magnitudes per step, newest first."""
        self.amax = torch.zeros(shape, device=device)
        """Largest magnitudes of this step on this rank."""
        self._uses_max = config.amax_compute_algo == "max"
        forms = (config.inputs, config.weights, config.grads)
        largest = torch.tensor([ELEMENTS.get(fmt.element).largest for fmt in forms], device=device) / 2.0**config.margin
        self._largest = largest if num_experts is None else largest[:, None]
        self._first = first

    def operand_scale(self, role: int, amax: Tensor, record: bool) -> Tensor:
        """Scale of an operand, [] or [e]; `amax`: its largest magnitudes, which are recorded if `record`.

        Elements that exceed the format's range with this scale saturate. The scale is nan, which makes the step fail,
        if the square of a magnitude is not finite in fp32: the norm of such a gradient overflows in bf16 too."""
        local = slice(self._first, self._first + len(amax)) if amax.dim() else ...
        if record:
            recorded = self.amax[role][local]
            torch.maximum(recorded, amax, out=recorded)
        return torch.where(amax < _OVERFLOWING, self.scales[role][local], torch.nan)

    def update(self, apply_update: Tensor) -> None:
        """Adds `amax`, reduced over the ranks, to the history and computes new scales. A magnitude of 0, for example of
        an expert without tokens, leaves history and scale unchanged. `apply_update`: bool scalar on the device; False:
        nothing changes, because the step was not applied."""
        history = torch.where(self.amax > 0, torch.cat([self.amax[None], self.history[:-1]]), self.history)
        amax = history.amax(dim=0) if self._uses_max else history[0]
        scales = (self._largest / amax).clamp(max=torch.finfo(torch.float32).max)
        scales = torch.where((amax > 0) & amax.isfinite(), scales, self.scales)
        self.history.copy_(torch.where(apply_update, history, self.history))
        self.scales.copy_(torch.where(apply_update, scales, self.scales))


class LinearQuantizer:
    """Quantises the GEMM operands of one linear layer, or of one stack of expert layers, and caches its weight.

    The weight is quantised by the first forward of a step and reused by all later microbatches and by recompute, until
    `invalidate_weight`. Its copies, the scales of delayed scaling and the seed of stochastic rounding are at fixed
    addresses, so that replayed CUDA graphs read current values.
    """

    def __init__(
        self,
        config: LowPrecisionConfig,
        kernels: Quantizers,
        *,
        name: str = "",
        save_input: bool = False,
        delayed: DelayedScaling | None = None,
        device: torch.device | None = None,
        stores_weight: bool = False,
    ) -> None:
        """
        Args:
            name: global name of the layer, which stochastic rounding uses as its key.
            save_input: True saves the unquantised input for backward, which then makes the columnwise copy; False saves
            the columnwise copy.
            delayed: scales of delayed scaling; None for the other recipes.
            device: device of the layer; None means the CPU.
            stores_weight: stores the weight's quantised bytes instead of its values, if its format allows it.
        """
        self.name = name
        self.weight_grad = config.weight_grad
        """Whether the weight gradient is computed from quantised copies."""
        self.stores_activation_input = config.activation_inputs and bool(config.fused_block)
        """Whether the activation before this layer saves its input in low precision."""
        self.save_input = save_input or not config.weight_grad
        self.delayed = delayed
        self._config = config
        self._kernels = kernels
        self._stores_weight = stores_weight
        self._seed = torch.zeros((), dtype=torch.int64, device=device) if config.grads.stochastic else None
        """Seed of this step's stochastic rounding, the same on all ranks."""
        self._weight: QuantizedTensor | None = None
        self._is_current = False
        """Whether `_weight` is up to date with the weight."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Tensors that checkpoints contain, by buffer name."""
        if self.delayed is None:
            return {}
        return {"fp8_scales": self.delayed.scales, "fp8_amax_history": self.delayed.history}

    def new_storage(self, weight: Tensor) -> StoredWeight | None:
        """Creates the quantised storage of the weight, which the optimizer fills; None if the weight is stored in its
        dtype."""
        if not self._stores_weight or not self._config.weights.can_store_weights(weight.shape[-1]):
            return None
        scale = None if self.delayed is None else self.delayed_weight_scale
        return StoredWeight(tuple(weight.shape), self._config.weights, weight.dtype, scale)

    def begin_step(self, *step: int) -> None:
        """Begins a step. `step`: numbers that identify the step; they are part of the key of stochastic rounding."""
        if self._seed is not None:
            key = repr((self.name, step)).encode()
            self._seed.fill_(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1)
        # the cached copy may be from an evaluation, which does not record amax for delayed scaling
        self.invalidate_weight()
        if self.delayed is not None:
            self.delayed.amax.zero_()

    def invalidate_weight(self) -> None:
        """Invalidates the cached quantised weight, so that its next use quantises it again. Called after the weights
        have changed."""
        self._is_current = False

    def quantize_input(
        self,
        x: Tensor,
        *,
        rowwise: bool = True,
        columnwise: bool = False,
        offsets_e: Tensor | None = None,
        record: bool = True,
    ) -> QuantizedTensor:
        """Quantises an input [R, I]; with `offsets_e`, rows sorted by expert. `rowwise`, `columnwise`: copies to make.
        `record`: adds the largest magnitude to the amax of delayed scaling; `record` is False in evaluation."""
        return self._kernels.quantize_rows(
            x,
            self._config.inputs,
            rowwise=rowwise,
            columnwise=columnwise,
            offsets_e=offsets_e,
            scale=self._scale(_INPUT, lambda: largest_magnitude(x, offsets_e), record),
        )

    @property
    def fused_block(self) -> int | None:
        """See `LowPrecisionConfig.fused_block`."""
        return self._config.fused_block

    def can_fuse_activation(self, activation: ActivationConfig, weight: Tensor) -> bool:
        """Whether an activation can quantise its result for this layer, and its gradient for the layer before it. No
        block of the gradient may contain channels of both halves of a gated activation."""
        return bool(self.fused_block) and (not activation.gated or weight.shape[-1] % (self.fused_block or 1) == 0)

    @property
    def formats(self) -> tuple[OperandFormat, OperandFormat]:
        """Returns (format of inputs, format of output gradients)."""
        return self._config.inputs, self._config.grads

    def quantize_weight(self, weight: Tensor) -> QuantizedTensor:
        """Quantised weight [O, I] or [e, O, I] of this step: both copies, or the rowwise copy of a `StoredWeight`."""
        if self._weight is not None and self._is_current:
            return self._weight
        stored = _stored(weight)
        if stored is not None:
            self._scale(_WEIGHT, lambda: stored.amax, True)
            self._weight = stored.operand()
        else:
            scale = self._scale(_WEIGHT, lambda: weight.detach().abs().amax(dim=(-2, -1)).float(), True)
            fmt, out = self._config.weights, self._weight
            self._weight = self._kernels.quantize_weight(weight.detach(), fmt, columnwise=True, scale=scale, out=out)
        self._is_current = True
        return self._weight

    def with_columnwise(self, weight: Tensor, weight_q: QuantizedTensor) -> QuantizedTensor:
        """Adds the columnwise copy, which the input gradient reads, to `weight_q`, a result of `quantize_weight`."""
        stored = _stored(weight)
        return weight_q if stored is None else stored.with_columns(self._kernels.transpose_weight)

    def delayed_weight_scale(self, amax: Tensor) -> Tensor:
        """Weight scale of the recipe "delayed", [], or [e] for experts; does not add `amax` to the history."""
        assert self.delayed is not None, "scales of the other recipes depend on the weight"
        return self.delayed.operand_scale(_WEIGHT, amax, record=False)

    def quantize_grad(
        self, grad: Tensor, *, rowwise: bool, columnwise: bool, offsets_e: Tensor | None = None
    ) -> QuantizedTensor:
        """Quantises an output gradient [R, O]; with `offsets_e`, rows sorted by expert."""
        return self._kernels.quantize_rows(
            grad,
            self._config.grads,
            rowwise=rowwise,
            columnwise=columnwise,
            offsets_e=offsets_e,
            scale=self._scale(_GRAD, lambda: largest_magnitude(grad, offsets_e), True),
            seed=self._seed,
        )

    def _scale(self, role: int, amax: Callable[[], Tensor], record: bool) -> Tensor | None:
        return None if self.delayed is None else self.delayed.operand_scale(role, amax(), record)


def _stored(weight: Tensor) -> StoredWeight | None:
    return getattr(weight, "stored", None)


class ModelQuantizers:
    """Low-precision state of all linear layers of this rank."""

    def __init__(self, layers: Sequence[LinearQuantizer], seed: int, reduce_max: Callable[[Tensor], object]) -> None:
        """`reduce_max`: reduces a tensor in place to its maximum over the ranks of this pipeline stage."""
        self.layers = tuple(layers)
        self._seed, self._reduce_max = seed, reduce_max

    def begin_step(self, iteration: int) -> None:
        for layer in self.layers:
            layer.begin_step(self._seed, iteration)

    def invalidate_weights(self) -> None:
        """Marks all quantised weights as outdated. Must be called after the weights have changed."""
        for layer in self.layers:
            layer.invalidate_weight()

    def end_step(self, apply_update: Tensor) -> None:
        """Computes new scales for delayed scaling. They do not change if `apply_update`, a bool scalar on the
        device, is False. Collective over the pipeline stage: 12 bytes per layer or expert."""
        delayed = [layer.delayed for layer in self.layers if layer.delayed is not None]
        if not delayed:
            return
        flat = torch.cat([each.amax.flatten() for each in delayed])
        self._reduce_max(flat)
        for each, amax in zip(delayed, flat.split([each.amax.numel() for each in delayed]), strict=True):
            each.amax.copy_(amax.view_as(each.amax))
            each.update(apply_update)
