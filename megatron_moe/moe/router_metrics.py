"""Expert load metrics of the router of each layer, recorded on the device in every training step."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_moe.config.functions import Options
from megatron_moe.config.registry import METRICS, RegistrationProblem
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.parallel.collectives import sum_counts
from megatron_moe.parallel.context import ProcessGroup


def record_load(
    metrics: MetricAccumulator,
    layer: int,
    counts_E: Tensor,
    group: ProcessGroup,
    options: Options = (),
    *,
    dropless: bool = False,
) -> None:
    """Records load metrics of one microbatch, whose tokens are split over the ranks of `group`.

    `counts_E`: choices per expert on this rank, dropped ones included. `dropless`: True if choices are never dropped.
    moe/max_violation      largest load / mean load - 1 (arXiv 2408.15664), with load = number of choices of an expert
    moe/load_entropy       entropy of the experts' load shares, divided by log E: 1 if equal, 0 if one expert has all
    moe/dead_experts       number of experts without tokens
    moe/tokens_per_expert  number of tokens of each expert [E], summed over microbatches and ranks
    moe/dropped_tokens     0 if `dropless`; otherwise the caller records it with `record_drops`
    Metrics that imported files register for loads are recorded too. `options`: flags that these request.
    """
    metrics.collect(
        "moe/load", layer, counts_E, partial(_record_loads, group=group, options=options, dropless=dropless)
    )


def record_loss(metrics: MetricAccumulator, name: str, layer: int, terms_GE: Tensor, factor: int) -> None:
    """Records `factor` times the sum of the terms of a loss in one microbatch as metric `name`."""
    fold = partial(_record_losses, name=name, factor=factor)
    metrics.collect(f"terms of {name} {tuple(terms_GE.shape)}", layer, terms_GE, fold)


def _record_losses(
    metrics: MetricAccumulator, numbers: dict[int, int], terms_nGE: Tensor, *, name: str, factor: int
) -> None:
    """Records a loss of many layers and microbatches at once."""
    losses_n = terms_nGE.double().sum(dim=(1, 2)) * factor
    for layer, own_n in zip(numbers, losses_n.split(list(numbers.values())), strict=True):
        metrics.record(name, own_n.sum(), layer=layer, count=own_n.new_full((), len(own_n)))


def max_violation(shares_nE: Tensor) -> Tensor:
    return (shares_nE.amax(dim=1) * shares_nE.shape[1] - 1).clamp(min=0)


def load_entropy(shares_nE: Tensor) -> Tensor:
    # the clamp makes 0 * log(0) equal to 0
    return -(shares_nE * shares_nE.clamp(min=1e-300).log()).sum(dim=1) / math.log(max(shares_nE.shape[1], 2))


def dead_experts(shares_nE: Tensor) -> Tensor:
    return (shares_nE == 0).sum(dim=1)


def _record_loads(
    metrics: MetricAccumulator,
    numbers: dict[int, int],
    counts_nE: Tensor,
    *,
    group: ProcessGroup,
    options: Options,
    dropless: bool,
) -> None:
    """Records the load metrics of many layers and microbatches at once."""
    # collective over tp x cp: 4 * E bytes per layer and microbatch, in one call for all of them
    loads_nE = sum_counts(counts_nE, group).double()
    shares_nE = loads_nE / loads_nE.sum(dim=1, keepdim=True).clamp(min=1)
    values = {
        name: _one_value_each(name, function(shares_nE), len(shares_nE), "row of shares [n, E]")
        for name, function in _functions_of("loads", options)
    }
    end = 0
    for layer, number in numbers.items():
        own_rows, end = slice(end, end + number), end + number
        count = loads_nE.new_full((), number)
        for name, value_n in values.items():
            metrics.record(name, value_n[own_rows].sum(), layer=layer, count=count)
        tokens_E = counts_nE[own_rows].sum(dim=0)
        metrics.record("moe/tokens_per_expert", tokens_E, layer=layer, reduction="sum")
        if dropless:
            record_drops(metrics, layer, tokens_E.new_zeros(()), tokens_E.sum())


def record_drops(metrics: MetricAccumulator, layer: int, dropped: Tensor, total: Tensor) -> None:
    """Records moe/dropped_tokens: the fraction of dropped choices, or of unselected tokens with expert choice."""
    metrics.record("moe/dropped_tokens", dropped, layer=layer, count=total)


TokenMetrics = Sequence[tuple[str, Callable[..., Tensor]]]
"""(name in the log, function) of each registered token metric."""


def token_metrics(options: Options) -> TokenMetrics:
    """Registered token metrics, bound to the flags that they request from `options`."""
    return _functions_of("tokens", options)


@torch.no_grad()
def record_tokens(
    metrics: MetricAccumulator,
    layer: int,
    functions: TokenMetrics,
    routed: tuple[Tensor, Tensor, Tensor],
    valid_T: Tensor | None,
) -> None:
    """Records the mean of every metric over valid tokens. `routed`: logits [T, E], ids [T, K] and probabilities [T, K]
    of this rank's tokens."""
    logits_TE = routed[0]
    count = logits_TE.new_full((), len(logits_TE), dtype=torch.float64) if valid_T is None else valid_T.sum()
    for name, function in functions:
        value_T = _one_value_each(name, function(*routed), len(logits_TE), "token")
        value_T = value_T if valid_T is None else torch.where(valid_T, value_T, 0)
        metrics.record(name, value_T.double().sum(), layer=layer, count=count)


def _one_value_each(name: str, values: Tensor, number: int, of: str) -> Tensor:
    """Returns the values of a registered metric. Raises RegistrationProblem if they are not `number` values."""
    if values.shape == (number,):
        return values
    shape = list(values.shape)
    raise RegistrationProblem(
        f"the metric {name} must return one value per {of}, shape [{number}], but returns {shape}"
    )


def _functions_of(kind: str, options: Options) -> list[tuple[str, Callable[..., Tensor]]]:
    entries = [(f"moe/{name}", METRICS.get(name)) for name in METRICS.names()]
    return [(name, entry.bound(options)) for name, entry in entries if entry.of == kind]
