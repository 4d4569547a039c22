"""Where the time of a step goes: GPU kernels by what they do, and the gaps between them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KINDS: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl"),
    ("attention", r"cudnn.*(sdpa|fprop|bprop|flash)|flash_(fwd|bwd)|fmha|attention|key_grads|query_grads|softmax_warp"),
    (
        "router",
        r"router|(route|gate)_(for|back)ward|topk|count_experts|radixSort|bitonicSort|DeviceRadix|sort|searchsorted",
    ),
    (
        "permute",
        r"permute|sort_rows|place_rows|pick_values|gather_rows|sum_choices|index_select|indexSelect|gather|scatter|index_elementwise",
    ),
    ("expert matrices", r"grouped|GroupProblemShape|ptr_array|PtrArray|expert_grad"),
    ("dense matrices", r"nvjet|gemm|cutlass|splitK|cublas"),
    ("head and loss", r"cross_entropy|log_softmax|LogSoftMax|nll_loss|SoftMaxForward|SoftMaxBackward"),
    ("optimizer", r"adamw|FusedAdam|sum_of_squares|NormTwoOps|multi_tensor"),
    (
        "norms and positions",
        r"rms_norm|layer_norm|rope|rotate_heads|turn_heads|join_keys|part_keys|sum_shares|norm_kernel|Norm",
    ),
    ("activation", r"swiglu|activation|silu"),
    ("copies and fills", r"Memcpy|Memset|copy_kernel|FillFunctor|fill"),
    ("elementwise", r"elementwise|reduce_kernel|vectorized|CatArray"),
)
"""Kinds in the order in which their patterns are tried; the first that is found in a kernel's name is its kind."""


@dataclass(frozen=True)
class KernelEvent:
    """One kernel on the device; times in microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Share:
    """What one kind, or one kernel, took of a step."""

    name: str
    milliseconds: float
    """Per step."""
    calls: float
    """Per step."""


def kind_of(name: str) -> str:
    """The kind of a kernel by its name; "other" when no pattern is found in it."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def shares_of_kinds(events: Sequence[KernelEvent], num_steps: int) -> list[Share]:
    """Milliseconds per step of every kind, the longest first, and last the time in which no kernel ran."""
    shares = _sum(((kind_of(event.name), event) for event in events), num_steps)
    return [*shares, Share("idle", idle_microseconds(events) / 1e3 / num_steps, 0.0)]


def shares_of_kernels(events: Sequence[KernelEvent], num_steps: int) -> list[Share]:
    """Milliseconds per step of every kernel by name, the longest first."""
    return _sum(((event.name, event) for event in events), num_steps)


def idle_microseconds(events: Sequence[KernelEvent]) -> float:
    """Time between the first and the last kernel in which none ran, on whatever stream."""
    idle, busy_until = 0.0, None
    for event in sorted(events, key=lambda event: event.start):
        if busy_until is not None and event.start > busy_until:
            idle += event.start - busy_until
        busy_until = event.end if busy_until is None else max(busy_until, event.end)
    return idle


def _sum(named: Iterable[tuple[str, KernelEvent]], num_steps: int) -> list[Share]:
    times: dict[str, float] = {}
    calls: dict[str, int] = {}
    for name, event in named:
        times[name] = times.get(name, 0.0) + event.duration
        calls[name] = calls.get(name, 0) + 1
    shares = [Share(name, time / 1e3 / num_steps, calls[name] / num_steps) for name, time in times.items()]
    return sorted(shares, key=lambda share: -share.milliseconds)
