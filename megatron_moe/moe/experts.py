"""Routed experts: one MLP per expert, applied to rows sorted by expert."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_moe.config.moe import ExpertsConfig
from megatron_moe.kernels import autograd
from megatron_moe.kernels.autograd import ExpertRows
from megatron_moe.kernels.ops import Kernels, RowIndex, internal_dtype
from megatron_moe.kernels.reference.sequential import sequential
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.layers.quantized_module import QuantizedModule
from megatron_moe.layers.resources import ModelResources
from megatron_moe.moe.expert_clones import ExpertClones
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens, expert_of_each_row
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.precision.linear_quantizer import LinearQuantizer
from megatron_moe.precision.quantized_tensor import QuantizedTensor

_LinearFunction = Callable[..., Tensor]
"""Function with the signature of `GroupedLinear.forward`."""


class Experts(nn.Module):
    """Computes fc2_e(p * act(fc1_e(x))) for every row x of expert e, where p is the row's routing probability.

    Because p is applied before fc2 (and to the bias of fc2), combine is a plain sum and the output of fc2 is not saved
    for backward (memory-efficient permutation). With `probs_on_input`, p multiplies x instead. With `probs_on_output`,
    p multiplies the output of fc2, which is then saved for backward (standard permutation).

    A rank stores the weights of its n local experts in two stacked tensors: `linear_fc1` [n, F, H], or [n, 2F, H] with
    gate rows first for a gated activation, and `linear_fc2` [n, H, F]. Each is multiplied in one grouped GEMM or in one
    GEMM per expert. An expert without rows gets a zero weight gradient. Experts are sharded over ep, and the F channels
    of each expert over etp. The outputs of an etp rank are therefore partial sums, and the combine step adds them up.
    """

    def __init__(self, config: ExpertsConfig, resources: ModelResources[Any]) -> None:
        super().__init__()
        self.saved_tensors = resources.saved_tensors
        self.config = config
        self.kernels = resources.kernels if config.grouped else sequential(resources.kernels)
        specs = config.parameter_specs(resources.ctx.config, counted="experts", low="experts")
        declared, ctx = DeclaredParameters(specs, resources), resources.ctx
        ep, in_pages = ctx.group("ep"), self.saved_tensors.stash is not None
        num_experts = config.num_experts, ep.rank * (config.num_experts // ep.size)

        def expert_stack(name: str, saves_input: bool) -> GroupedLinear:
            weight, bias = declared.parameter(f"{name}.weight"), declared.optional_parameter(f"{name}.bias")
            quantizer = resources.quantizers.new_quantizer(
                "experts", name, experts=num_experts, saves_input=saves_input
            )
            return GroupedLinear(weight, bias, ctx, self.kernels, quantizer)

        self.linear_fc1 = expert_stack("linear_fc1", in_pages)
        self.linear_fc2 = expert_stack("linear_fc2", in_pages or self.saved_tensors.is_recomputed("moe_act"))

    def forward(self, rows: DispatchedTokens) -> DispatchedTokens:
        """Returns the output of each row's expert, in the order of the rows. If `rows.sums_tokens`, returns the sum of
        each token's outputs instead. The contents of padding rows are undefined."""
        if rows.clones is None:
            return self._run(rows, self.linear_fc1, self.linear_fc2)
        own, cloned = self._own_and_cloned(rows, rows.clones)
        out = self._run(own, self.linear_fc1, self.linear_fc2)
        if cloned is None:
            return replace(out, data=rows.clones.join(out.data))
        fc1, fc2 = (partial(rows.clones.linear, self.kernels, stack_index) for stack_index in range(2))
        return replace(rows, data=torch.cat([out.data, self._run(cloned, fc1, fc2).data]), clones=None)

    @property
    def weights(self) -> tuple[Parameter, Parameter]:
        return self.linear_fc1.weight, self.linear_fc2.weight

    def _own_and_cloned(
        self, rows: DispatchedTokens, clones: ExpertClones
    ) -> tuple[DispatchedTokens, DispatchedTokens | None]:
        """Divides rows into those of this rank's experts and those of clones; None if no clone has rows."""
        num_own = len(self.linear_fc1.weight)
        own = replace(rows, offsets_e=rows.offsets_e[:num_own], clones=None)
        if not clones.sizes.num_rows:
            return own, None
        sizes = [len(rows.data) - clones.sizes.num_rows, clones.sizes.num_rows]
        (data, cloned), (probs_R, cloned_probs_R) = rows.data.split(sizes), rows.probs_R.split(sizes)
        offsets_e = rows.offsets_e[num_own:] - rows.offsets_e[num_own - 1]
        return replace(own, data=data, probs_R=probs_R), replace(
            own, data=cloned, probs_R=cloned_probs_R, offsets_e=offsets_e
        )

    def _run(self, rows: DispatchedTokens, fc1: _LinearFunction, fc2: _LinearFunction) -> DispatchedTokens:
        """Computes the outputs of rows with the given linear layers."""
        data, index, offsets_e = rows.data, rows.index, rows.offsets_e
        probs_R: Tensor | None = rows.probs_R
        if self.config.probs_on_input:
            data_RH = data if index is None else self.kernels.permute(data, index)
            data, index, probs_R = _scale(data_RH, rows.probs_R), None, None
        elif self.config.probs_on_output:
            probs_R = None
        used = offsets_e[-1]
        # tokens that fc1 gathers are not padded, so a stash would not save memory
        stash = self.saved_tensors.stash_rows(data, used) if index is None else nullcontext()
        with stash, self.saved_tensors.offload_scope("expert_fc1"):
            ffn_RF = fc1(data, offsets_e, index=index, rows_q=rows.quantized)
        if self.has_fused_casts:
            sums = index if rows.sums_tokens else None
            with self.saved_tensors.stash_rows(ffn_RF, used), self.saved_tensors.offload_scope("moe_act"):
                out = self._activate_and_multiply(ffn_RF, probs_R, offsets_e, sums, len(data))
                return replace(rows, data=out, index=sums, quantized=None)
        inputs = (ffn_RF,) if probs_R is None else (ffn_RF, probs_R)
        with self.saved_tensors.stash_rows(ffn_RF, used), self.saved_tensors.offload_scope("moe_act"):
            act_RF = self._activate(*inputs)
            discard = self.saved_tensors.discard_output("moe_act", self._activate, inputs, act_RF)
        with self.saved_tensors.stash_rows(act_RF, used), discard:
            out_RH = fc2(act_RF, offsets_e, probs_R=probs_R)
        if self.config.probs_on_output:
            out_RH = _ScaleByProbs.apply(out_RH, rows.probs_R)
        return replace(rows, data=out_RH, index=None, quantized=None)

    @property
    def has_fused_casts(self) -> bool:
        """Whether the inputs and gradients of the GEMMs are quantised by the ops that compute them. The activation is
        then recomputed in backward instead of saved."""
        fc1, fc2, config = self.linear_fc1.quantizer, self.linear_fc2.quantizer, self.config
        if (
            fc1 is None
            or fc2 is None
            or not fc1.fused_block
            or not fc2.can_fuse_activation(config.activation, self.linear_fc2.weight)
        ):
            return False
        return config.grouped and not config.bias and not config.probs_on_output

    def _activate_and_multiply(
        self, ffn_RF: Tensor, probs_R: Tensor | None, offsets_e: Tensor, sums: RowIndex | None, num_tokens: int
    ) -> Tensor:
        weight, quantizer = self.linear_fc2.weight, self.linear_fc2.quantizer
        assert quantizer is not None
        arguments = (self.kernels, ffn_RF, weight, self.config.activation, quantizer, self.linear_fc1.quantizer)
        return autograd.activation_linear(*arguments, ExpertRows(offsets_e, probs_R, sums, num_tokens))

    def _activate(self, ffn_RF: Tensor, probs_R: Tensor | None = None) -> Tensor:
        return self.kernels.activation(ffn_RF, probs_R, self.config.activation)


class GroupedLinear(QuantizedModule):
    """Stack of the linear layers y = x W^T + b of n local experts: `weight` [n, outputs, inputs] and `bias` [n,
    outputs]."""

    weight: Parameter
    bias: Parameter | None

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None,
        ctx: ParallelContext,
        kernels: Kernels,
        quantizer: LinearQuantizer | None = None,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self._set_weight(weight, quantizer)
        self.bias = bias
        # combine sums the outputs of the etp ranks, so only the first etp rank adds the bias
        self._bias_is_here = weight.meta.tp_dim == 0 or ctx.group("etp").rank == 0

    def forward(
        self,
        rows: Tensor,
        offsets_e: Tensor,
        *,
        index: RowIndex | None = None,
        probs_R: Tensor | None = None,
        rows_q: QuantizedTensor | None = None,
    ) -> Tensor:
        """Maps `rows` [R, I] to [R, O]. With `index`, `rows` are tokens [T, I], from which the GEMM gathers its R rows.
        `probs_R` multiplies only the bias. `rows_q`: see `autograd.grouped_linear`."""
        arguments = (self.kernels, rows, self.weight, offsets_e, index)
        out_RO = autograd.grouped_linear(*arguments, quantizer=self.quantizer, rows_q=rows_q)
        if self.bias is None:
            return out_RO
        # on the other etp ranks the bias is 0 but receives the full gradient, so that the biases of all ranks stay
        # equal
        bias_eO = self.bias if self._bias_is_here else self.bias - self.bias.detach()
        out_RO = _AddBias.apply(out_RO, bias_eO, offsets_e, probs_R)
        return out_RO


class _AddBias(AutogradFunction):
    """Adds the bias of each row's expert, multiplied by the row's probability unless `probs_R` is None, to [R, O].

    Padding rows get no bias. Backward expands the biases to rows again, so only tensors of the size of the
    probabilities are saved.
    """

    @staticmethod
    def forward(ctx: Any, out_RO: Tensor, bias_eO: Tensor, offsets_e: Tensor, probs_R: Tensor | None) -> Tensor:
        ctx.save_for_backward(bias_eO, offsets_e, probs_R)
        bias_RO = _bias_of_rows(bias_eO, offsets_e, len(out_RO))
        return out_RO + (bias_RO if probs_R is None else _scale(bias_RO, probs_R)).to(out_RO.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_RO,), (bias_eO, offsets_e, probs_R) = grads, ctx.saved_tensors
        wide_RO = grad_RO.to(internal_dtype(bias_eO.dtype))
        grad_bias = grad_probs = None
        if ctx.needs_input_grad[1]:
            scaled_RO = wide_RO if probs_R is None else _scale(wide_RO, probs_R)
            sums = wide_RO.new_zeros(len(bias_eO) + 1, bias_eO.shape[1])
            sums.index_add_(0, expert_of_each_row(offsets_e, len(grad_RO)), scaled_RO)
            grad_bias = sums[:-1].to(bias_eO.dtype)
        if ctx.needs_input_grad[3]:
            bias_RO = _bias_of_rows(bias_eO, offsets_e, len(grad_RO))
            grad_probs = bias_RO.mul_(wide_RO).sum(dim=-1).to(probs_R.dtype)
        return grad_RO, grad_bias, None, grad_probs


def _bias_of_rows(bias_eO: Tensor, offsets_e: Tensor, num_rows: int) -> Tensor:
    """Bias of each row's expert, [R, O] in promote(fp32, dtype); 0 for padding rows."""
    wide_eO = bias_eO.to(internal_dtype(bias_eO.dtype))
    with_none = torch.cat([wide_eO, wide_eO.new_zeros(1, wide_eO.shape[1])])
    return with_none.index_select(0, expert_of_each_row(offsets_e, num_rows))


def _scale(rows_RH: Tensor, probs_R: Tensor) -> Tensor:
    """Multiplies each row by its probability in promote(fp32, dtype) and converts the result to the rows' dtype."""
    return (rows_RH * probs_R.to(internal_dtype(rows_RH.dtype))[:, None]).to(rows_RH.dtype)


class _ScaleByProbs(AutogradFunction):
    """Multiplies the experts' output rows [R, H] by their probabilities [R], computed in promote(fp32, dtype).

    Results and gradients of rows with probability 0 (padding) are 0. Rows are saved for backward in their own dtype.
    """

    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, probs_R: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RH, probs_R)
        return _scale(rows_RH, probs_R).masked_fill_((probs_R == 0)[:, None], 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad_RH,), (rows_RH, probs_R) = grads, ctx.saved_tensors
        grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_rows = _scale(grad_RH, probs_R).masked_fill_((probs_R == 0)[:, None], 0)
        grad_probs = None
        if ctx.needs_input_grad[1]:
            products_RH = grad_RH.to(internal_dtype(grad_RH.dtype), copy=True).mul_(rows_RH)
            grad_probs = products_RH.sum(dim=-1).masked_fill_(probs_R == 0, 0).to(probs_R.dtype)
        return grad_rows, grad_probs
