"""Checks installed packages and this machine, and lists the affected flags: `python tools/doctor.py [--device cuda]`.

Exit code 0: a run can start; 3: something required is missing, wrong or broken.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

import torch

from arguments.flags import Registry
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.kernels.registry import BACKENDS, Backend, discover
from megatron_moe.resilience.machine import probes
from megatron_moe.resilience.packages import CONSTRAINTS, HOW_TO_BUILD, InstalledPackage, Package, find_all
from tools._common import run_main, tool_parser


def flags_of(package: Package, backends: Sequence[Backend], registry: Registry) -> list[str]:
    """Flags that need a package, with a note for those that are not available yet."""
    found = [f"--kernel-backend {each.name}" for each in backends if package.module in each.needs]
    is_used = bool(found) or not package.is_kernels
    for option, value in package.flags:
        declared = registry.find(option)
        available = is_used and declared is not None and declared[0].available(value)
        found.append(f"{option} {value}" if available else f"{option} {value} (not available yet)")
    return found


def package_lines(found: Sequence[InstalledPackage], backends: Sequence[Backend], registry: Registry) -> list[str]:
    """One line per package, followed by the consequences if it is missing."""
    lines = []
    for each in found:
        package = each.package
        version = each.version or "-"
        tested = f"tested with {each.tested}" if each.verdict == "other version" else each.verdict
        lines.append(f"  {package.name:<22}{version:<22}{tested:<26}{package.purpose}".rstrip())
        if each.verdict == "wrong":
            lines.append(f"      {each.trouble}")
        flags = flags_of(package, backends, registry)
        if each.verdict in ("missing", "wrong"):
            lines.append(f"      without it: {', '.join(flags) or 'no flag of this program is missing'}")
            lines.append(f"      install: {package.install}")
    return lines


def build_lines(found: Sequence[InstalledPackage]) -> list[str]:
    """Build instructions for missing packages that the package index does not have."""
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
    lines += package_lines(found, discover(BACKENDS), Registry.declared())
    lines += ["", "this machine"]
    lines += [f"  {probe.name:<22}{'works' if probe.works else 'FAILS':<8}{probe.text}" for probe in tried]
    lines += [*build_lines(found), ""]
    bad = [each.package.name for each in found if each.verdict == "wrong"]
    bad += [each.package.name for each in found if each.package.required and each.verdict == "missing"]
    bad += [probe.name for probe in tried if not probe.works]
    lines.append(f"broken or missing: {', '.join(bad)}" if bad else "a run can start here")
    print("\n".join(lines))
    return int(ExitCode.ENVIRONMENT if bad else ExitCode.OK)


if __name__ == "__main__":
    run_main(main)
