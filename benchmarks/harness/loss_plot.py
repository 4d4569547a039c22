"""Plots loss curves and, below them, their differences from a reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class PlottedCurve:
    """One run in a plot of `draw_losses`."""

    name: str
    color: str
    losses: Mapping[int, float]
    """Loss by iteration."""
    differences: Mapping[int, float] = field(default_factory=dict)
    """Difference from the reference by iteration; empty for the reference itself."""
    width: float = 1.2


def draw_losses(
    columns: Mapping[str, Sequence[PlottedCurve]], path: Path, *, loss: str, difference: str, log: bool = False
) -> None:
    """Plots the curves of every column (title -> curves) and their differences, and writes the picture to `path`.
    `loss`, `difference`: labels of the axes. `log`: whether the axis of differences is logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = 6 * max(len(columns), 1.4), 8
    figure, axes = pyplot.subplots(2, len(columns), figsize=size, height_ratios=(2, 1), sharex=True, squeeze=False)
    for (title, curves), above, below in zip(columns.items(), *axes, strict=True):
        for curve in curves:
            style = {"color": curve.color, "linewidth": curve.width}
            above.plot(list(curve.losses), list(curve.losses.values()), label=curve.name, **style)
            below.plot(list(curve.differences), list(curve.differences.values()), **style)
        if log:
            below.set_yscale("log")
        above.set(title=title, ylabel=loss)
        above.legend(fontsize=8)
        below.set(ylabel=difference, xlabel="iteration")
        for each in (above, below):
            each.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
