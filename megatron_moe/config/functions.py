"""Score functions, activations, balancing methods and router metrics, which flags select by name.

Every entry has properties and a function: a callable, which may use methods of tensors without importing torch, or a
text "package.module:name". Functions compute with torch and are differentiated by autograd. Fused kernels compute only
built-in functions. Plain torch computes all others, which the start log lists.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megatron_moe.config.registry import ACTIVATIONS, BALANCING, METRICS, SCORE_FUNCTIONS, RegistrationProblem, resolve

Function = Callable[..., Any] | str
Options = tuple[tuple[str, Any], ...]
"""(name, value) of flags that registered functions request."""


@dataclass(frozen=True, kw_only=True)
class FunctionEntry:
    """Base class of the entries for registered functions."""

    function: Function | None = None
    options: tuple[str, ...] = ()
    """Flags, written with underscores, whose values the function receives as keyword arguments."""
    fused: bool = False
    """Whether fused kernels of `kernels/backends` compute the function; otherwise plain torch computes it."""

    def bound(self, values: Options) -> Callable[..., Any]:
        """Returns the function with its options bound as keyword arguments, taken from `values`."""
        function: Callable[..., Any] = resolve(self.function)
        return partial(function, **{n: v for n, v in values if n in self.options}) if self.options else function


@dataclass(frozen=True, kw_only=True)
class ScoreFunction(FunctionEntry):
    """Function logits [T, E] -> scores [T, E] >= 0 of the router (`--moe-router-score-function`)."""

    over_experts: bool = False
    """Whether the function normalises over experts, as softmax does. It is then applied to the K largest logits, or to
    all logits with `--moe-router-pre-softmax`. If False, experts are selected by their scores, to which a bias may be
    added, and the K selected scores are divided by their sum."""


@dataclass(frozen=True, kw_only=True)
class Activation(FunctionEntry):
    """Elementwise function x [R, F] -> [R, F] of MLPs and experts (`--activation-func`)."""


@dataclass(frozen=True, kw_only=True)
class Balancing(FunctionEntry):
    """Load-balancing method (`--moe-router-load-balancing-type`). `function` computes its auxiliary loss; it is None
    for methods without a loss, such as sinkhorn."""

    metric: str = ""
    """Name of the loss in the log."""
    per_sequence: bool = False
    """Whether the loss receives sums of each sequence (G = B sets of tokens) instead of the whole microbatch (G =
    1)."""
    is_partial: bool = False
    """Whether each tensor- or context-parallel rank computes its part, and the sum over these ranks is the loss."""
    counts_batch: bool = False
    """Whether the loss uses the choices of all microbatches of the global batch so far."""
    replaces_topk: bool = False
    """Whether the method selects experts itself. It excludes balancing losses, expert bias and groups."""
    allows_capacity: bool = True


@dataclass(frozen=True, kw_only=True)
class RouterMetric(FunctionEntry):
    """Metric `moe/NAME`, recorded for every MoE layer in every training step."""

    of: Literal["tokens", "loads"] = "tokens"
    """tokens: function (logits [T, E], ids [T, K], probs [T, K]) -> [T], one value per token; the metric is the mean
    over tokens. loads: function (shares of the experts in all choices, fp64 [n, E]) -> [n], one value per microbatch;
    the metric is the mean over microbatches."""

    def __post_init__(self) -> None:
        if self.of not in ("tokens", "loads"):
            raise RegistrationProblem(f"RouterMetric has of={self.of!r}; it must be 'tokens' or 'loads'")


_LOSSES, _LOADS = "megatron_moe.moe.balancing", "megatron_moe.moe.router_metrics"
_SCORES, _NONLINEARITIES = "megatron_moe.kernels.reference.routing", "megatron_moe.kernels.reference.backend"

SCORE_FUNCTIONS.register("softmax", ScoreFunction(function=f"{_SCORES}:softmax", over_experts=True, fused=True))
SCORE_FUNCTIONS.register("sigmoid", ScoreFunction(function="torch:sigmoid", fused=True))
SCORE_FUNCTIONS.register("renormalized_softmax", ScoreFunction(function=f"{_SCORES}:softmax"))
SCORE_FUNCTIONS.register("sqrtsoftplus", ScoreFunction(function=f"{_SCORES}:sqrtsoftplus", fused=True))

ACTIVATIONS.register("silu", Activation(function="torch.nn.functional:silu", fused=True))
ACTIVATIONS.register("gelu", Activation(function="torch.nn.functional:gelu", fused=True))
ACTIVATIONS.register("gelu_tanh", Activation(function=f"{_NONLINEARITIES}:gelu_tanh", fused=True))
ACTIVATIONS.register("quick_gelu", Activation(function=f"{_NONLINEARITIES}:quick_gelu", fused=True))
ACTIVATIONS.register("relu", Activation(function="torch.nn.functional:relu", fused=True))
ACTIVATIONS.register("squared_relu", Activation(function=f"{_NONLINEARITIES}:squared_relu", fused=True))

for _name, _entry in {
    "aux_loss": Balancing(
        function=f"{_LOSSES}:BalancingLosses.aux_loss", metric="load_balancing_loss", is_partial=True
    ),
    "seq_aux_loss": Balancing(
        function=f"{_LOSSES}:BalancingLosses.seq_aux_loss",
        metric="seq_load_balancing_loss",
        is_partial=True,
        per_sequence=True,
    ),
    "global_aux_loss": Balancing(
        function=f"{_LOSSES}:BalancingLosses.global_aux_loss",
        metric="global_load_balancing_loss",
        is_partial=True,
        counts_batch=True,
    ),
    "sinkhorn": Balancing(replaces_topk=True, allows_capacity=False),
    "quantile_balancing": Balancing(replaces_topk=True, allows_capacity=False),
    "expert_choice": Balancing(replaces_topk=True),
    "none": Balancing(),
}.items():
    BALANCING.register(_name, _entry)

METRICS.register("max_violation", RouterMetric(function=f"{_LOADS}:max_violation", of="loads"))
METRICS.register("load_entropy", RouterMetric(function=f"{_LOADS}:load_entropy", of="loads"))
METRICS.register("dead_experts", RouterMetric(function=f"{_LOADS}:dead_experts", of="loads"))
