"""Faults of the soak test, and the exit codes that ranks may have after each."""

import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_moe.checkpoint.directory import list_checkpoints
from megatron_moe.config.exit_codes import ExitCode

Damage = Literal["flipped bit", "truncation", "torn tracker", "stale folder"]

FOLLOWED = int(ExitCode.OTHER_RANK)
PREEMPTED = frozenset({int(ExitCode.PREEMPTED_SAVED), int(ExitCode.PREEMPTED_UNSAVED)})


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    name: str
    codes: frozenset[int] = frozenset()
    """Allowed exit codes of ranks; a negative code is a signal."""
    signal: int | None = None
    """Signal that the soak test sends to ranks."""
    num_ranks: int = 1
    """Number of ranks that receive the signal."""
    anywhere: bool = False
    """True if the signal is sent at any time including startup; otherwise it is sent during training."""
    inject: str = ""
    """kind or kind:phase of `--inject`, on a random rank and iteration."""
    survives: bool = False
    """True if the run continues until it receives SIGTERM."""
    damage: Damage | None = None
    """Damage to the checkpoint folder between two launches."""
    needs_checkpoint: bool = False


def _injected(name: str, own: int, *, inject: str = "", follow: bool = True) -> Fault:
    codes = {own, FOLLOWED} if follow else {own}
    return Fault(name=name, codes=frozenset(codes), inject=inject or name)


_HANG = int(ExitCode.HANG)
_BUG = int(ExitCode.BUG)
_NUMERICS = frozenset({int(ExitCode.NUMERICS), int(ExitCode.RERUN_FAILED), FOLLOWED})
"""RERUN_FAILED if an earlier launch had the same values at the same iteration."""

FAULTS = (
    Fault(name="SIGKILL of one rank", codes=frozenset({-9, FOLLOWED}), signal=signal.SIGKILL),
    Fault(name="SIGKILL of all ranks", codes=frozenset({-9, FOLLOWED}), signal=signal.SIGKILL, num_ranks=4),
    Fault(
        name="SIGKILL of all ranks, at any time",
        codes=frozenset({-9, FOLLOWED}),
        signal=signal.SIGKILL,
        num_ranks=4,
        anywhere=True,
    ),
    Fault(name="SIGTERM to one rank", codes=PREEMPTED, signal=signal.SIGTERM),
    Fault(name="SIGTERM to all ranks", codes=PREEMPTED, signal=signal.SIGTERM, num_ranks=4),
    Fault(name="SIGSTOP of one rank", codes=frozenset({-9, _HANG, FOLLOWED}), signal=signal.SIGSTOP),
    _injected("exception", _BUG),
    _injected("exception in backward", _BUG, inject="exception:backward"),
    _injected("out of memory", int(ExitCode.MEMORY), inject="out-of-memory:forward"),
    _injected("leaving without a word", _BUG, inject="exit"),
    _injected("abort", -6, inject="abort"),
    _injected("segmentation fault", -11, inject="segfault:backward"),
    _injected("hang", _HANG, inject="hang"),
    _injected("kill in backward", -9, inject="kill:backward"),
    _injected("kill as a save begins", -9, inject="kill:save"),
    Fault(name="not a number in the loss", codes=_NUMERICS, inject="nan-loss"),
    Fault(name="not a number in gradients", codes=_NUMERICS, inject="nan-grad"),
    _injected("not a number, but not a second time", int(ExitCode.RERUN_DISAMBIGUATE), inject="nan-once"),
    _injected("flipped bit in a weight", int(ExitCode.DRIFT), inject="bit-flip"),
    Fault(name="disk full at a save", codes=PREEMPTED, inject="disk-full:save", survives=True),
    Fault(name="flipped bit in the newest checkpoint", damage="flipped bit", needs_checkpoint=True),
    Fault(name="newest checkpoint cut short", damage="truncation", needs_checkpoint=True),
    Fault(name="torn tracker", damage="torn tracker", needs_checkpoint=True),
    Fault(name="stale folder of a save", damage="stale folder", needs_checkpoint=True),
)


def damage(kind: Damage, folder: Path, chance: random.Random) -> Path | None:
    """Damages the checkpoint folder. Returns the checkpoint that can no longer be used, if any."""
    if kind == "torn tracker":
        (folder / "latest_checkpointed_iteration.txt").write_text(chance.choice(["", "abc", "999999"]))
        return None
    if kind == "stale folder":
        stale = folder / f".tmp-iter_0000001-{chance.randrange(1 << 32):x}"
        stale.mkdir()
        (stale / "model-00000-of-00001.safetensors").write_bytes(b"half of it")
        return None
    checkpoints = list_checkpoints(folder)
    if len(checkpoints) < 2:
        return None
    path = chance.choice(sorted(checkpoints[0].path.iterdir()))
    content = bytearray(path.read_bytes())
    if kind == "truncation":
        path.write_bytes(content[: chance.randrange(len(content))])
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    return checkpoints[0].path
