"""Checks packages and this machine; lists flags that need missing packages: `python tools/doctor.py [--device cuda]`.

Exit code 0: a run can start; 3: something required is missing, wrong or broken.
"""

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder
if __name__ == "__main__" and sys.stderr.isatty():
    print("loading torch", file=sys.stderr, flush=True)

import torch
import torch.distributed as dist
import torch.nn.functional as F

from arguments.flags import Registry
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.kernels.registry import BACKENDS, Backend, discover_backends
from megatron_moe.resilience.packages import CONSTRAINTS, HOW_TO_BUILD, InstalledPackage, Package, find_all
from tools._common import run_main, tool_parser


@dataclass(frozen=True)
class Probe:
    """Result of testing one feature of this machine."""

    name: str
    works: bool
    text: str


def probes(device: torch.device) -> list[Probe]:
    """Tests every feature of this machine that a run on `device` needs."""
    trials: list[tuple[str, Callable[[torch.device], str]]] = [
        ("python", lambda _: f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"),
        ("device", _device),
        ("bf16", _bf16),
        ("grouped_mm", _grouped_mm),
        ("attention", _attention),
        ("gloo", lambda _: _group("gloo", torch.device("cpu"))),
    ]
    if device.type == "cuda":
        trials.append(("nccl", lambda device: _group("nccl", device)))
    return [_tried(name, trial, device) for name, trial in trials]


def _tried(name: str, trial: Callable[[torch.device], str], device: torch.device) -> Probe:
    try:
        return Probe(name, True, trial(device))
    except (RuntimeError, AssertionError, AttributeError, ValueError, OSError) as error:
        # torch without CUDA raises AssertionError
        return Probe(name, False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads; no GPU is used"
    properties = torch.cuda.get_device_properties(device)
    capability = f"compute capability {properties.major}.{properties.minor}"
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{torch.cuda.device_count()} x {properties.name}, {memory}, {capability}, CUDA {torch.version.cuda}"


def _bf16(device: torch.device) -> str:
    """Multiplies two 8 x 8 matrices of ones: every element of the product is 8, which is exact in bf16."""
    ones = torch.ones(8, 8, device=device, dtype=torch.bfloat16)
    _expect(ones @ ones, 8.0)
    return "matrix product"


def _grouped_mm(device: torch.device) -> str:
    """Runs a grouped GEMM for two experts with 16 rows each and checks the result."""
    rows = torch.ones(32, 64, device=device, dtype=torch.bfloat16)
    weights = torch.ones(2, 64, 16, device=device, dtype=torch.bfloat16)
    offsets = torch.tensor([16, 32], device=device, dtype=torch.int32)
    _expect(F.grouped_mm(rows, weights, offs=offsets), 64.0)
    return "torch.nn.functional.grouped_mm, offsets on the device"


def _attention(device: torch.device) -> str:
    heads = torch.ones(1, 2, 16, 64, device=device, dtype=torch.bfloat16)
    _expect(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True), 1.0)
    return "scaled_dot_product_attention, causal"


def _group(backend: str, device: torch.device) -> str:
    """Checks an all-reduce in a temporary process group of one rank."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        one = torch.ones(1, device=device)
        dist.all_reduce(one)
        _expect(one, 1.0)
    finally:
        dist.destroy_process_group()
    return "all-reduce in a group of one"


def _expect(actual: torch.Tensor, value: float) -> None:
    if not bool((actual == value).all()):
        raise ValueError(f"computes {actual.flatten()[0].item()} instead of {value}")


def flags_of(package: Package, backends: Sequence[Backend], registry: Registry) -> list[str]:
    """Flags that need a package. A flag that this project does not support yet has a note."""
    found = [f"--kernel-backend {each.name}" for each in backends if package.module in each.needs]
    for option, value in package.flags:
        declared = registry.find(option)
        available = declared is not None and declared[0].available(value)
        found.append(f"{option} {value}" if available else f"{option} {value} (not available yet)")
    return found


def package_lines(found: Sequence[InstalledPackage], backends: Sequence[Backend], registry: Registry) -> list[str]:
    """One line per package. For a missing or wrong package, further lines list affected flags and how to install it."""
    lines = []
    for each in found:
        package = each.package
        version = each.version or "-"
        tested = f"tested with {each.tested}" if each.verdict == "other version" else each.verdict
        lines.append(f"  {package.name:<22}{version:<22}{tested:<26}{package.purpose}".rstrip())
        if each.verdict == "wrong":
            lines.append(f"      {each.problem}")
        flags = flags_of(package, backends, registry)
        if each.verdict in ("missing", "wrong"):
            lines.append(f"      without it: {', '.join(flags) or 'no flag needs it'}")
            lines.append(f"      install: {package.install}")
    return lines


def build_lines(found: Sequence[InstalledPackage]) -> list[str]:
    """Build instructions for missing packages that must be built from source."""
    lines = []
    for each in found:
        if each.package.name in HOW_TO_BUILD and each.verdict in ("missing", "wrong"):
            lines += ["", f"{each.package.name}, built from source on a machine with CUDA's compiler:"]
            lines += [f"  {step}" for step in HOW_TO_BUILD[each.package.name]]
    return lines


def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--constraints", type=Path, default=CONSTRAINTS, help="file with the tested versions")
    options = parser.parse_args(argv)
    if options.constraints != CONSTRAINTS and not options.constraints.is_file():
        parser.error(f"--constraints {options.constraints} is not a file")
    on_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    found, tried = find_all(options.constraints), probes(torch.device("cuda" if on_gpu else "cpu"))
    lines = [f"packages, against {options.constraints.name}"]
    lines += package_lines(found, discover_backends(BACKENDS), Registry.declared())
    lines += ["", "this machine"]
    lines += [f"  {probe.name:<22}{'works' if probe.works else 'FAILS':<8}{probe.text}" for probe in tried]
    lines += [*build_lines(found), ""]
    bad = [each.package.name for each in found if each.verdict == "wrong"]
    bad += [each.package.name for each in found if each.package.required and each.verdict == "missing"]
    bad += [probe.name for probe in tried if not probe.works]
    lines.append(f"broken or missing: {', '.join(bad)}" if bad else "a run can start on this machine")
    print("\n".join(lines))
    return int(ExitCode.ENVIRONMENT if bad else ExitCode.OK)


if __name__ == "__main__":
    run_main(main)
