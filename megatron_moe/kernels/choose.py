"""From wishes and the device to a bundle: which backend computes which op, and why.

A backend is one file in `backends/`. Its constants NAME, NEEDS (modules it imports) and PROVIDES (ops) are read without
importing it; then its `judge(op, device, dtype) -> Judgement` says how well it serves each op. `auto` takes the best
fit, and plain torch where none is better. A backend with BY_WISH = True stands outside `auto`: it is imported only when
it is asked for by name.
"""

import ast
import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from megatron_moe.kernels import reference
from megatron_moe.kernels.bundle import OPS, Bundle, Choice, Fit, Judgement
from megatron_moe.specs.exitcodes import EnvironmentProblem
from megatron_moe.specs.run import KernelSpec

BACKENDS = Path(__file__).parent / "backends"
AUTO = "auto"


@dataclass(frozen=True)
class Backend:
    """What a backend file says about itself before it is imported."""

    name: str
    needs: tuple[str, ...]
    provides: tuple[str, ...]
    by_wish: bool
    module: str

    def missing(self) -> tuple[str, ...]:
        """Modules that it needs and that are not installed."""
        return tuple(name for name in self.needs if not is_installed(name))

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what it would be a part of is missing
        return False


def choose(spec: KernelSpec, device: torch.device, dtype: torch.dtype) -> Bundle:
    """The bundle for a run whose parameters have `dtype` and live on `device`; `bundle.table()` explains it.

    Raises `EnvironmentProblem` when a wish names an unknown op or backend, or one that cannot serve.
    """
    backends = {backend.name: backend for backend in discover(BACKENDS)}
    wishes = dict(spec.per_op)
    check_names(spec, backends)
    functions, choices = {}, []
    for op in OPS:
        wish = wishes.get(op, spec.backend)
        if wish == AUTO:
            choice = best(op, backends, device, dtype)
        else:
            choice = grant(op, wish, backends, device, dtype, required=op in wishes)
        source = reference if choice.backend == reference.NAME else backends[choice.backend].load()
        functions[op] = getattr(source, op)
        choices.append(choice)
    return Bundle.of(functions, tuple(choices))


def discover(folder: Path) -> list[Backend]:
    """Every backend file of a folder, by name. Imports none of them."""
    paths = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
    return [read(path) for path in paths]


def read(path: Path) -> Backend:
    """Reads the constants of a backend file from its text."""
    constants = {}
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in ("NAME", "NEEDS", "PROVIDES", "BY_WISH"):
                constants[name] = ast.literal_eval(statement.value)
    by_wish = constants.pop("BY_WISH", False)
    assert len(constants) == 3, f"{path} must define NAME, NEEDS and PROVIDES, has {sorted(constants)}"
    unknown = set(constants["PROVIDES"]) - set(OPS)
    assert not unknown, f"{path} provides ops that the contract does not know: {sorted(unknown)}"
    module = f"{__package__}.backends.{path.stem}"
    return Backend(constants["NAME"], constants["NEEDS"], constants["PROVIDES"], by_wish, module)


def best(op: str, backends: dict[str, Backend], device: torch.device, dtype: torch.dtype) -> Choice:
    """The backend that fits best; plain torch where none is better, with the reasons of those that are not."""
    able = {name: backend for name, backend in backends.items() if op in backend.provides and not backend.by_wish}
    judged = {name: judge(op, backend, device, dtype) for name, backend in able.items()}
    winner = max(judged, key=lambda name: judged[name].fit, default=None)
    if winner is not None and judged[winner].fit >= Fit.BETTER:
        return Choice(op, winner, judged[winner].reason)
    against = "".join(f"; {name}: {judgement.reason}" for name, judgement in judged.items())
    return Choice(op, reference.NAME, reference.REASON + against)


def grant(
    op: str, wish: str, backends: dict[str, Backend], device: torch.device, dtype: torch.dtype, *, required: bool
) -> Choice:
    """The wished backend. `required` False: the wish was for the whole bundle, and ops that the backend does not have
    are plain torch."""
    if wish == reference.NAME:
        return Choice(op, wish, reference.REASON)
    backend = backends[wish]
    if not required and op not in backend.provides:
        return Choice(op, reference.NAME, f"{reference.REASON}; {wish} has no {op}")
    judgement = judge(op, backend, device, dtype)
    if judgement.fit is Fit.NO:
        able = [name for name, b in backends.items() if judge(op, b, device, dtype).fit is not Fit.NO]
        raise EnvironmentProblem(
            f"Kernel backend '{wish}' cannot compute '{op}' in {dtype_name(dtype)} on {device.type}: "
            f"{judgement.reason}. It can be computed by {listed([AUTO, reference.NAME, *able])}, "
            f"for instance with --kernel-per-op {op}={AUTO}."
        )
    return Choice(op, wish, f"asked for; {judgement.reason}")


def judge(op: str, backend: Backend, device: torch.device, dtype: torch.dtype) -> Judgement:
    """What a backend says about an op; it is imported only when everything it needs is installed."""
    if op not in backend.provides:
        return Judgement(Fit.NO, f"it has no {op}")
    missing = backend.missing()
    if missing:
        return Judgement(Fit.NO, f"it needs {', '.join(missing)}, not installed here")
    judgement: Judgement = backend.load().judge(op, device, dtype)
    return judgement


def check_names(spec: KernelSpec, backends: dict[str, Backend]) -> None:
    """Refuses wishes for ops or backends that do not exist."""
    known = [AUTO, reference.NAME, *backends]
    for op, wish in spec.per_op:
        if op not in OPS:
            raise EnvironmentProblem(f"Kernel op '{op}' does not exist; the ops are {listed(OPS)}.")
        if wish not in known:
            raise EnvironmentProblem(f"Kernel backend '{wish}', asked for '{op}', does not exist; use {listed(known)}.")
    if spec.backend not in known:
        raise EnvironmentProblem(f"Kernel backend '{spec.backend}' does not exist; use {listed(known)}.")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed(names: Iterable[str]) -> str:
    """a, b or c"""
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} or {last}" if most else last
