"""Fault injection for tests: `--inject kind@rank:iteration[:phase]`."""

import re
from dataclasses import dataclass
from types import MappingProxyType

ALLOWED = "MEGATRON_MOE_ALLOW_FAULTS"
"""Name of the environment variable that must be 1 to allow `--inject`."""

KINDS = MappingProxyType(
    {
        "kill": "SIGKILL to the process",
        "terminate": "SIGTERM to the process",
        "stop": "SIGSTOP to the process",
        "exit": "process exit without a message",
        "abort": "abort, like an uncaught C++ exception",
        "segfault": "read from address 0",
        "exception": "unexpected Python exception",
        "out-of-memory": "CUDA out-of-memory exception",
        "hang": "endless sleep in Python",
        "locked": "endless sleep in C with the GIL held",
        "slow": "0.2 s sleep in every forward of one layer from this iteration on",
        "nan-loss": "NaN activations whenever the iteration is computed",
        "nan-once": "NaN activations, but not when the iteration is recomputed",
        "nan-grad": "NaN gradients whenever the iteration is computed",
        "bit-flip": "one flipped bit in one weight",
        "disk-full": "no space left on the device during a save",
    }
)
"""Maps each kind of fault to its description."""

PHASES = ("step", "forward", "backward", "evaluation", "save", "exit")
_FORM = re.compile(r"(?P<kind>[a-z-]+)@(?P<rank>\d+):(?P<iteration>\d+)(:(?P<phase>[a-z]+))?")


@dataclass(frozen=True)
class FaultInjectionConfig:
    """Fault to inject on one rank, every time the rank reaches `iteration`, including after a restart."""

    kind: str
    rank: int
    iteration: int
    phase: str
    """Point of injection: "step" (start of the iteration), "forward", "backward", "evaluation", "save" or "exit"."""

    def __str__(self) -> str:
        where = f"rank {self.rank}, iteration {self.iteration}, {self.phase}"
        return f"{where}: {self.kind}, {KINDS[self.kind]}"


def parse_fault(text: str) -> FaultInjectionConfig:
    """Parses `kind@rank:iteration[:phase]`, e.g. `kill@1:7:save`. Raises ValueError if the text is invalid."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form kind@rank:iteration or kind@rank:iteration:phase")
    kind = match["kind"]
    if kind not in KINDS:
        raise ValueError(f"{text!r}: unknown fault {kind!r}; use {', '.join(KINDS)}")
    phase = match["phase"] or ("save" if kind == "disk-full" else "step")
    if phase not in PHASES:
        raise ValueError(f"{text!r}: unknown phase {phase!r}; use {', '.join(PHASES)}")
    if kind == "disk-full" and phase != "save":
        raise ValueError(f"{text!r}: disk-full is injected during a save only; use phase save")
    return FaultInjectionConfig(kind, int(match["rank"]), int(match["iteration"]), phase)
