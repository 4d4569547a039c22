"""Installed versions of required and optional packages, determined without importing the packages.

On the package index (PyPI), `apex` is an unrelated web toolkit and `deep-ep` is an obsolete release. The right ones
must be built from source (`HOW_TO_BUILD`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from megatron_moe.config.imports import installed_version

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
"""File of tested versions. It exists in a source checkout but not in an installed package."""

Verdict = Literal["tested", "other version", "untested", "missing", "wrong"]


@dataclass(frozen=True)
class Package:
    """Required or optional Python package."""

    name: str
    """Name of the distribution on the package index."""
    module: str
    install: str
    """Command that installs the package."""
    purpose: str = ""
    flags: tuple[tuple[str, str], ...] = ()
    """(flag, value) pairs that need the package; the value "NAME" stands for any value. `--kernel-backend` is omitted:
    each backend lists its own packages."""
    required: bool = False
    """True if every run needs the package."""
    is_kernels: bool = False
    """True if only backends in `kernels/backends/` use the package."""
    submodule: str = ""
    """Submodule that distinguishes the package from an unrelated one of the same name; empty if this is not checked."""
    obsolete: str = ""
    """Prefix of the versions that are too old; empty if this is not checked."""


_PINNED = "pip install -c constraints.txt "
_TEXT = 'pip install ".[text]"'
_FROM_SOURCE = "built from source"
_BUILD = "pip install --no-build-isolation "
_kernels = partial(Package, is_kernels=True)

PACKAGES: tuple[Package, ...] = (
    *(Package(name, name, _PINNED + name, required=True) for name in ("torch", "numpy", "safetensors")),
    Package("pyyaml", "yaml", _PINNED + "pyyaml", required=True),
    Package(
        "sentencepiece", "sentencepiece", _PINNED + "sentencepiece", "tokens",
        (("--tokenizer-type", "SentencePieceTokenizer"),),
    ),
    Package(
        "tokenizers", "tokenizers", _PINNED + "tokenizers", "tokens",
        (("--tokenizer-type", "HuggingFaceTokenizer"), ("--tokenizer-type", "GPT2BPETokenizer")),
    ),
    Package("tensorboard", "tensorboard", _PINNED + "tensorboard", "curves"),
    Package("wandb", "wandb", _PINNED + "wandb", "curves on a server", (("--wandb-project", "NAME"),)),
    Package("rich", "rich", _PINNED + "rich", "live line of progress"),
    Package("matplotlib", "matplotlib", _PINNED + "matplotlib", "plots"),
    Package("tiktoken", "tiktoken", _TEXT, "tiktoken vocabularies", (("--tokenizer-type", "TikTokenizer"),)),
    Package("zstandard", "zstandard", _TEXT, "text in .zst files"),
    _kernels("triton", "triton", "is installed with CUDA builds of torch", "own GPU kernels"),
    _kernels("transformer-engine", "transformer_engine", _BUILD + '".[te]"', "kernels of Transformer Engine"),
    _kernels("grouped-gemm", "grouped_gemm", _BUILD + '".[grouped-gemm]"', "expert GEMMs"),
    _kernels("flash-attn-4", "flash_attn", 'pip install ".[flash-attn]"', "attention kernels"),
    _kernels(
        "deep-ep", "deep_ep", _FROM_SOURCE, "expert all-to-all between GPUs",
        (("--moe-flex-dispatcher-backend", "deepep"),), obsolete="1.0.",
    ),
    _kernels(
        "hybrid-ep", "hybrid_ep_cpp", _FROM_SOURCE, "expert all-to-all between GPUs, also across hosts",
        (("--moe-flex-dispatcher-backend", "hybridep"),),
    ),
    _kernels(
        "apex", "apex", _FROM_SOURCE, "NVIDIA's fused optimizers and weight gradients", submodule="multi_tensor_apply"
    ),
    _kernels("fla-core", "fla", "pip install fla-core", "linear attention"),
)  # fmt: skip

HOW_TO_BUILD: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "apex": (
            "pip uninstall apex  # the unrelated package of that name on PyPI, if installed",
            "git clone https://github.com/NVIDIA/apex && cd apex",
            "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation .",
        ),
        "deep-ep": (
            "pip uninstall deep-ep   # the obsolete release of the index, if installed",
            "pip install nvidia-nvshmem-cu13   # for several hosts; NVSHMEM_DIR selects another installation",
            "git clone --branch v1.2.1 https://github.com/deepseek-ai/DeepEP && cd DeepEP",
            "TORCH_CUDA_ARCH_LIST=9.0 pip install -v --no-build-isolation .   # Hopper; another list for other GPUs",
        ),
        "hybrid-ep": (
            "pip uninstall deep-ep   # the branch has both deep_ep.Buffer and deep_ep.HybridEPBuffer",
            "git clone --branch hybrid-ep https://github.com/deepseek-ai/DeepEP && cd DeepEP",
            "TORCH_CUDA_ARCH_LIST=9.0 pip install -v --no-build-isolation .   # HYBRID_EP_MULTINODE=1: across hosts",
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class InstalledPackage:
    """A package, its installed version and the version that was tested with this project."""

    package: Package
    version: str | None
    """Installed version, or "unknown" if the module has no package metadata; None if the package is not installed."""
    tested: str | None
    """Version in constraints.txt; None if the package is not listed there."""
    problem: str = ""
    """Reason why the installed package is unrelated or obsolete; empty if it is neither."""

    @property
    def verdict(self) -> Verdict:
        if self.version is None:
            return "missing"
        if self.problem:
            return "wrong"
        if self.tested is None:
            return "untested"
        return "tested" if _release(self.version) == _release(self.tested) else "other version"


def find_all(constraints: Path = CONSTRAINTS) -> tuple[InstalledPackage, ...]:
    """Finds the installed version and the tested version of every package in `PACKAGES`."""
    pins = pinned_versions(constraints)
    return tuple(find_package(package, pins) for package in PACKAGES)


def find_package(package: Package, pins: Mapping[str, str]) -> InstalledPackage:
    """Finds the installed version and the tested version of one package. `pins`: package name -> tested version."""
    version = _version(package)
    problem = "" if version is None else _problem(package, version)
    return InstalledPackage(package=package, version=version, tested=pins.get(package.name), problem=problem)


def pinned_versions(constraints: Path) -> dict[str, str]:
    """Package name -> version from constraints.txt; empty if the file does not exist."""
    lines = constraints.read_text(encoding="utf-8").splitlines() if constraints.is_file() else []
    return dict(line.split("==") for line in lines if re.fullmatch(r"[\w.-]+==\S+", line))


def summary(found: Iterable[InstalledPackage]) -> list[str]:
    """Log lines: versions of torch and the kernel packages, wrong packages, and versions other than the tested ones."""
    every = tuple(found)
    wrong = [each for each in every if each.verdict == "wrong"]
    shown = [each for each in every if each.package.name == "torch" or each.package.is_kernels]
    present = [f"{each.package.name} {each.version}" for each in shown if each.version and each not in wrong]
    lines = [f"packages: {', '.join(present)}", *(f"warning: {each.problem}" for each in wrong)]
    others = [each for each in every if each.verdict == "other version"]
    if others:
        versions = ", ".join(f"{each.package.name} {each.version} ({each.tested})" for each in others)
        lines.append(f"other versions than the tested ones (in brackets): {versions}")
    return lines


def _version(package: Package) -> str | None:
    return None if find_spec(package.module) is None else installed_version(package.name) or "unknown"


def _problem(package: Package, version: str) -> str:
    """Returns the reason why the installed package is unrelated or obsolete; "" if it is neither."""
    spec = find_spec(package.module)
    places = list((spec and spec.submodule_search_locations) or ["."])
    if package.submodule and not (Path(places[0]) / package.submodule).exists():
        return (
            f"the installed {package.name} {version} is an unrelated package of that name (no {package.submodule} in "
            f"{places[0]}); uninstall it and build the right one, see tools/doctor.py"
        )
    if package.obsolete and version.startswith(package.obsolete):
        return (
            f"the installed {package.name} {version} is an obsolete release from the package index; uninstall it and "
            f"build a newer one, see tools/doctor.py"
        )
    return ""


def _release(version: str) -> str:
    """Version without its local part: 2.13.0+cpu -> 2.13.0."""
    return version.partition("+")[0]
