"""Faults that a run is told to suffer, so that tests see what follows: `--inject kind@rank:iteration[:phase]`."""

import re
from dataclasses import dataclass
from types import MappingProxyType

ALLOWED = "MEGATRON_MOE_ALLOW_FAULTS"
"""The variable that must be 1 in the environment of a run with `--inject`."""

KINDS = MappingProxyType(
    {
        "kill": "the process gets SIGKILL",
        "terminate": "the process gets SIGTERM",
        "stop": "the process gets SIGSTOP",
        "exit": "the process leaves without a word",
        "abort": "the process aborts, as C++ does at an uncaught exception",
        "segfault": "the process reads at address 0",
        "exception": "an exception that nobody expects",
        "out-of-memory": "the exception of a full device",
        "hang": "Python code that waits for ever",
        "locked": "C code that waits for ever and holds the interpreter",
        "slow": "a pause of 0.2 s in every forward of one layer from now on",
        "nan-loss": "activations that are not a number, whenever the iteration is computed",
        "nan-once": "the same, but not when the iteration is computed again",
        "nan-grad": "gradients that are not a number, whenever the iteration is computed",
        "bit-flip": "one bit of one weight",
        "disk-full": "files cannot grow any more, during a save",
    }
)
"""kind -> what happens."""

PHASES = ("step", "forward", "backward", "evaluation", "save", "exit")
_FORM = re.compile(r"(?P<kind>[a-z-]+)@(?P<rank>\d+):(?P<iteration>\d+)(:(?P<phase>[a-z]+))?")


@dataclass(frozen=True)
class FaultConfig:
    """One fault: on one rank, once, unless the iteration comes again after a restart."""

    kind: str
    rank: int
    iteration: int
    phase: str
    """Where in the iteration: as it begins ("step"), within its forward or backward, or in what follows it."""

    def __str__(self) -> str:
        where = f"rank {self.rank}, iteration {self.iteration}, {self.phase}"
        return f"{where}: {self.kind}, {KINDS[self.kind]}"


def parse_fault(text: str) -> FaultConfig:
    """Reads `kill@1:7` or `kill@1:7:save`. Raises ValueError with what is wrong with it."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form kind@rank:iteration or kind@rank:iteration:phase")
    kind = match["kind"]
    if kind not in KINDS:
        raise ValueError(f"{text!r}: there is no fault {kind!r}, but {', '.join(KINDS)}")
    phase = match["phase"] or ("save" if kind == "disk-full" else "step")
    if phase not in PHASES:
        raise ValueError(f"{text!r}: there is no phase {phase!r}, but {', '.join(PHASES)}")
    if kind == "disk-full" and phase != "save":
        raise ValueError(f"{text!r}: a disk is full during a save only")
    return FaultConfig(kind, int(match["rank"]), int(match["iteration"]), phase)
