"""Selects the backend of every op from the user's requests and the device, and reports the reasons.

A backend is a file `backends/<name>.py` or a package `backends/<name>/backend.py`. It provides the ops that it defines
or imports by name. These names and its constants NAME and NEEDS (modules that it imports) are read without importing
it, and so are DEVICES, the types of the devices on which it runs (by default all), and INTERPRETED_ON, those on which
Triton's interpreter runs it (TRITON_INTERPRET=1). Its function `support(op, device, dtype) -> Support` rates an op. The
request `auto` selects the backend with the best rating if it is better than plain torch. A backend with ON_REQUEST =
True is excluded from `auto` and imported only if it is requested by name. RECIPES are the FP8 and FP4 recipes
(`LowPrecisionConfig.name`) for which a backend provides `LOW_PRECISION_OPS`, and BY_NAME those of them that it computes
only if the request names the op, because they synchronise with the device.
"""

import ast
import importlib
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_moe.config.exit_codes import ConfigProblem, EnvironmentProblem
from megatron_moe.config.precision import LowPrecisionConfig, quantization_recipe
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.backend_names import AUTO, BACKENDS, backend_files
from megatron_moe.kernels.kernel_set import LOW_PRECISION_OPS, OPS, KernelSet, Priority, Selection, Support
from megatron_moe.kernels.reference import backend as reference

EMULATED = "--emulate-low-precision: dequantises the operands"


@dataclass(frozen=True)
class Backend:
    """Kernel backend with the constants of its file, which are read without importing it."""

    name: str
    needs: tuple[str, ...]
    provides: tuple[str, ...]
    on_request: bool
    recipes: tuple[str, ...]
    by_name: tuple[str, ...]
    module: str
    devices: tuple[str, ...] = ()
    interpreted_on: tuple[str, ...] = ()

    def missing(self) -> tuple[str, ...]:
        """Required modules that are not installed."""
        return tuple(name for name in self.needs if not is_installed(name))

    def for_recipe(self, recipe: str) -> "Backend":
        """Returns this backend, without `LOW_PRECISION_OPS` if it does not implement the recipe."""
        return self if recipe in self.recipes else replace(self, provides=())

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def select_kernels(
    config: KernelConfig, device: torch.device, dtype: torch.dtype, low_precision: LowPrecisionConfig | None = None
) -> KernelSet:
    """Selects the kernels for parameters of `dtype` on `device`; their `table()` lists all selections and reasons.

    Ops that only FP8 and FP4 GEMMs need are plain torch, and not listed, if `low_precision` is None.

    Raises `ConfigProblem` if a request names an unknown op. Raises `EnvironmentProblem` if a requested backend does not
    support its op, or if the device does not support the FP8 or FP4 recipe and `low_precision` does not emulate it.
    """
    if low_precision is not None and not low_precision.emulate:
        check_device(low_precision.recipe, device)
    backends = {backend.name: backend for backend in discover_backends(BACKENDS)}
    requests = dict(config.kernel_per_op)
    _check_ops(requests)
    functions, choices = {}, []
    for op in OPS:
        able = backends
        if op in LOW_PRECISION_OPS:
            if low_precision is None or low_precision.emulate:
                functions[op] = getattr(reference, op)
                choices += [] if low_precision is None else [Selection(op, reference.NAME, EMULATED)]
                continue
            able = {name: backend.for_recipe(low_precision.name) for name, backend in backends.items()}
        request = requests.get(op, config.kernel_backend)
        if request == AUTO:
            choice = select_best(op, able, device, dtype)
        else:
            choice = select_requested(op, request, able, device, dtype, required=op in requests)
        source = reference if choice.backend == reference.NAME else backends[choice.backend].load()
        functions[op] = getattr(source, op)
        choices.append(choice)
    return KernelSet.of(functions, tuple(choices))


def discover_backends(folder: Path) -> list[Backend]:
    """Reads the constants of every backend in a folder, sorted by name. Imports no backend."""
    return sorted((read_backend(path) for path in backend_files(folder).values()), key=lambda backend: backend.name)


def read_backend(path: Path) -> Backend:
    """Parses a backend file and reads its constants."""
    constants: dict[str, Any] = {"ON_REQUEST": False, "RECIPES": (), "BY_NAME": (), "DEVICES": (), "INTERPRETED_ON": ()}
    names: set[str] = set()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in statement.names)
        elif isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in ("NAME", "NEEDS", *constants):
                constants[name] = ast.literal_eval(statement.value)
    assert {"NAME", "NEEDS"} <= set(constants), f"{path} must define NAME and NEEDS, but defines {sorted(constants)}"
    module = ".".join([f"{__package__}.backends", *([path.parent.name] if path.stem == "backend" else []), path.stem])
    fields = {name.lower(): value for name, value in constants.items()}
    return Backend(**fields, provides=tuple(op for op in OPS if op in names), module=module)


def select_best(op: str, backends: dict[str, Backend], device: torch.device, dtype: torch.dtype) -> Selection:
    """Selects the backend with the best rating, or plain torch if no rating is at least `Priority.BETTER`."""
    able = {name: backend for name, backend in backends.items() if op in backend.provides and not backend.on_request}
    supports = {name: support_of(op, backend, device, dtype) for name, backend in able.items()}
    winner = max(supports, key=lambda name: supports[name].fit, default=None)
    if winner is not None and supports[winner].fit >= Priority.BETTER:
        return Selection(op, winner, supports[winner].reason)
    against = "".join(f"; {name}: {support.reason}" for name, support in supports.items())
    return Selection(op, reference.NAME, reference.REASON + against)


def select_requested(
    op: str, request: str, backends: dict[str, Backend], device: torch.device, dtype: torch.dtype, *, required: bool
) -> Selection:
    """Selects the requested backend. `required`: True if the request names this op. If False, the request applies to
    all ops, and plain torch is used for ops that the backend does not provide. For FP8 and FP4 ops, the selection falls
    back to "auto" if the backend does not provide the op, because the emulation in plain torch is slow, or lists it in
    `BY_NAME`: such ops synchronise with the host and must be requested with `--kernel-per-op`."""
    if request == reference.NAME:
        return Selection(op, request, reference.REASON)
    backend = backends[request]
    if not required and op in LOW_PRECISION_OPS and (op not in backend.provides or op in backend.by_name):
        found = select_best(op, backends, device, dtype)
        why = f"--kernel-per-op {op}={request} is needed" if op in backend.provides else f"does not provide {op}"
        return replace(found, reason=f"{found.reason}; {request}: {why}")
    if not required and op not in backend.provides:
        return Selection(op, reference.NAME, f"{reference.REASON}; {request} does not provide {op}")
    support = support_of(op, backend, device, dtype)
    if support.fit is Priority.NO:
        able = [name for name, b in backends.items() if support_of(op, b, device, dtype).fit is not Priority.NO]
        raise EnvironmentProblem(
            f"Kernel backend '{request}' cannot compute '{op}' in {dtype_name(dtype)} on {device.type}: "
            f"{support.reason}. It can be computed by {joined_with_or([AUTO, reference.NAME, *able])}, "
            f"for instance with --kernel-per-op {op}={AUTO}."
        )
    return Selection(op, request, f"requested; {support.reason}")


def support_of(op: str, backend: Backend, device: torch.device, dtype: torch.dtype) -> Support:
    """Rates a backend for an op; imports it only if it runs on this kind of device and all modules that it needs are
    installed."""
    if op not in backend.provides:
        return Support(Priority.NO, f"it does not provide {op}")
    if backend.devices and device.type not in backend.devices:
        return Support(Priority.NO, f"it runs on {joined_with_or(backend.devices)} only")
    if device.type in backend.interpreted_on and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return Support(Priority.NO, "it runs on GPUs only")
    try:
        missing = backend.missing()
        if missing:
            return Support(Priority.NO, f"it requires {', '.join(missing)} (not installed)")
        support: Support = backend.load().support(op, device, dtype)
    except (ImportError, OSError, MemoryError) as error:  # for example a limit of the address space (ulimit -v)
        return Support(Priority.NO, f"its import failed: {error}")
    return support


def _check_ops(names: Iterable[str]) -> None:
    """Raises `ConfigProblem` if `--kernel-per-op` names an unknown op. The names of backends were checked when the
    flags were parsed."""
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ConfigProblem(f"--kernel-per-op: op '{unknown[0]}' does not exist; the ops are {joined_with_or(OPS)}.")


def check_device(recipe: str, device: torch.device) -> None:
    """Raises `EnvironmentProblem` if `device` has no tensor cores for the FP8 or FP4 recipe."""
    least = quantization_recipe(recipe).least_capability
    if least is None:
        raise EnvironmentProblem(f"No GPU has tensor cores for the recipe {recipe}; add --emulate-low-precision")
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if found is None or found < least:
        name = f"a GPU of compute capability {found[0]}.{found[1]}" if found else f"device {device.type}"
        raise EnvironmentProblem(
            f"The recipe {recipe} needs a GPU of compute capability {least[0]}.{least[1]} or higher, but this rank "
            f"runs on {name}; --emulate-low-precision computes the same numbers, slowly."
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def joined_with_or(names: Iterable[str]) -> str:
    """Formats names as "a, b or c"."""
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} or {last}" if most else last
