"""Notes on GEMM sizes that the fast GPU kernels do not support, shown at start and by --dry-run.

On Hopper and later, GEMM kernels load operands with TMA, which requires row strides that are multiples of 16 bytes: 8
elements of bf16 or fp16. For other sizes, cuBLAS selects kernels written for older GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from arguments.flags import Flags
from megatron_moe.config.run import RunPlan

MULTIPLE = 8
_PADDING = 128


@dataclass(frozen=True)
class Size:
    """Dimension of the model that determines a dimension of GEMM operands."""

    flag: str
    value: int
    ranks: int = 1
    """Number of ranks over which the dimension is sharded."""

    @property
    def fits(self) -> bool:
        return self.value % (MULTIPLE * self.ranks) == 0

    def __str__(self) -> str:
        per_rank = f" ({self.value // self.ranks} on each of {self.ranks} ranks)" if self.ranks > 1 else ""
        return f"{self.flag} {self.value}{per_rank}"


def slow_sizes(flags: Flags, plan: RunPlan) -> Iterator[str]:
    """Yields notes on dimensions that slow down GEMMs in bf16 or fp16 on a GPU."""
    dtype = plan.precision.params
    if dtype not in ("bf16", "fp16") or plan.device == "cpu":
        return
    rows = plan.model.vocab_size // plan.parallel.tp
    if rows % MULTIPLE:
        yield (
            f"the output head has {rows:,} rows per rank, not a multiple of {MULTIPLE}: its {dtype} GEMMs cannot "
            "use the fast GPU kernels (with 151,935 rows instead of 151,936, a step of q6 on one H200 took 755 ms "
            f"instead of 361); {_padding(flags, plan)}"
        )
    slow = [size for size in dict.fromkeys(_sizes(plan)) if not size.fits]
    if slow:
        yield (
            f"sizes that are not multiples of {MULTIPLE}{' per rank' if any(size.ranks > 1 for size in slow) else ''}: "
            f"{', '.join(map(str, slow))}; {dtype} GEMMs of these sizes cannot use the fast GPU kernels, "
            "and torch's grouped GEMM rejects them"
        )


def _padding(flags: Flags, plan: RunPlan) -> str:
    unit = _PADDING * plan.parallel.tp
    if flags.padded_vocab_size is not None:
        return f"--padded-vocab-size {-(-plan.model.vocab_size // unit) * unit} avoids this"
    without = "" if flags.pad_vocab_size else ", without --disable-pad-vocab-size,"
    return f"--make-vocab-size-divisible-by {_PADDING}{without} avoids this"


def _sizes(plan: RunPlan) -> Iterator[Size]:
    """Yields the GEMM dimensions of all layers in execution order. Equal layers yield the same dimensions again."""
    yield Size("--hidden-size", plan.model.hidden_size)
    for layer in plan.model.layers:
        for component in (layer.mixer, layer.feed_forward):
            yield from (Size(*size) for size in component.gemm_sizes(plan.parallel))
