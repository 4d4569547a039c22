"""Tensors that one rank saves for the backward of one microbatch, by layer and by pipeline stage.

Configs of components list what their modules save (`config/component.py`, which also defines the letters in shapes);
this file adds what belongs to the layer, the pipeline stage and the model. V is the local vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from megatron_moe.config.costs import (
    INDEX,
    WHOLE_LAYER,
    ActivationSizes,
    SavedActivation,
    bytes_per_element,
    most_rows,
    saved_tensor,
)
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline_layout import StageLayout
from megatron_moe.config.run import RunPlan
from megatron_moe.config.transport import SentCopies, TokenExchange
from megatron_moe.cost_model.expert_load import token_copies

_NORMS = MappingProxyType(
    {"self_attention": ("input_norm", "attn_norm", {"offloaded_by": "qkv_linear"}), "mlp": ("mlp_norm", "mlp_norm", {})}
)
"""Maps each module of a layer to (label of its norm, value of `--offload-modules` for the norm's input, fields of
`SavedActivation` for its output)."""


def activation_sizes(plan: RunPlan, imbalance: float = 1.0) -> ActivationSizes:
    """Sizes for one microbatch on one rank. `imbalance`: see `ActivationSizes`."""
    parallel, activation = plan.parallel, bytes_per_element(plan.precision.params)
    inner = plan.data.seq_length // parallel.cp * plan.batch.micro_batch_size
    return ActivationSizes(
        residual=inner // parallel.tp if parallel.sequence_parallel else inner,
        inner=inner,
        activation_itemsize=activation,
        internal_itemsize=max(activation, bytes_per_element("fp32")),
        length=plan.data.seq_length,
        imbalance=imbalance,
    )


def layer_tensors(layer: LayerConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> list[SavedActivation]:
    """Tensors that one layer saves for backward; the first one is its input."""
    saved: list[SavedActivation] = []
    for name, _, component in layer.sublayers:
        norm, input_by, options = _NORMS[name]
        marks = {"recomputed_by": ("layernorm",), **options, **component.saved_input_fields(parallel)}
        saved += layer.residual.saved_tensors(norm, layer.hidden_size, sizes, is_first=not saved, offloaded_by=input_by)
        read, *others = layer.norm.saved_tensors(norm, layer.hidden_size, sizes, input_by=input_by, **marks)
        saved += [replace(read, **layer.residual.input_fields()), *others]
        saved += component.saved_tensors(parallel, sizes)
    exchange = layer.feed_forward.exchange(parallel, sizes, None)
    if exchange is not None and exchange.transport.delivers_tokens:
        marks = {"recomputed_by": (layer.feed_forward.whole_module,)}
        count = _index_elements(exchange, parallel, sizes.residual)
        saved.append(saved_tensor("experts", "index of received tokens", "G K", count, INDEX, marks))
    if layer.hidden_dropout:
        count = sizes.residual * layer.hidden_size
        for name, _, _ in layer.sublayers:
            module = {"self_attention": "attention"}.get(name, name)
            saved.append(saved_tensor(module, "dropout mask", "T H", count, sizes.activation_itemsize))
    return saved


def _index_elements(exchange: TokenExchange, parallel: ParallelConfig, num_tokens: int) -> int:
    """Number of indices that map received tokens to rows of experts, and tokens to the ranks that they are sent to.

    Sorting makes three indices per choice: its row, and the token and choice of each row. They are kept whole, although
    only the choices of this rank's experts have rows.
    """
    sorted_choices, received = 0.0, float(num_tokens * parallel.ep * parallel.etp)
    if exchange.transport.copies is SentCopies.PER_HOST:
        copies = token_copies(exchange, parallel)
        if copies.num_hosts > 1:
            sorted_choices += num_tokens * copies.num_hosts
        if copies.ranks_per_host > 1:
            sorted_choices += num_tokens * (copies.per_token if copies.num_hosts > 1 else 1) * copies.ranks_per_host
        received = num_tokens * copies.forwarded
    choices = int(received * exchange.topk)
    num_rows = most_rows(choices, exchange.num_experts // parallel.ep, exchange.row_alignment)
    return int(3 * sorted_choices) + choices + 2 * num_rows


def stage_tensors(
    model: ModelConfig, stage: StageLayout, parallel: ParallelConfig, sizes: ActivationSizes
) -> list[SavedActivation]:
    """Saved tensors of a stage outside its decoder layers: token ids, RoPE tables, final norm, head and MTP."""
    saved: list[SavedActivation] = list(_rotations(model, stage, sizes))
    if stage.embedding:
        saved.append(saved_tensor("embedding", "tokens", "U", sizes.inner, INDEX))
    if stage.final_norm:
        saved += model.residual.head_tensors("final_norm", model.hidden_size, sizes)
        saved += model.norm.saved_tensors("final_norm", model.hidden_size, sizes)
    if stage.num_mtp:
        for _ in range(model.num_mtp):
            saved += _mtp_layer(model, parallel, sizes)
    if stage.loss:
        saved += head_tensors(model, parallel, sizes)
    return saved


def head_tensors(model: ModelConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> list[SavedActivation]:
    """Saved tensors of the output layer and the loss, for the model and for every depth of multi-token prediction."""
    head = list(_head(model, parallel, sizes))
    return head + [replace(each, module="mtp") for _ in range(model.num_mtp) for each in head]


def _rotations(model: ModelConfig, stage: StageLayout, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    """Cos and sin tables that a stage saves: one pair per distinct RoPE config of its layers."""
    layers = [model.layers[index] for index in stage.layers] + [model.mtp_layer] * bool(stage.num_mtp)
    for rope in dict.fromkeys(rope for layer in layers for rope in layer.mixer.rotary_tables):
        yield saved_tensor("positions", "cos and sin", "2 U D", 2 * sizes.inner * rope.dim, sizes.internal_itemsize)


def _head(model: ModelConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    """Tensors that output layer and loss save, except the final norm's output. A chunked loss saves no logits."""
    if model.loss_chunk is None:
        yield saved_tensor(
            "head", "logits", "U V", sizes.inner * (model.vocab_size // parallel.tp), sizes.activation_itemsize
        )
    yield saved_tensor("head", "labels and normaliser", "U", sizes.inner, INDEX + sizes.internal_itemsize)


def _mtp_layer(model: ModelConfig, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
    """Tensors that one MTP depth saves. Its input is already counted, either as the output of the final norm or as the
    residual streams before it."""
    hidden, tokens, streams = model.hidden_size, sizes.residual, model.residual.num_streams
    yield saved_tensor("mtp", "embedding", "T H", tokens * hidden, sizes.activation_itemsize)
    yield saved_tensor("mtp", "statistics", "T", (1 + streams) * tokens, sizes.internal_itemsize)
    low = "" if parallel.sequence_parallel else "mtp"
    yield saved_tensor("mtp", "joined", "T 2H", 2 * tokens * streams * hidden, sizes.activation_itemsize, {"low": low})
    own_input, *others = layer_tensors(model.mtp_layer, parallel, sizes)
    yield replace(own_input, module="mtp")
    for each in others:
        recomputed = (*each.recomputed_by, WHOLE_LAYER)
        yield replace(each, module="mtp", recomputed_by=recomputed)
    yield from model.residual.head_tensors("mtp", hidden, sizes)
    yield from model.norm.saved_tensors("mtp", hidden, sizes)
