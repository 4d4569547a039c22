"""Times linear attention on one GPU, forward and backward, and writes a table.

    python benchmarks/harness/bench_mixers.py [--cases delta-rule mamba-2 kimi] [--output-dir benchmarks]

If the package fla-core can be imported, its forward (and its backward, where it supports the GPU) is timed as well.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from megatron_moe.kernels.backends.triton.linear_attention.op import linear_attention  # noqa: E402


class MixerCase(NamedTuple):
    """Sizes of a layer's recurrence."""

    title: str
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    delta_rule: bool = True
    channel_decays: bool = False


CASES = {
    "delta-rule": MixerCase("gated delta rule, 16 key and 32 value heads of 128", 16, 32, 128, 128),
    "mamba-2": MixerCase("Mamba-2, 8 groups, 64 heads of 64, state 128", 8, 64, 128, 64, delta_rule=False),
    "kimi": MixerCase("Kimi delta attention, 32 heads of 128", 32, 32, 128, 128, channel_decays=True),
}
LENGTHS = (4096, 16384, 65536)


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a call in milliseconds, measured with CUDA events."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def draw(case: MixerCase, length: int) -> list[Tensor | None]:
    _, groups, heads, width, value_width, delta, channels = case

    def values(num_heads: int, width: int) -> Tensor:
        return torch.randn(length, 1, num_heads, width, device="cuda", dtype=torch.bfloat16)

    q, k = (torch.nn.functional.normalize(values(groups, width), dim=-1).requires_grad_() for _ in range(2))
    v = values(heads, value_width).requires_grad_()
    decay = (-torch.rand(length, 1, heads, *([width] if channels else []), device="cuda")).requires_grad_()
    beta = torch.rand(length, 1, heads, device="cuda").requires_grad_() if delta else None
    return [q, k, v, decay, beta]


def ours(values: list[Tensor | None]) -> Tensor:
    q, k, v, decay, beta = values
    return linear_attention(q, k, v, decay, beta, None, 128**-0.5, None if beta is None else 1e-6)  # type: ignore[arg-type, union-attr]


def fla(values: list[Tensor | None]) -> Tensor:
    from megatron_moe.kernels.backends import fla

    q, k, v, decay, beta = values
    return fla.linear_attention(q, k, v, decay, beta, None, 128**-0.5, None if beta is None else 1e-6)  # type: ignore[arg-type, union-attr]


def times(function: Callable[[list[Tensor | None]], Tensor], values: list[Tensor | None]) -> tuple[str, str]:
    """Times of forward and backward, or the reasons why they could not be measured."""
    try:
        with torch.no_grad():
            forward = f"{milliseconds(lambda: function(values)):.3f}"
    except Exception as error:  # noqa: BLE001  a library may reject the GPU
        return f"{type(error).__name__}: {error}"[:80].replace("\n", " "), ""
    try:
        out = function(values)
        grad, leaves = torch.randn_like(out), [x for x in values if x is not None]
        backward = milliseconds(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))
    except Exception as error:  # noqa: BLE001
        return forward, f"{type(error).__name__}: {error}"[:80].replace("\n", " ")
    return forward, f"{backward:.3f}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args(argv)
    # fla-core last: it compares many configurations of each kernel, which takes minutes
    found: dict[tuple[str, int], list[str]] = {(name, length): [] for name in options.cases for length in LENGTHS}
    for function in (ours, fla):
        for (name, length), cells in found.items():
            cells.extend(times(function, draw(CASES[name], length)))
            print(function.__name__, name, f"{length:,}", *cells[-2:], flush=True)
            write(options.output_dir, found)
    return 0


def write(folder: Path, found: Mapping[tuple[str, int], Sequence[str]]) -> None:
    """Writes the table of the measured times, so that an interrupted run leaves one."""
    machine = torch.cuda.get_device_name().replace("NVIDIA ", "").lower().replace(" ", "-")
    lines = [
        f"# Linear attention on {machine}",
        "",
        f"{date.today()}, torch {torch.__version__}, `python benchmarks/harness/bench_mixers.py`. One sequence,",
        "bf16; ms, medians of 10 calls.",
        "",
        "| op | tokens | forward | backward | fla-core forward | fla-core backward |",
        "|---|---|---|---|---|---|",
    ]
    for (name, length), cells in found.items():
        lines.append(f"| {CASES[name].title} | {length:,} | {' | '.join([*cells, *[''] * (4 - len(cells))])} |")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{date.today()}-{machine}-mixers.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
