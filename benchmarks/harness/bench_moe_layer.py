"""Times the MoE layer of recipes on one GPU, forward and backward, at several numbers of tokens.

    python benchmarks/harness/bench_moe_layer.py q6 m8 ds4 [--rows-per-expert 128 4096]

Each recipe's layer has random weights and inputs, fp32 buffers for weight gradients, and the recipe's routing. TFLOP/s
count the router, the selected and the shared experts, and are compared with a large bf16 GEMM in the same run. The
column "experts" times the experts only: both GEMMs, the activation, and all their gradients.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from arguments.read import read_plan  # noqa: E402
from benchmarks.harness.time_kernels import measure_ceilings, milliseconds  # noqa: E402
from megatron_moe import build  # noqa: E402
from megatron_moe.config.moe import MoEConfig  # noqa: E402
from megatron_moe.data.batch import MicrobatchContext, TokenMeta  # noqa: E402
from megatron_moe.data.tokenizer import vocab_size_of  # noqa: E402
from megatron_moe.layers.components import Site  # noqa: E402
from megatron_moe.layers.node_chain import LayerState, run_nodes  # noqa: E402
from megatron_moe.layers.resources import ModelResources  # noqa: E402
from megatron_moe.memory.saved_tensors import SavedTensorPolicy  # noqa: E402
from megatron_moe.moe.moe_layer import MoELayer  # noqa: E402
from megatron_moe.parallel.rng import RNGKey  # noqa: E402

RATES = ("TFLOP/s", "of the peak")
COLUMNS = ("recipe", "rows per expert", "tokens", "forward ms", "both ways ms", *RATES, "experts ms", *RATES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--rows-per-expert", nargs="+", type=int, default=[128, 512, 4096])
    options = parser.parse_args()
    device = torch.device("cuda")
    peak = 1e3 * measure_ceilings(device, torch.bfloat16).teraflop_per_ms
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; a product reaches {peak:.0f} TFLOP/s\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for recipe in options.recipes:
        layer, config = make_layer(recipe)
        for rows in options.rows_per_expert:
            tokens = rows * config.router.num_experts // config.router.topk
            print(f"| {recipe} | {rows} | {tokens} | {row(layer, config, tokens, peak)} |", flush=True)


def make_layer(recipe: str) -> tuple[MoELayer, MoEConfig]:
    """Last layer of the recipe, with fp32 gradient buffers."""
    plan = read_plan(["--recipe", recipe], os.environ, vocab_size_of=vocab_size_of)
    context = build.build_context(plan)
    config = plan.model.layers[-1].feed_forward
    assert isinstance(config, MoEConfig), f"the last layer of {recipe} is dense"
    resources = ModelResources(context, build.build_kernels(plan, context), SavedTensorPolicy())
    layer = MoELayer(config, Site("layer", 0), resources)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.meta.fan_in**-0.5)  # type: ignore[attr-defined]
        parameter.grad_accumulator = FP32Accumulator(torch.zeros_like(parameter, dtype=torch.float32))  # type: ignore[attr-defined]
    return layer, config


def row(layer: MoELayer, config: MoEConfig, tokens: int, peak: float) -> str:
    """Formats the table cells measured with this number of tokens."""
    device = torch.device("cuda")
    hidden_SBH = torch.randn(tokens, 1, config.router.hidden_size, device=device).bfloat16().requires_grad_()
    meta = TokenMeta(positions_BS=torch.arange(tokens, device=device)[None])
    mb = MicrobatchContext(tokens=meta, rng=RNGKey(1, 1, 1))
    with torch.no_grad():
        before_experts = layer.nodes[: [node.name for node in layer.nodes].index("experts")]
        rows = run_nodes(before_experts, LayerState(normed_SBH=hidden_SBH), mb).rows
    data_RH, probs_R = (x.detach().requires_grad_() for x in (rows.data, rows.probs_R))
    rows = replace(rows, data=data_RH, probs_R=probs_R)
    forward = milliseconds(lambda: layer(hidden_SBH, mb), device)
    both = milliseconds(both_ways(lambda: layer(hidden_SBH, mb)), device)
    experts = milliseconds(both_ways(lambda: layer.experts(rows).data), device)
    flops = {both: 3 * layer_flop(config, tokens), experts: 3 * expert_flop(config, tokens)}
    cells = [f"{ms:.3f} | {flop / ms / 1e9:.0f} | {flop / ms / 1e9 / peak:.0%}" for ms, flop in flops.items()]
    return f"{forward:.3f} | {' | '.join(cells)}"


def both_ways(run: Callable[[], Tensor]) -> Callable[[], None]:
    """Wraps a function to run its forward and backward."""
    grad = torch.randn_like(run())

    def work() -> None:
        run().backward(grad)

    return work


class FP32Accumulator:
    """Gradient accumulator with one fp32 buffer."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        compute(self.buffer, True)


def expert_flop(config: MoEConfig, tokens: int) -> float:
    """Forward FLOPs of the selected experts."""
    matrices = config.experts.activation.fc1_width_factor + 1
    return 2.0 * tokens * config.router.topk * matrices * config.experts.hidden_size * config.experts.ffn_hidden_size


def layer_flop(config: MoEConfig, tokens: int) -> float:
    """Forward FLOPs of router, selected and shared experts."""
    flop = expert_flop(config, tokens) + 2.0 * tokens * config.router.hidden_size * config.router.num_experts
    if config.shared is not None:
        mlp = config.shared.mlp
        flop += 2.0 * tokens * (mlp.activation.fc1_width_factor + 1) * mlp.hidden_size * mlp.ffn_hidden_size
    return flop


if __name__ == "__main__":
    main()
