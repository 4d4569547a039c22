"""Makes the memory tracker label tensors by the module that allocates them, and marks persistent state."""

from collections.abc import Callable
from functools import wraps
from types import MappingProxyType
from typing import Any

from megatron_moe.config.model import ModelConfig
from megatron_moe.layers.components import FeedForward
from megatron_moe.memory_emulation.tracker import Tracker
from megatron_moe.model.gpt import GPT
from megatron_moe.train.pipeline_stage import Pipeline
from megatron_moe.train.trainer import Trainer

_METHODS = ("forward", "loss", "logits", "first", "second")
"""Module methods that are wrapped to set the label."""
_OUTSIDE_LAYERS = MappingProxyType({"mtp": "mtp", "embedding": "embedding", "output_layer": "head"})
_IN_LAYER = MappingProxyType({"": "residual", "input_layernorm": "input_norm", "pre_mlp_layernorm": "mlp_norm"})
_EXCHANGE = ("start_dispatch", "finish_dispatch", "start_combine", "finish_combine")


def label_model(model: GPT, tracker: Tracker) -> None:
    """Labels the memory that each module allocates. Labels are the module names of the dry-run report."""
    for path, module in model.named_modules():
        label = _label(path, model.config)
        if label:
            _enter(module, _METHODS, label, tracker)
        if isinstance(module, FeedForward) and module.dispatcher is not None:
            _enter(module.dispatcher, _EXCHANGE, "dispatch", tracker)


def _label(path: str, model: ModelConfig) -> str:
    """Label of the module at `path`; empty if its allocations get the label of the enclosing module."""
    words = path.split(".")
    if words[0] in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[words[0]]
    if words[1:] == ["final_layernorm"]:
        return "final_norm"
    if words[1:2] != ["layers"] or len(words) < 3:
        return ""
    layer = model.layers[int(words[2])]
    labels = dict(_IN_LAYER)
    for name, _, component in layer.sublayers:
        labels |= {f"{name}.{part}".rstrip("."): label for part, label in component.memory_labels.items()}
    return labels.get(".".join(words[3:]), "")


def _enter(target: Any, methods: tuple[str, ...], label: str, tracker: Tracker) -> None:
    """Wraps the named methods of `target`, if they exist, so that memory they allocate gets the label."""

    def labelled(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run_with_label(*args: Any, **kwargs: Any) -> Any:
            with tracker.with_label(label):
                return method(*args, **kwargs)

        return run_with_label

    for name in methods:
        method = getattr(target, name, None)
        if callable(method):
            setattr(target, name, labelled(method))


def label_received_tensors(pipeline: Pipeline, tracker: Tracker) -> None:
    """Labels tensors received from other pipeline ranks as "pipeline"."""
    _enter(pipeline.links, ("receive",), "pipeline", tracker)


def mark_state(trainer: Trainer, tracker: Tracker) -> None:
    """Marks weights, gradients, master weights and optimizer moments as persistent state."""
    for buffer in trainer.buffers.buffers:
        for what, tensor in buffer.tensors():
            tracker.mark_persistent(tensor, what)
    for memory in trainer.buffers.reducer.memory:
        tracker.mark_persistent(memory, "gradients")
    for state in trainer.optimizer.states:
        stored = state.stored
        named = [("moments", each) for each in stored.states.values()]
        if stored.master is not None:
            named.append(("master weights", stored.master))
        for kind, packed in named:
            for tensor in packed.parts:
                tracker.mark_persistent(tensor, kind if state.placement == "device" else "host")


def mark_pages(trainer: Trainer, tracker: Tracker) -> None:
    """Marks the pages of the paged stash as activations. Call it after a step, because steps allocate the pages."""
    if trainer.model.saved_tensors.stash is not None:
        for tensor in trainer.model.saved_tensors.stash.buffers():
            tracker.mark_persistent(tensor, "activations")
