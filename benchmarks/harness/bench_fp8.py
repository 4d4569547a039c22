"""Times FP8 casts and grouped GEMMs on one GPU and prints a Markdown table.

The table also has the bandwidth and TFLOP/s that the GPU reaches in the same run.

python benchmarks/harness/bench_fp8.py [--only CASES]
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.precision import LowPrecisionConfig, low_precision_config
from megatron_moe.kernels.backends.hopper import backend as hopper
from megatron_moe.kernels.backends.hopper import (
    fp8_grouped_gemm,
    fp8_linear,
    fp8_weight_grad,
    grouped_gemm,
    weight_grad,
)
from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.triton import activation, norm, quantize
from megatron_moe.kernels.ops import GroupedPart, MatrixOperand
from megatron_moe.kernels.reference.routing import sort_rows
from megatron_moe.precision.quantized_tensor import QuantizedTensor

SHAPES = {
    "Q6 fc1": (65536, 128, 2048, 1536),
    "Q6 fc2": (65536, 128, 768, 2048),
    "M8 fc1": (49152, 64, 2048, 2816),
    "M8 fc2": (49152, 64, 1408, 2048),
    "ds4 fc1": (32768, 8, 7168, 4096),
    "ds4 fc2": (32768, 8, 2048, 7168),
    "Mixtral fc1": (32768, 8, 6144, 32768),
    "Mixtral fc2": (32768, 8, 16384, 6144),
}
"""(rows, experts, inputs, outputs)."""
DENSE = ((8192, 2048, 6144), (8192, 2048, 2048), (4096, 1536, 24576), (4096, 16384, 7168), (4096, 7168, 36864))
"""(rows, inputs, outputs) of attention projections and dense MLPs."""


def milliseconds(work: Callable[[], object], runs: int = 9) -> float:
    """Median milliseconds of `runs` runs, queued while the GPU sleeps so that launch overhead is not timed."""
    for _ in range(3):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    torch.cuda._sleep(20_000_000)
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def row(name: str, time: float, gigabytes: float = 0.0, teraflop: float = 0.0) -> None:
    rates = [f"{1e3 * teraflop / time:.0f} TFLOP/s"] if teraflop else []
    if gigabytes:
        rates.append(f"{gigabytes / time:.2f} TB/s")
    print(f"| {name} | {time:.3f} | {', '.join(rates)} |", flush=True)


def ceilings() -> None:
    source = torch.rand(1 << 28, device="cuda")
    target, square = torch.empty_like(source), draw(8192, 8192)
    row("copy of 1 GB", milliseconds(partial(target.copy_, source)), 2 * source.numel() * 4 / 1e9)
    row("bf16 GEMM 8192", milliseconds(partial(torch.mm, square, square)), teraflop=2 * 8192**3 / 1e12)
    for rows, inputs, outputs in ((8192, 4096, 4096), (8192, 7168, 4096), (32768, 2048, 7168)):
        x, w = quantize.quantize_rows(draw(rows, inputs)), quantize.quantize_weight(draw(outputs, inputs))
        ends = torch.tensor([rows], device="cuda", dtype=torch.int32)
        teraflop = 2 * rows * inputs * outputs / 1e12
        name = f"dense {rows} x {inputs} x {outputs}"
        try:
            row(f"scaled_mm {name}", milliseconds(partial(scaled_mm, x, w)), teraflop=teraflop)
        except RuntimeError as error:
            print("scaled_mm:", error, flush=True)
        one = quantize.quantize_weight(draw(1, outputs, inputs))
        row(
            f"ours, {name}",
            milliseconds(partial(fp8_grouped_gemm.quantized_grouped_forward, x, one, ends)),
            teraflop=teraflop,
        )


def scaled_mm(x: QuantizedTensor, w: QuantizedTensor) -> Tensor:
    """Computes x W^T with torch's scaled GEMM, which needs weight scales whose row stride is a multiple of 4."""
    row, weight = x.row_copy, w.row_copy
    padded = F.pad(weight.scales, (0, -weight.scales.shape[1] % 4))
    per_row, per_block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    scales = (row.scales.T, per_row, padded.T, per_block)
    return F.scaled_mm(row.data, weight.data.T, *scales, output_dtype=torch.bfloat16)


def casts() -> None:
    for rows, width in ((65536, 2048), (32768, 7168), (65536, 1536)):
        x = draw(rows, width)
        size = rows * width / 1e9
        row(f"cast rowwise {rows} x {width}", milliseconds(partial(quantize.quantize_rows, x)), 3.03 * size)
        for name, module in (("Triton", quantize), ("Gluon", hopper)):
            both = milliseconds(partial(module.quantize_rows, x, columnwise=True))
            row(f"cast both {rows} x {width}, {name}", both, 4.06 * size)
        for align in (1, 16):
            counts = torch.randint(0, 128, (rows * 3 // 4,), device="cuda").bincount(minlength=128)
            ends = ((counts + align - 1) // align * align).cumsum(0).to(torch.int32)
            both = milliseconds(partial(hopper.quantize_rows, x, columnwise=True, offsets_e=ends))
            row(f"cast both {rows} x {width}, 128 experts, aligned to {align}", both, 4.06 * size * 0.75)
        q = quantize.quantize_rows(x, rowwise=False, columnwise=True)
        row(f"dequantise columns {rows} x {width}", milliseconds(partial(quantize.dequantize_columns, q)), 3.03 * size)
    for shape in ((128, 1536, 2048), (8, 4096, 7168)):
        weight = draw(*shape)
        row(f"cast weight {shape}", milliseconds(partial(quantize.quantize_weight, weight)), 4 * weight.numel() / 1e9)
    for tokens, topk, experts, hidden in ((8192, 8, 128, 2048), (8192, 6, 64, 2048), (4096, 8, 8, 7168)):
        index = sort_rows(torch.rand(tokens, experts, device="cuda").topk(topk).indices, experts, None)
        x = draw(tokens, hidden)
        size = (2 * tokens * hidden + 1.03 * tokens * topk * hidden) / 1e9
        time = milliseconds(partial(quantize.quantize_permuted, x, index))
        row(f"permute and cast {tokens} tokens, {topk} rows each, hidden {hidden}", time, size)
        for name, module in (("Triton", quantize), ("Gluon", hopper)):
            time = milliseconds(partial(module.quantize_permuted, x, index, columnwise=True))
            row(f"both copies, {name}", time, size + 1.03 * tokens * topk * hidden / 1e9)
        x_q = quantize.quantize_rows(x)
        size = (1.03 * tokens * hidden + 3.03 * tokens * topk * hidden) / 1e9
        time = milliseconds(partial(quantize.permute_quantized, x_q, index))
        row(f"permute {tokens} FP8 tokens, {topk} rows each, hidden {hidden}", time, size)


def gemms() -> None:
    for name, (rows, experts, inputs, outputs) in SHAPES.items():
        counts = torch.randint(0, experts, (rows,), device="cuda").bincount(minlength=experts)
        ends = counts.cumsum(0).to(torch.int32)
        x, grad, weight = draw(rows, inputs), draw(rows, outputs), draw(experts, outputs, inputs)
        teraflop = 2 * rows * inputs * outputs / 1e12
        plain = [
            milliseconds(partial(grouped_gemm.grouped_forward, x, weight, ends)),
            milliseconds(partial(grouped_gemm.grouped_input_grad, grad, weight, ends)),
        ]
        rows_q, grad_q = quantize.quantize_rows(x), quantize.quantize_rows(grad)
        weight_q = quantize.quantize_weight(weight)
        row(f"{name} forward, bf16", plain[0], teraflop=teraflop)
        time = milliseconds(partial(fp8_grouped_gemm.quantized_grouped_forward, rows_q, weight_q, ends))
        row(f"{name} forward", time, teraflop=teraflop)
        row(f"{name} input gradient, bf16", plain[1], teraflop=teraflop)
        time = milliseconds(partial(fp8_grouped_gemm.quantized_grouped_input_grad, grad_q, weight_q, ends))
        row(f"{name} input gradient", time, teraflop=teraflop)


def weight_grads() -> None:
    for shape, (rows, experts, inputs, outputs) in SHAPES.items():
        counts = torch.randint(0, experts, (rows,), device="cuda").bincount(minlength=experts)
        ends = counts.cumsum(0).to(torch.int32)
        x, grad, out = draw(rows, inputs), draw(rows, outputs), torch.zeros(experts, outputs, inputs, device="cuda")
        teraflop = 2 * rows * inputs * outputs / 1e12
        grad_q, x_q = (quantize.quantize_rows(each, columnwise=True, offsets_e=ends) for each in (grad, x))
        in_bf16, low = GroupedPart(grad, x, ends), GroupedPart[MatrixOperand](grad_q, x_q, ends)
        for adds in (False, True):
            name = f"{shape} weight gradient, {'added' if adds else 'stored'}"
            written = (8 if adds else 4) * out.numel()
            time = milliseconds(partial(weight_grad.grouped_weight_grad, [in_bf16], out, adds))
            row(f"{name}, bf16", time, (2 * rows * (inputs + outputs) + written) / 1e9, teraflop)
            time = milliseconds(partial(fp8_weight_grad.quantized_grouped_weight_grad, [low], out, adds))
            row(f"{name}, FP8", time, (rows * (inputs + outputs) + written) / 1e9, teraflop)


def dense_weight_grads() -> None:
    for rows, inputs, outputs in DENSE:
        x, grad, out = draw(rows, inputs), draw(rows, outputs), torch.zeros(outputs, inputs, device="cuda")
        x_q, grad_q = (quantize.quantize_rows(each, columnwise=True) for each in (x, grad))
        teraflop = 2 * rows * inputs * outputs / 1e12
        for adds in (False, True):
            name = f"dense weight gradient {rows} x {inputs} x {outputs}, {'added' if adds else 'stored'}"
            time = milliseconds(partial(torch_native.linear_weight_grad, grad, x, out, adds))
            row(f"{name}, bf16", time, teraflop=teraflop)
            time = milliseconds(partial(fp8_linear.quantized_linear_weight_grad, grad_q, x_q, out, adds))
            row(f"{name}, FP8", time, teraflop=teraflop)


def activations() -> None:
    config = ActivationConfig(kind="silu", gated=True)
    for rows, width in ((65536, 768), (49152, 1408), (32768, 2048)):
        x, grad, probs = draw(rows, 2 * width), draw(rows, width), torch.rand(rows, device="cuda")
        size = rows * width / 1e9
        time = milliseconds(partial(activation.activation, x, probs, config))
        row(f"SwiGLU {rows} x {width}, bf16", time, 6 * size)
        time = milliseconds(partial(activation.quantize_activation, x, probs, config))
        row(f"SwiGLU {rows} x {width} and cast", time, 5.03 * size)
        time = milliseconds(partial(activation.quantize_activation_grad, grad, x, probs, config))
        row(f"SwiGLU gradient {rows} x {width} and cast", time, 14.06 * size)
        ends = torch.tensor([rows], device="cuda", dtype=torch.int32)
        both = partial(hopper.quantize_activation_grad, grad, x, probs, config, columns=quantize.E4M3, offsets_e=ends)
        row(f"SwiGLU gradient {rows} x {width} and casts with columnwise copies", milliseconds(both), 23.15 * size)


def norms() -> None:
    for rows, width in ((16384, 512), (16384, 2048), (8192, 7168)):
        x, residual, weight = draw(rows, width), draw(rows, width), draw(width)
        size, given = rows * width / 1e9, (weight, 1e-6, False)
        row(f"RMSNorm {rows} x {width}", milliseconds(partial(norm.rms_norm, x, *given)), 4 * size)
        time = milliseconds(partial(norm.rms_norm_quantized, x, None, *given))
        row(f"RMSNorm {rows} x {width} and cast", time, 5.03 * size)
        time = milliseconds(partial(norm.add_rms_norm, residual, x, *given))
        row(f"sum and RMSNorm {rows} x {width}", time, 8 * size)
        time = milliseconds(partial(norm.rms_norm_quantized, x, residual, *given))
        row(f"sum and RMSNorm {rows} x {width} and cast", time, 9.03 * size)
        row(f"cast rowwise {rows} x {width}", milliseconds(partial(quantize.quantize_rows, x)), 3.03 * size)


def transformer_engine() -> None:
    """Times casts and GEMMs of Transformer Engine. All experts have equally many rows, so that none are padded. Times
    of grouped GEMMs exclude the host's wait for the number of rows per expert."""
    library = importlib.import_module("megatron_moe.kernels.backends.transformer_engine.low_precision")
    for recipe in ("blockwise", "tensorwise"):
        config = low_precision_config(recipe)
        copies = {"rowwise": True, "columnwise": True}
        for rows, width in ((65536, 2048), (32768, 7168)):
            cast = partial(library.quantize_rows, draw(rows, width), config.inputs, **copies)
            size = (4 if recipe == "blockwise" else 6) * rows * width / 1e9  # tensorwise reads the input twice
            row(f"{recipe}, cast both {rows} x {width}", milliseconds(cast), size)
        for rows, inputs, outputs in ((8192, 4096, 4096), (8192, 7168, 4096), (32768, 2048, 7168)):
            x, grad, out = draw(rows, inputs), draw(rows, outputs), torch.zeros(outputs, inputs, device="cuda")
            weight_q = library.quantize_weight(draw(outputs, inputs), config.weights, columnwise=True)
            x_q, grad_q = (library.quantize_rows(each, config.inputs, **copies) for each in (x, grad))
            teraflop, name = 2 * rows * inputs * outputs / 1e12, f"{recipe}, dense {rows} x {inputs} x {outputs}"
            forward = partial(library.quantized_linear_forward, x_q, weight_q, None)
            row(f"{name} forward", milliseconds(forward), teraflop=teraflop)
            input_grad = partial(library.quantized_linear_input_grad, grad_q, weight_q)
            row(f"{name} input gradient", milliseconds(input_grad), teraflop=teraflop)
            weight_grad = partial(library.quantized_linear_weight_grad, grad_q, x_q, out, True)
            row(f"{name} weight gradient", milliseconds(weight_grad), teraflop=teraflop)
        for name in ("Q6 fc1", "M8 fc1", "ds4 fc1"):
            rows, experts, inputs, outputs = SHAPES[name]
            teraflop = 2 * rows * inputs * outputs / 1e12
            for layout, work in grouped_gemms(library, config, rows, experts, inputs, outputs).items():
                row(f"{recipe}, {name} {layout}", milliseconds(work), teraflop=teraflop)


def grouped_gemms(
    library: ModuleType, config: LowPrecisionConfig, rows: int, experts: int, inputs: int, outputs: int
) -> dict[str, Callable[[], object]]:
    """Times Transformer Engine's grouped GEMMs of operands that are already split by expert."""

    usage = {"rowwise": True, "columnwise": True}

    def operands(width: int) -> tuple[list[Any], list[Any]]:
        return both(library.quantize_rows(draw(rows // experts, width), config.inputs, **usage) for _ in range(experts))

    def both(made: Iterable[QuantizedTensor]) -> tuple[list[Any], list[Any]]:
        pairs = [(library._row_storage(each), library._column_storage(each)) for each in made]
        return [row for row, _ in pairs], [column for _, column in pairs]

    weights = (library.quantize_weight(draw(outputs, inputs), config.weights, columnwise=True) for _ in range(experts))
    weight, weight_columns = both(weights)
    x, x_columns = operands(inputs)
    grad, grad_columns = operands(outputs)
    out = [draw(rows // experts, outputs) for _ in range(experts)]
    grad_x = [draw(rows // experts, inputs) for _ in range(experts)]
    weight_grad = [torch.zeros(outputs, inputs, device="cuda") for _ in range(experts)]
    multiply = library._grouped_gemm
    return {
        "forward": partial(multiply, weight, x, out, "TN", accumulate=False),
        "input gradient": partial(multiply, weight_columns, grad, grad_x, "NN", accumulate=False),
        "weight gradient, added": partial(multiply, x_columns, grad_columns, weight_grad, "NT", accumulate=True),
    }


def main(argv: list[str]) -> None:
    optional = {"transformer_engine": transformer_engine}
    parts = {"ceilings": ceilings, "casts": casts, "gemms": gemms, "weight_grads": weight_grads}
    parts |= {"dense_weight_grads": dense_weight_grads, "activations": activations, "norms": norms}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*parts, *optional], default=list(parts))
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}\n\n| case | ms | rate |\n|---|---|---|")
    for name in parser.parse_args(argv).only:
        (parts | optional)[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
