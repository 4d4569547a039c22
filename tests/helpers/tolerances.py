"""All tolerances of the tests, each with its reason.

The relative error of a tensor is max|actual - expected| / max|expected|: one number per tensor, because small elements
have no more digits than the sums of the large ones. A test that needs another tolerance adds a constant here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TensorLike = Any
"""A tensor, an array, a number, or nested sequences of numbers."""


@dataclass(frozen=True)
class Tolerance:
    """max|actual - expected| <= max(atol, rtol * max|expected|), per tensor."""

    rtol: float
    atol: float
    why: str

    def check(self, actual: TensorLike, expected: TensorLike, what: str = "value") -> None:
        """Asserts equal shapes and close values. NaN is never close; an infinity is close only to itself."""
        problem = self.problem(actual, expected, what)
        assert problem is None, problem

    def check_all(
        self, actual: Mapping[str, TensorLike], expected: Mapping[str, TensorLike], what: str = "values"
    ) -> None:
        """Asserts equal names and close values; lists every pair that is not."""
        missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
        assert not missing and not extra, f"{what}: missing {missing}, not expected {extra}"
        problems = [p for name in expected if (p := self.problem(actual[name], expected[name], name)) is not None]
        assert not problems, f"{what}: {len(problems)} of {len(expected)} differ\n" + "\n".join(problems)

    def problem(self, actual: TensorLike, expected: TensorLike, what: str) -> str | None:
        """Message about the difference, or None if the values are close."""
        a, e = _wide(actual), _wide(expected)
        if a.shape != e.shape:
            return f"{what}: shape {tuple(a.shape)}, expected {tuple(e.shape)}"
        if a.numel() == 0:
            return None
        same = a == e
        difference = torch.where(same, torch.zeros_like(a), (a - e).abs())
        num_wild = int((~torch.isfinite(difference.double())).sum())
        if num_wild:
            return f"{what}: {num_wild} of {a.numel()} elements are not finite on one side"
        finite = e[torch.isfinite(e.double())]
        reference = float(finite.abs().max()) if finite.numel() else 0.0
        largest = float(difference.max())
        if largest <= max(self.atol, self.rtol * reference):
            return None
        where = tuple(int(i) for i in torch.unravel_index(difference.argmax(), a.shape))
        relative = largest / reference if reference else float("inf")
        return (
            f"{what}: relative error {relative:.3e} (allowed {self.rtol:.1e}), largest difference {largest:.3e} "
            f"(floor {self.atol:.1e}) at {where}: {a[where].item()!r}, expected {e[where].item()!r}"
        )


def _wide(value: TensorLike) -> Tensor:
    """Value as an int64 or float64 CPU tensor, so that the comparison adds no error."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
    elif isinstance(value, float | int | bool):
        tensor = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    else:
        tensor = torch.as_tensor(value, dtype=None if hasattr(value, "dtype") else _number_dtype(value))
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _number_dtype(value: Sequence[Any]) -> torch.dtype:
    """float64 for nested sequences with a float, which torch would read in single precision."""
    flat: list[Any] = [value]
    while flat:
        item = flat.pop()
        if isinstance(item, float):
            return torch.float64
        if isinstance(item, list | tuple):
            flat.extend(item)
    return torch.int64


EXACT = Tolerance(0.0, 0.0, "The same order of sums, or no arithmetic: bitwise equal.")

FP64_LAYOUT = Tolerance(
    1e-12,
    1e-14,
    "Another order of sums: 2,700 times the measured fp64 noise of 4e-16, and 2e7 times below a 0.1 % error.",
)

FP64_REF = Tolerance(1e-12, 1e-14, "The same formula written twice, in double precision.")

FP32_REF = Tolerance(
    2e-6, 1e-7, "One component in single precision: about 16 units in the last place of its largest value."
)

FP32_MODEL = Tolerance(
    1e-5, 1e-5, "A whole model in single precision, where every layer adds the noise of a component."
)

FP32_PARITY = Tolerance(
    1e-5,
    1e-8,
    "A whole model and its gradients against another program in single precision, relative to each tensor's largest "
    "value. Measured worst: 1.6e-6, but for the gradient of GPT-OSS's sinks, a sum that cancels to 3e-3: 4.5e-6.",
)

FP32_LAYOUT = Tolerance(
    1e-3,
    0.0,
    "Three steps of a layout in single precision against one rank in double. Measured: up to 1e-5 in losses, norms and "
    "gradients, 1.1e-4 in weights, where AdamW divides a gradient near zero by its size. Mistakes are tested in fp64.",
)

BF16_KERNEL = Tolerance(1.6e-2, 1e-3, "One bf16 kernel against fp32 of the same rounded inputs: four units of 2^-8.")

LINEAR_ATTENTION_BF16 = Tolerance(
    3e-2,
    1e-3,
    "Linear attention in bf16 against fp64: states, solutions of the delta rule's systems and their gradients are "
    "rounded to 2^-8 between chained products.",
)

BF16_LAYOUT = Tolerance(
    2e-2,
    1e-3,
    "An MoE layer in bf16 over ranks against one rank with the same kernels: as BF16_KERNEL, and one unit of 2^-8 more "
    "for the sums of a token's outputs on each rank, which are sent in bf16.",
)

FP8_KERNEL = Tolerance(
    6e-3,
    0.0,
    "One product of FP8 operands against fp64 of the same values: one unit of 2^-8 for bf16 results, and half of one "
    "for sums of 128 products with about 14 bits in tensor cores.",
)

FP8_SUM = Tolerance(
    2e-3, 0.0, "As FP8_KERNEL, but with results in fp32: only the sums of 128 products in tensor cores are rounded."
)

BF16_BLOCKS = Tolerance(
    2e-2,
    1e-3,
    "Attention in parts, in bf16: four units of 2^-8 as of one kernel, and one for what a library rounds of every part "
    "before it is added in fp32: half a unit of the part.",
)

BF16_RUN = Tolerance(3e-2, 0.0, "Losses of two bf16 runs over 50 steps, whose routing may differ: a smoke test only.")

SAVED_BYTES = Tolerance(
    5e-3, 0.0, "Closed-form bytes against saved bytes. Measured worst 2.2e-3: masks of plain torch's routing."
)

CLOSED_FORM = Tolerance(
    2e-3, 0.0, "Closed-form bytes against allocated tensors: padding of buffers and bucket boundaries."
)

PUBLISHED_MEMORY = Tolerance(5e-2, 0.0, "A published figure with three digits, of another program.")

SIMULATED_ROUTING = Tolerance(
    1e-2, 1e-12, "A mean or a deviation over 60,000 random tokens: three standard errors of the widest are 0.9 %."
)

PREDICTED_PEAK = Tolerance(
    2e-2, 0.0, "Closed-form peak memory against the allocator's. Measured on H200: 1e-3 for recipes of one GPU."
)
