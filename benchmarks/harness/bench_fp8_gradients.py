"""Compares gradients of low-precision and bf16 training at the first step, per layer, on one device.

    python benchmarks/harness/bench_fp8_gradients.py [--output-dir benchmarks] [-- --hidden-size 1024 ...]

Models and variants are those of `bench_fp8_loss.py`; weights and batch of a model are the same for all variants. Writes
`<date>-<machine>-fp8-gradients.md`, again after every model. Flags after `--` are added to every run.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # started as a script, from any folder

from benchmarks.harness.bench_fp8_loss import MODELS, VARIANTS, PrecisionVariant, flags_of  # noqa: E402
from benchmarks.harness.timed_run import plan_to_run  # noqa: E402
from megatron_moe import build  # noqa: E402
from megatron_moe.layout_check.record import record_run  # noqa: E402
from tools._common import split_at_dashes, tool_parser  # noqa: E402

Gradients = Mapping[str, Tensor]
Tables = Mapping[str, Mapping[str, Mapping[str, "LayerCosine"]]]
"""Model -> variant -> layer -> cosine."""
COMPARED = [variant for variant in VARIANTS if "--seed" not in variant.flags]


class LayerCosine(NamedTuple):
    """Cosine similarity between two gradients of a layer."""

    whole: float
    """Cosine over all parameters of the layer together."""
    least: float
    """Smallest cosine of a parameter."""
    parameter: str
    """Name of that parameter."""


def gradients(model: str, variant: PrecisionVariant, options: argparse.Namespace) -> Gradients:
    """Computes the fp32 gradients of the first step, by parameter name, before clipping."""
    plan = plan_to_run([*flags_of(model, variant, options), "--train-iters", "1"])
    context = build.build_context(plan)
    try:
        kernels, data = build.build_kernels(plan, context), build.build_data(plan, context)
        record = record_run(plan, context, kernels, data, num_steps=1)
    finally:
        context.stop()
    return {name: tensor.value for name, tensor in record.gradients.items()}


def cosines(found: Gradients, reference: Gradients) -> dict[str, LayerCosine]:
    """Cosine similarity of `found` and `reference` per layer, in the order of the model."""
    by_layer: dict[str, list[str]] = {}
    for name in reference:
        layer = re.search(r"layers\.(\d+)\.", name)
        by_layer.setdefault(f"layer {layer[1]}" if layer else name.removesuffix(".weight"), []).append(name)
    order = sorted(by_layer, key=lambda layer: (layer.startswith("output"), "norm" in layer, "layer" in layer, layer))
    return {layer: _cosine(found, reference, by_layer[layer]) for layer in order}


def _cosine(found: Gradients, reference: Gradients, names: Sequence[str]) -> LayerCosine:
    pairs = [(found[name].double(), reference[name].double()) for name in names]
    products = torch.stack([torch.stack([(a * b).sum() for a, b in ((x, y), (x, x), (y, y))]) for x, y in pairs])
    xy, xx, yy = torch.cat([products, products.sum(dim=0, keepdim=True)]).T
    *each, whole = (xy / (xx * yy).sqrt()).tolist()
    least = min(each)
    return LayerCosine(whole, least, names[each.index(least)])


def report(tables: Tables, machine: str) -> str:
    """Formats the benchmark's Markdown document."""
    lines = [
        f"# Gradients of low-precision and bf16 training on one {machine}",
        "",
        f"{date.today()}, torch {torch.__version__}, `python benchmarks/harness/bench_fp8_gradients.py`. Cosine of the",
        f"angle between the gradients of the first step and those of {COMPARED[0].name}, for all parameters of a layer",
        "and, in parentheses, for the parameter with the smallest cosine.",
    ]
    for model, variants in tables.items():
        layers = list(dict.fromkeys(layer for table in variants.values() for layer in table))
        lines += ["", f"## {model}", "", f"| run | {' | '.join(layers)} |", f"|---|{'---|' * len(layers)}"]
        for variant, table in variants.items():
            cells = (f"{table[layer].whole:.5f} ({table[layer].least:.5f})" for layer in layers)
            lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks"))
    parser.add_argument("--data-path", type=Path, default=Path("data/quickstart/corpus_text_document"))
    parser.add_argument("--tokenizer-model", type=Path, default=Path("data/quickstart/tokenizer.model"))
    own, more = split_at_dashes(argv)
    options = parser.parse_args(own, argparse.Namespace(more=more))
    has_gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0] if has_gpu else "CPU"
    options.output_dir.mkdir(parents=True, exist_ok=True)
    tables: dict[str, dict[str, dict[str, LayerCosine]]] = {}
    for model in MODELS:
        reference = gradients(model, COMPARED[0], options)
        for variant in COMPARED[1:]:
            table = cosines(gradients(model, variant, options), reference)
            tables.setdefault(model, {})[variant.name] = table
            path = options.output_dir / f"{date.today()}-{machine.lower()}-fp8-gradients.md"
            path.write_text(report(tables, machine))
            worst = min(table.values(), key=lambda each: each.least)
            print(f"{model}, {variant.name}: least {worst.least:.5f}, of {worst.parameter}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
