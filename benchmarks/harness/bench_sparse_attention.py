"""Compares the time of attention to selected keys (DSA) with dense attention on one GPU, and writes a table.

    python benchmarks/harness/bench_sparse_attention.py [--output-dir benchmarks]

Sparse attention is in the absorbed form, with one key-value head of 512 + 64 channels. Dense attention is causal
multi-latent attention with as many heads, of 192 channels for q and k and 128 for v, computed by cuDNN.
"""

import argparse
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from benchmarks.harness.bench_mixers import milliseconds  # noqa: E402
from megatron_moe.kernels.backends.torch_native import cudnn  # noqa: E402
from megatron_moe.kernels.backends.triton.sparse_attention.op import sparse_attention  # noqa: E402

LENGTHS = (4096, 16384, 65536)
REPEATS = 3
TOPK = 2048
VALUE, REST = 512, 64


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def chosen(length: int) -> Tensor:
    """Selects keys for every query, spread evenly over those that the causal mask allows: int32 [length, 1, TOPK]."""
    positions = torch.arange(length, device="cuda")[:, None]
    places = torch.arange(TOPK, device="cuda")
    spread = (places * (positions + 1)) // TOPK
    return torch.where(positions < TOPK, torch.where(places <= positions, places, -1), spread).int()[:, None]


def sparse(length: int, heads: int) -> Iterator[float]:
    """Yields the milliseconds of the forward and of the backward of sparse attention."""
    q, kv = draw(length, 1, heads, VALUE + REST).requires_grad_(), draw(length, 1, VALUE + REST).requires_grad_()
    ids = chosen(length)
    with torch.no_grad():
        yield milliseconds(lambda: sparse_attention(q, kv, ids, None, VALUE, 0.1), REPEATS)
    out, _ = sparse_attention(q, kv, ids, None, VALUE, 0.1)
    grad = torch.randn_like(out)
    yield milliseconds(lambda: torch.autograd.grad(out, (q, kv), grad, retain_graph=True), REPEATS)


def dense(length: int, heads: int) -> Iterator[float]:
    q, k, v = (draw(length, 1, heads, width) for width in (192, 192, 128))
    yield milliseconds(lambda: cudnn.forward(q, k, v, 0.1, causal=True), REPEATS)
    out, lse = cudnn.forward(q, k, v, 0.1, causal=True)
    grad = torch.randn_like(out)
    yield milliseconds(lambda: cudnn.backward(grad, q, k, v, out, lse, 0.1, causal=True), REPEATS)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks"))
    options = parser.parse_args(argv)
    machine = torch.cuda.get_device_name().replace("NVIDIA ", "").lower().replace(" ", "-")
    lines = [
        f"# Sparse attention on {machine}",
        "",
        f"{date.today()}, torch {torch.__version__}, `python benchmarks/harness/bench_sparse_attention.py`. One",
        f"sequence, bf16, {TOPK} keys per query; ms, medians of {REPEATS} calls. TFLOP/s: chosen pairs in absorbed",
        "form.",
        "",
        "| heads | tokens | forward | TFLOP/s | backward | TFLOP/s | dense forward | dense backward |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for heads in (64, 128):
        for length in LENGTHS:
            (forward, backward), of_dense = sparse(length, heads), tuple(dense(length, heads))
            pairs = heads * (TOPK * length - TOPK * TOPK / 2) * 2e-9
            rates = pairs * (2 * VALUE + REST) / forward, pairs * (5 * VALUE + 3 * REST) / backward
            cells = heads, f"{length:,}", forward, round(rates[0]), backward, round(rates[1]), *of_dense
            shown = (f"{x:.3f}" if isinstance(x, float) else str(x) for x in cells)
            lines.append(f"| {' | '.join(shown)} |")
            print(lines[-1], flush=True)
            torch.cuda.empty_cache()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / f"{date.today()}-{machine}-sparse-attention.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
