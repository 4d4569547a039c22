"""Which parts of the layers are recorded and replayed (Megatron's `--cuda-graph-modules`).

  attn            norm, attention, residual connection, and the norm behind it
  mlp             the MLP of a dense layer, with its residual connection
  moe_router      router and latent projection of an MoE layer
  moe_preprocess  rows sorted by expert, where all experts are on one rank
  moe             all of an MoE layer behind attention, where all experts are on one rank

What lies between is computed as ever.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_moe.data.batch import MicroBatch, TokenMeta
from megatron_moe.kernels.bundle import Bundle
from megatron_moe.memory.graphs import Function, Part
from megatron_moe.model.block import Attended, Block, DenseBlock, Dispatched, MoEBlock, Routed
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.specs.exitcodes import EnvironmentProblem
from megatron_moe.specs.memory import GraphSpec

_OFFSETS_STAY_ON_THE_DEVICE = ("hopper", "torch_native", "triton")
"""Backends of the grouped products."""


def capture_parts(model: GPT, modules: Iterable[str]) -> None:
    """From now on the layers of the decoder replay these parts, for microbatches in flight. Multi-token prediction
    computes."""
    wanted = frozenset(modules)
    if model.ctx.group("etp_ep").size > 1:
        wanted -= {"moe_preprocess"}  # rows are sorted for an exchange, and with its collectives
    for block in model.decoder.layers.values():
        assert isinstance(block, Block), f"a layer is a {type(block).__name__}"
        block.forward = partial(_run, _functions(block, wanted))  # type: ignore[method-assign]


def check_recordable(spec: GraphSpec, kernels: Bundle) -> None:
    """Raises EnvironmentProblem when experts are to be recorded and their kernels read something on the host."""
    if not spec.whole_step and "moe" not in spec.modules:
        return
    for choice in kernels.choices:
        if choice.op.startswith("grouped_") and choice.backend not in _OFFSETS_STAY_ON_THE_DEVICE:
            wish = "--cuda-graph-impl full_iteration" if spec.whole_step else "--cuda-graph-modules moe"
            raise EnvironmentProblem(
                f"{wish} cannot record {choice.op} of the backend {choice.backend}, which reads the number of rows of "
                f"every expert on the host ({choice.reason}). Record other parts, for instance --cuda-graph-modules "
                f"attn moe_router moe_preprocess, or compute in --bf16 with --kernel-per-op {choice.op}=auto."
            )


def draw_forced(model: GPT, batch: MicroBatch, dtype: torch.dtype) -> MicroBatch:
    """The microbatch with the logits that benchmarks force on its routers: a replay draws nothing."""
    routers = [block.mlp.router for block in model.decoder.layers.values() if isinstance(block, MoEBlock)]
    forced = [router for router in routers if router.spec.force_balancing or router.spec.force_biased is not None]
    if not forced:
        return batch
    num_tokens = batch.tokens_BS.numel()
    drawn = {router.layer: router.draw(num_tokens, dtype, batch.meta) for router in forced}
    return replace(batch, meta=replace(batch.meta, forced=drawn))


def _run(functions: Sequence[Function], hidden_SBH: Tensor, meta: TokenMeta) -> Tensor:
    state: Any = hidden_SBH
    for function in functions:
        state = function(state, meta)
    result: Tensor = state
    return result


def _functions(block: Block, wanted: frozenset[str]) -> list[Function]:
    """The layer in pieces, those that are wanted as parts."""

    def part(name: str, function: Function, *modules: nn.Module | None, kind: type[Part] = Part) -> Function:
        if name not in wanted:
            return function
        return kind(f"{name} of {block.site}", function, tuple(_parameters(modules)))

    attend = part("attn", block.attend, block.input_layernorm, block.self_attention, block.pre_mlp_layernorm)
    if isinstance(block, DenseBlock):
        return [attend, part("mlp", block.feed_forward, block.mlp)]
    assert isinstance(block, MoEBlock), f"a layer is a {type(block).__name__}"
    if block.keeping.twice("moe"):  # in one go; the flags allow no recorded part of it then
        return [attend, block.feed_forward]
    behind: list[Function] = [
        part("moe_router", partial(_route, block), block.mlp.router, block.mlp.fc1_latent_proj, kind=_Between),
        part("moe_preprocess", partial(_dispatch, block), kind=_Between),
        block.experts,
        block.start_combine,
        block.finish_combine,
        block.post,
    ]
    if "moe" not in wanted:
        return [attend, *behind]
    return [attend, part("moe", partial(_run, behind), block.mlp)]


class _Between(Part):
    """A part with others before and behind it. A recording outlives the microbatch that it was made with, so the scope
    of those who take its norm passes by."""

    def __call__(self, state: Attended, meta: TokenMeta) -> Attended:
        left: Attended = super().__call__(replace(state, forget=nullcontext()), meta)
        return replace(left, forget=state.forget)


def _route(block: MoEBlock, state: Attended, meta: TokenMeta) -> Routed:
    known = {field.name: getattr(state, field.name) for field in fields(state)}
    routing = block.mlp.route(state.normed_SBH, meta)
    return Routed(**known, tokens_SBH=block.mlp.tokens(state.normed_SBH), routing=routing)


def _dispatch(block: MoEBlock, state: Routed, meta: TokenMeta) -> Dispatched:
    return block.finish_dispatch(block.start_dispatch(state, meta), meta)


def _parameters(modules: Iterable[nn.Module | None]) -> Iterable[Parameter]:
    for module in modules:
        for parameter in () if module is None else module.parameters():
            assert isinstance(parameter, Parameter), "a parameter that was not made by new_parameter"
            yield parameter
