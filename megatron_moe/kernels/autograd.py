"""Autograd functions of linear layers, grouped linear layers and embeddings, with weight gradient accumulation."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.precision import OperandFormat
from megatron_moe.kernels.ops import GroupedPart, Kernels, MatrixOperand, RowIndex, internal_dtype
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.parameter import BatchedWeightGrad, GradAccumulator
from megatron_moe.parallel.sequence_shards import LayerCollectives, PendingGather
from megatron_moe.precision.carried_copies import QuantizedGrad, carried_copy, carried_grad, plain_grad, without_copy
from megatron_moe.precision.linear_quantizer import LinearQuantizer
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor


class ShardedInput(NamedTuple):
    """Sequence-parallel input of `linear`. Only the shard is saved for backward, which gathers it again."""

    shard: Tensor
    """This tensor-parallel rank's shard of the input, [S / tp, B, I]."""
    gather: Callable[[Tensor], Tensor]
    """All-gathers the shard to [S, B, I]; not recorded by autograd."""


class ExpertRows(NamedTuple):
    """Rows of tokens sorted by expert, which `activation_linear` processes."""

    offsets_e: Tensor
    """Index after the last row of each expert, int [e]."""
    probs_R: Tensor | None
    """Probability by which each row is multiplied, [R]; None means that rows are not multiplied."""
    sums: RowIndex | None
    """Index of the rows of each token, by which the output rows of a token are summed (see `Kernels.unpermute`). If
    None, the output has one row per expert row."""
    num_tokens: int


def linear(
    kernels: Kernels,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sharded: ShardedInput | None = None,
    quantizer: LinearQuantizer | None = None,
) -> Tensor:
    """Linear layer: x [..., I], weight [O, I], bias [O] -> [..., O].

    The weight gradient is added to `weight.grad_accumulator` if it is set, and otherwise returned to autograd. With
    `sharded`, x must be the gathered tensor, and only its shard is saved for backward. With `quantizer`, the GEMMs
    multiply quantised operands.
    """
    if quantizer is None:
        out: Tensor = _LinearFunction.apply(kernels, x, weight, bias, sharded)
    else:
        saves = torch.is_grad_enabled()
        keeps_copy = saves and sharded is None and not quantizer.save_input
        options = (sharded, quantizer, saves, keeps_copy)
        out = _QuantizedLinear.apply(kernels, x, weight, bias, *options)
    return out


def linears_of_shard(
    kernels: Kernels, shard: Tensor, collectives: LayerCollectives, *layers: tuple[Tensor, Tensor | None]
) -> list[Tensor]:
    """Linear layers that share a sequence-parallel input [S / tp, ..., I]. `layers` are (weight, bias); returns one
    output [S, ..., O] per layer. Forward gathers the input, and backward gathers it again and reduce-scatters its
    gradient, each once for all layers."""
    parameters = [parameter for layer in layers for parameter in layer]
    return list(_LinearsOfShard.apply(kernels, shard, collectives, *parameters))


def linear_to_shard(kernels: Kernels, x: Tensor, weight: Tensor, collectives: LayerCollectives) -> Tensor:
    """Row-parallel linear layer: x [S, ..., I / tp], weight [O, I / tp] -> this rank's shard [S / tp, ..., O] of the
    sum over ranks. The gradient is gathered in backward."""
    return _LinearToShard.apply(kernels, x, weight, collectives)


def grouped_linear(
    kernels: Kernels,
    rows: Tensor,
    weight: Tensor,
    offsets_e: Tensor,
    index: RowIndex | None = None,
    *,
    quantizer: LinearQuantizer | None = None,
    rows_q: QuantizedTensor | None = None,
) -> Tensor:
    """Grouped GEMM of rows [R, I] and expert weights [e, O, I] -> [R, O]; multiplies each row by its expert's weight.

    Rows are sorted by expert. Beyond row `offsets_e[-1]`, the result and the gradient of `rows` are undefined. With
    `index`, `rows` are unpermuted tokens [T, I]; only these are saved, because backward permutes them again. With
    `quantizer`, the GEMMs multiply quantised operands; `rows_q`: the rowwise copy of `rows`, if it exists.
    """
    if quantizer is None:
        out: Tensor = _GroupedLinearFunction.apply(kernels, rows, weight, offsets_e, index)
    else:
        options = (index, quantizer, rows_q, torch.is_grad_enabled())
        out = _QuantizedGroupedLinear.apply(kernels, rows, weight, offsets_e, *options)
    return out


def activation_linear(
    kernels: Kernels,
    x: Tensor,
    weight: Tensor,
    activation: ActivationConfig,
    quantizer: LinearQuantizer,
    producer: LinearQuantizer | None = None,
    rows: ExpertRows | None = None,
) -> Tensor:
    """Linear layer of activation(x, probs) with quantised operands; x is [..., F], or [..., 2F] if the activation is
    gated. With `rows`, a grouped GEMM of rows [R, F] or [R, 2F]. Equals `linear` or `grouped_linear` of
    `Kernels.activation`, but the activation's result is quantised directly and not saved.

    Backward recomputes the activation. The gradient of x is a `QuantizedGrad` for the layer that computed x, whose
    quantizer is `producer`; it has no unquantised values if expert weight gradients are quantised. With
    `quantizer.stores_activation_input`, the rowwise copy of x is saved instead of x. Requires
    `quantizer.can_fuse_activation(activation, weight)`.
    """
    offsets_e, probs_R = (None, None) if rows is None else (rows.offsets_e, rows.probs_R)
    arguments = (kernels, x, probs_R, weight, offsets_e, activation, quantizer, producer, rows)
    return _QuantizedActivationLinear.apply(*arguments)


def embedding(kernels: Kernels, ids: Tensor, weight: Tensor) -> Tensor:
    """Embedding lookup: rows `ids` (int64 [...]) of weight [V, H] -> [..., H]."""
    return _EmbeddingFunction.apply(kernels, ids, weight)


class _EmbeddingFunction(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.kernels, ctx.weight = kernels, weight
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), kernels = ctx.saved_tensors, ctx.kernels
        ids_T, grad_TH = ids.flatten(), grads[0].flatten(0, -2)

        def compute(out: Tensor, accumulate: bool) -> None:
            kernels.embedding_grad(grad_TH, ids_T, out, accumulate)

        return None, None, accumulate_grad(ctx.weight, compute) if ctx.needs_input_grad[2] else None


class _LinearFunction(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, sharded: ShardedInput | None
    ) -> Tensor:
        ctx.kernels, ctx.weight = kernels, weight
        ctx.gather = None if sharded is None else sharded.gather
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(without_copy(x) if sharded is None else sharded.shard.detach())
        return kernels.linear_forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        kernels, weight = ctx.kernels, ctx.weight
        grad_x = grad_weight = grad_bias = None
        # computed before the input gradient is allocated, so that the gathered input can be freed first
        if ctx.needs_input_grad[2]:
            (x,) = ctx.saved_tensors
            grad_weight = _dense_weight_grad(kernels, weight, grad, x if ctx.gather is None else ctx.gather(x))
            del x
        if ctx.needs_input_grad[1]:
            grad_x = kernels.linear_input_grad(grad, weight)
        if ctx.needs_input_grad[3]:
            grad_bias = _grad_of_bias(grad, ctx.bias_dtype)
        return None, grad_x, grad_weight, grad_bias, None


class _LinearsOfShard(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, shard: Tensor, collectives: LayerCollectives, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.kernels, ctx.collectives = kernels, collectives
        ctx.weights, ctx.biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(without_copy(shard))
        gathered = collectives.fprop.start_gather(shard, fills_own_rows=False)
        layers = zip(ctx.weights, ctx.biases, strict=True)
        gemms = [(partial(kernels.linear_forward, weight=weight, bias=bias), len(weight)) for weight, bias in layers]
        return tuple(_products(gathered, gemms))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernels, needed, (_, of_input, of_grad) = ctx.kernels, ctx.needs_input_grad, ctx.collectives
        (shard,), grad_shard = ctx.saved_tensors, None
        grad_parameters: list[Tensor | None] = [None] * (2 * len(grads))
        gathering = of_input.start_gather(shard) if any(needed[3::2]) else None
        grad_of_rows = partial(_grad_of_input, kernels, grads, ctx.weights)
        overlaps = of_input.overlaps or of_grad.overlaps
        if needed[1] and overlaps:
            scattering = of_grad.start_scatter(len(grads[0]), grad_of_rows)
        if gathering is not None:
            x = gathering.wait()
            for at, (grad, weight) in enumerate(zip(grads, ctx.weights, strict=True)):
                if needed[3 + 2 * at]:
                    grad_parameters[2 * at] = _dense_weight_grad(kernels, weight, grad, x)
            del x, gathering
        for at, (grad, bias) in enumerate(zip(grads, ctx.biases, strict=True)):
            if needed[4 + 2 * at]:
                grad_parameters[2 * at + 1] = _grad_of_bias(grad, bias.dtype)
        if needed[1]:
            if not overlaps:  # the gathered input has been freed by now
                scattering = of_grad.start_scatter(len(grads[0]), grad_of_rows)
            grad_shard = scattering()
        return None, grad_shard, None, *grad_parameters


class _LinearToShard(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor, collectives: LayerCollectives) -> Tensor:
        ctx.kernels, ctx.weight, ctx.collectives = kernels, weight, collectives
        ctx.save_for_backward(without_copy(x))
        return collectives.fprop.start_scatter(len(x), lambda rows: kernels.linear_forward(x[rows], weight, None))()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), kernels, weight = ctx.saved_tensors, ctx.kernels, ctx.weight
        gathered, grad_x, grad_weight = ctx.collectives.dgrad.start_gather(grads[0]), None, None
        if ctx.needs_input_grad[1]:
            (grad_x,) = _products(gathered, [(partial(kernels.linear_input_grad, weight=weight), weight.shape[1])])
        if ctx.needs_input_grad[2]:
            grad_weight = _dense_weight_grad(kernels, weight, gathered.wait(), x)
        return None, grad_x, grad_weight, None


def _products(gathered: PendingGather, gemms: Sequence[tuple[Callable[..., Tensor], int]]) -> list[Tensor]:
    """Results of GEMMs, given with their numbers of columns, of the rows of a tensor that is being gathered. Each part
    is multiplied as soon as it has arrived."""
    outs = list[Tensor]()
    for rows, part in gathered.parts:
        if len(part) == len(gathered.whole):
            return [gemm(part) for gemm, _ in gemms]
        if not outs:
            shape = len(gathered.whole), *part.shape[1:-1]
            outs = [part.new_empty(*shape, width) for _, width in gemms]
        for (gemm, _), out in zip(gemms, outs, strict=True):
            gemm(part, out=out[rows])
    return outs


def _grad_of_input(kernels: Kernels, grads: Sequence[Tensor], weights: Sequence[Tensor], rows: slice) -> Tensor:
    """Gradient of the given rows of an input that several linear layers share: the sum over the layers."""
    total = kernels.linear_input_grad(grads[0][rows], weights[0])
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total.flatten(0, -2).addmm_(grad[rows].flatten(0, -2), weight)
    return total


def _grad_of_bias(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.flatten(0, -2).sum(dim=0, dtype=internal_dtype(grad.dtype)).to(dtype)


class _GroupedLinearFunction(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, rows: Tensor, weight: Tensor, offsets_e: Tensor, index: RowIndex | None
    ) -> Tensor:
        ctx.kernels, ctx.weight, ctx.index = kernels, weight, index
        ctx.save_for_backward(offsets_e, rows)
        if index is not None:
            rows = kernels.permute(rows, index)
        return kernels.grouped_forward(rows, weight, offsets_e)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        kernels, weight, index = ctx.kernels, ctx.weight, ctx.index
        offsets_e, rows = ctx.saved_tensors
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_rows = kernels.grouped_input_grad(grad, weight, offsets_e)
            if index is not None:
                grad_rows = kernels.unpermute(grad_rows, index, len(rows))
        if ctx.needs_input_grad[2]:
            # the weight gradient may be delayed until after this backward and must not keep the graph of the rows alive
            rows = rows.detach() if index is None else kernels.permute(rows.detach(), index)
            part = GroupedPart(grad, rows, offsets_e)
            grad_weight = accumulate_grad(weight, BatchedWeightGrad(kernels.grouped_weight_grad, (part,)))
        return None, grad_rows, grad_weight, None, None


class _QuantizedLinear(AutogradFunction):
    """Autograd function of a linear layer with quantised operands. The input is quantised once in forward, the gradient
    once in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sharded: ShardedInput | None,
        quantizer: LinearQuantizer,
        saves: bool,
        keeps_copy: bool,
    ) -> Tensor:
        ctx.kernels, ctx.weight, ctx.quantizer = kernels, weight, quantizer
        ctx.gather = None if sharded is None else sharded.gather
        ctx.bias_dtype = None if bias is None else bias.dtype
        x_q = carried_copy(x, quantizer.formats[0], columnwise=keeps_copy)
        if x_q is None:
            x_q = quantizer.quantize_input(x.flatten(0, -2), columnwise=keeps_copy, record=saves)
        ctx.weight_q = quantizer.quantize_weight(weight)
        _save_input(ctx, x_q if keeps_copy else without_copy(x) if sharded is None else sharded.shard.detach())
        return kernels.linear_forward(x_q, ctx.weight_q, bias).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, kernels, weight, quantizer = plain_grad(grads[0]), ctx.kernels, ctx.weight, ctx.quantizer
        _, wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grad_RO = grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        low_weight_grad = wants_weight and quantizer.weight_grad
        grad_q = carried_grad(grads[0], quantizer.formats[1])
        if grad_q is None or low_weight_grad:  # one kernel makes the rowwise and the columnwise copy
            grad_q = quantizer.quantize_grad(grad_RO, rowwise=wants_x, columnwise=low_weight_grad)
        if wants_weight:  # computed before the input gradient, as in `_LinearFunction`
            x = _saved_input(ctx)
            if isinstance(x, Tensor):
                x = (x if ctx.gather is None else ctx.gather(x)).flatten(0, -2)
                if low_weight_grad:
                    x = quantizer.quantize_input(x, rowwise=False, columnwise=True)
            operand = grad_q.only_columnwise() if low_weight_grad else grad_RO
            grad_weight = _dense_weight_grad(kernels, weight, operand, x)
            del x, operand
        if wants_x:
            weight_q = quantizer.with_columnwise(weight, ctx.weight_q)
            grad_x = kernels.linear_input_grad(grad_q, weight_q).unflatten(0, grad.shape[:-1])
            del weight_q
        if wants_bias:
            grad_bias = _grad_of_bias(grad, ctx.bias_dtype)
        return None, grad_x, grad_weight, grad_bias, None, None, None, None


class _QuantizedGroupedLinear(AutogradFunction):
    """Autograd function of a grouped GEMM with quantised operands."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        rows: Tensor,
        weight: Tensor,
        offsets_e: Tensor,
        index: RowIndex | None,
        quantizer: LinearQuantizer,
        rows_q: QuantizedTensor | None,
        saves: bool,
    ) -> Tensor:
        ctx.kernels, ctx.weight, ctx.index, ctx.quantizer = kernels, weight, index, quantizer
        ctx.num_tokens = len(rows)
        keeps_copy = saves and index is None and not quantizer.save_input
        saved: Tensor | QuantizedTensor = rows
        if rows_q is not None:
            if keeps_copy:
                saved = quantizer.quantize_input(rows, rowwise=False, columnwise=True, offsets_e=offsets_e)
        elif index is not None and quantizer.fused_block:
            rows_q = kernels.quantize_permuted(rows, index, quantizer.formats[0])
        else:
            permuted = rows if index is None else kernels.permute(rows, index)
            rows_q = quantizer.quantize_input(permuted, columnwise=keeps_copy, offsets_e=offsets_e, record=saves)
            saved = rows_q if keeps_copy else rows
        ctx.weight_q = quantizer.quantize_weight(weight)
        _save_input(ctx, saved, offsets_e)
        return kernels.grouped_forward(rows_q, ctx.weight_q, offsets_e)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        kernels, index, quantizer = ctx.kernels, ctx.index, ctx.quantizer
        offsets_e, rows = ctx.saved_tensors[0], _saved_input(ctx, first=1)
        _, wants_rows, wants_weight, *_ = ctx.needs_input_grad
        grad_rows = grad_weight = None
        low_weight_grad = wants_weight and quantizer.weight_grad
        grad_q = carried_grad(grad, quantizer.formats[1])
        if grad_q is None or (low_weight_grad and grad_q.columnwise is None):
            grad_q = quantizer.quantize_grad(
                plain_grad(grad), rowwise=wants_rows, columnwise=low_weight_grad, offsets_e=offsets_e
            )
        if wants_rows:
            weight_q = quantizer.with_columnwise(ctx.weight, ctx.weight_q)
            grad_rows = kernels.grouped_input_grad(grad_q, weight_q, offsets_e)
            del weight_q
            if index is not None:
                grad_rows = kernels.unpermute(grad_rows, index, ctx.num_tokens)
        if wants_weight:
            operand: MatrixOperand | _Tokens = rows
            if isinstance(rows, Tensor):
                make = partial(_operand_of_rows, kernels, index=index, quantizer=quantizer, offsets_e=offsets_e)
                operand = _rows_or_tokens(ctx.weight, rows.detach(), index, make)
            part = grad_q.only_columnwise() if low_weight_grad else plain_grad(grad), operand, offsets_e
            grad_weight = accumulate_grad(
                ctx.weight, BatchedWeightGrad(partial(_grouped_weight_grad, kernels), (part,))
            )
        return None, grad_rows, grad_weight, *(None,) * 5


class _QuantizedActivationLinear(AutogradFunction):
    """Autograd function of an activation and the linear layer or grouped GEMM after it, with quantised operands."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        x: Tensor,
        probs_R: Tensor | None,
        weight: Tensor,
        offsets_e: Tensor | None,
        activation: ActivationConfig,
        quantizer: LinearQuantizer,
        producer: LinearQuantizer | None,
        rows: ExpertRows | None,
    ) -> Tensor:
        ctx.kernels, ctx.weight, ctx.activation, ctx.quantizer = kernels, weight, activation, quantizer
        ctx.sums = None if rows is None else rows.sums
        ctx.in_columns = ctx.has_reader = False
        if producer is not None and producer.formats[1] == quantizer.formats[1]:
            ctx.in_columns = rows is not None and producer.weight_grad and producer.formats == quantizer.formats
            # If the producer also needs a columnwise copy, one cast makes both.
            ctx.has_reader = ctx.in_columns or not producer.weight_grad
        ctx.x_form, saved = None, [x]
        if quantizer.stores_activation_input and ctx.needs_input_grad[1]:
            x_q = quantizer.quantize_input(x.flatten(0, -2))
            ctx.x_form, saved = (x_q.block, x.shape, x.dtype), [*x_q.row_copy[:2]]
        ctx.save_for_backward(offsets_e, probs_R, *saved)
        rows_q = kernels.quantize_activation(x.flatten(0, -2), probs_R, activation, quantizer.formats[0])
        ctx.weight_q = quantizer.quantize_weight(weight)
        if offsets_e is None:
            return kernels.linear_forward(rows_q, ctx.weight_q, None).unflatten(0, x.shape[:-1])
        out_RO = kernels.grouped_forward(rows_q, ctx.weight_q, offsets_e)
        return out_RO if rows is None or rows.sums is None else kernels.unpermute(out_RO, rows.sums, rows.num_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernels, quantizer = ctx.kernels, ctx.quantizer
        offsets_e, probs_R, *saved = ctx.saved_tensors
        grad, wants_weight = plain_grad(grads[0]).flatten(0, -2), ctx.needs_input_grad[3]
        low_weight_grad = wants_weight and quantizer.weight_grad
        columns_later = _stores_tokens(ctx.weight, len(grad), ctx.sums)
        if ctx.sums is None:
            grad_q = carried_grad(grads[0], quantizer.formats[1])
            if grad_q is None or low_weight_grad:
                grad_q = quantizer.quantize_grad(grad, rowwise=True, columnwise=low_weight_grad, offsets_e=offsets_e)
        else:  # one gather from the tokens per format
            columnwise = low_weight_grad and not columns_later
            grad_q = kernels.quantize_permuted(grad, ctx.sums, quantizer.formats[1], columnwise=columnwise)
        weight_q = quantizer.with_columnwise(ctx.weight, ctx.weight_q)
        if offsets_e is None:
            grad_RF = kernels.linear_input_grad(grad_q, weight_q)
        else:
            grad_RF = kernels.grouped_input_grad(grad_q, weight_q, offsets_e)
        del weight_q
        (inputs, fmt), x = quantizer.formats, saved[0]
        if ctx.x_form is not None:
            block, shape, dtype = ctx.x_form
            x = kernels.dequantize_rows(QuantizedTensor(QuantizedCopy(*saved), None, block, dtype)).view(shape)
        x_RF = x.flatten(0, -2)
        columns = inputs if ctx.in_columns and low_weight_grad else None
        found = kernels.quantize_activation_grad(
            grad_RF, x_RF, probs_R, ctx.activation, fmt, columns=columns, offsets_e=offsets_e
        )
        grad_x = None if found.grad_x_RF is None else found.grad_x_RF.view(x.shape)
        if ctx.has_reader:
            grad_x = QuantizedGrad(found.grad_x_q, fmt, x.shape, grad_x, kernels.dequantize_rows)
        grad_weight = None
        if wants_weight:
            rows = found.out_RF
            operand: Any = grad
            if ctx.sums is not None and (columns_later or not low_weight_grad):
                make = partial(_operand_of_grads, kernels, index=ctx.sums, fmt=fmt if low_weight_grad else None)
                operand = _rows_or_tokens(ctx.weight, grad, ctx.sums, make)
            elif low_weight_grad:
                operand = grad_q.only_columnwise()
            if low_weight_grad:
                if isinstance(rows, Tensor):
                    rows = quantizer.quantize_input(rows, rowwise=False, columnwise=True, offsets_e=offsets_e)

            def compute(out: Tensor, accumulate: bool) -> None:
                kernels.linear_weight_grad(operand, rows, out, accumulate)

            delayed = BatchedWeightGrad(partial(_grouped_weight_grad, kernels), ((operand, rows, offsets_e),))
            grad_weight = accumulate_grad(ctx.weight, compute if offsets_e is None else delayed)
        return None, grad_x, found.grad_probs_R, grad_weight, *(None,) * 5


class _Tokens(NamedTuple):
    """Operand of a delayed weight gradient that stores tokens instead of expert rows. The rows are gathered when the
    gradient is computed."""

    tokens: Tensor
    make: Callable[[Tensor], MatrixOperand]
    """Gathers the expert rows from the tokens and, for FP8 weight gradients, quantises them."""


def _stores_tokens(weight: Tensor, num_tokens: int, index: RowIndex | None) -> bool:
    """Whether the operand should be stored as tokens: the weight gradient may be computed in a later backward, and
    tokens take less memory than expert rows."""
    accumulator: GradAccumulator | None = getattr(weight, "grad_accumulator", None)
    if accumulator is None or index is None:
        return False
    return accumulator.defers_weight_grads and num_tokens < len(index.token_R)


def _rows_or_tokens(
    weight: Tensor, tokens: Tensor, index: RowIndex | None, make: Callable[[Tensor], MatrixOperand]
) -> MatrixOperand | _Tokens:
    """Operand of a weight gradient: the expert rows, or the tokens if `_stores_tokens`. Tokens are copied, because CUDA
    graphs overwrite them in a later microbatch."""
    return _Tokens(tokens.clone(), make) if _stores_tokens(weight, len(tokens), index) else make(tokens)


def _grouped_weight_grad(kernels: Kernels, parts: Sequence[Any], out: Tensor, accumulate: bool) -> None:
    """Computes an expert weight gradient from `parts`, tuples like `GroupedPart` whose operands may be `_Tokens`."""

    def gathered_operand(given: Any) -> Any:
        return given.make(given.tokens) if isinstance(given, _Tokens) else given

    kernels.grouped_weight_grad([GroupedPart(*map(gathered_operand, part)) for part in parts], out, accumulate)


def _operand_of_grads(kernels: Kernels, grad: Tensor, index: RowIndex, fmt: OperandFormat | None) -> MatrixOperand:
    """Operand of a grouped weight gradient from output gradients of tokens. `fmt`: format in which it is quantised, or
    None."""
    if fmt is None:
        return kernels.permute(grad, index)
    return kernels.quantize_permuted(grad, index, fmt, rowwise=False, columnwise=True)


def _operand_of_rows(
    kernels: Kernels, rows: Tensor, index: RowIndex | None, quantizer: LinearQuantizer, offsets_e: Tensor
) -> MatrixOperand:
    """Operand of a grouped weight gradient from the saved rows, or from the saved tokens if `index` is given."""
    if quantizer.weight_grad and quantizer.fused_block and index is not None:
        return kernels.quantize_permuted(rows, index, quantizer.formats[0], rowwise=False, columnwise=True)
    if index is not None:
        rows = kernels.permute(rows, index)
    if not quantizer.weight_grad:
        return rows
    return quantizer.quantize_input(rows, rowwise=False, columnwise=True, offsets_e=offsets_e)


def _save_input(ctx: Any, x: Tensor | QuantizedTensor, *others: Tensor) -> None:
    """Saves `others` and the input for backward: the input itself, or its columnwise copy."""
    if isinstance(x, Tensor):
        ctx.save_for_backward(*others, x)
        return
    ctx.saved_form = x.block, x.dtype
    ctx.save_for_backward(*others, *x.column_copy)


def _saved_input(ctx: Any, first: int = 0) -> Tensor | QuantizedTensor:
    """Returns the input that `_save_input` saved after `first` other tensors."""
    x, *scales = ctx.saved_tensors[first:]
    if not scales:
        return x
    return QuantizedTensor(None, QuantizedCopy(x, *scales), *ctx.saved_form)


def _dense_weight_grad(kernels: Kernels, weight: Tensor, grad: MatrixOperand, x: MatrixOperand) -> Tensor | None:
    """Weight gradient of a linear layer with output gradient `grad` and input `x`, accumulated or returned as by
    `accumulate_grad`."""

    def compute(out: Tensor, accumulate: bool) -> None:
        kernels.linear_weight_grad(grad, x, out, accumulate)

    return accumulate_grad(weight, compute)


def accumulate_grad(weight: Tensor, compute: Callable[[Tensor, bool], None]) -> Tensor | None:
    """Passes `compute` to `weight.grad_accumulator`, which calls it with (gradient buffer, whether to add), and returns
    None. If the weight has no accumulator, computes and returns the gradient."""
    accumulator: GradAccumulator | None = getattr(weight, "grad_accumulator", None)
    if accumulator is not None:
        accumulator.add(compute)
        return None
    grad = torch.empty_like(weight)
    compute(grad, False)
    return grad
