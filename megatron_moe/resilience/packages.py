"""Installed versions of required and optional packages, found without importing them.

On the package index `apex` is an unrelated web toolkit and `deep-ep` an obsolete release; both are built from source
(`HOW_TO_BUILD`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Literal

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
"""Tested versions; exists in a checkout, not in an installation."""

Verdict = Literal["tested", "other version", "untested", "missing", "wrong"]


@dataclass(frozen=True, kw_only=True)
class Package:
    """Required or optional package."""

    name: str
    """Name of the distribution on the package index."""
    module: str
    install: str
    """Command that installs it."""
    required: bool = False
    """True if every run needs it."""
    purpose: str = ""
    is_kernels: bool = False
    """True if it is used through a backend of `kernels/backends/` only."""
    flags: tuple[tuple[str, str], ...] = ()
    """(option, value) pairs that need it, apart from kernel backends, which declare their packages."""
    inside: str = ""
    """Submodule that distinguishes it from an unrelated package of the same name."""
    obsolete: str = ""
    """Prefix of unsupported versions."""


def _listed(
    name: str, module: str, purpose: str = "", flags: tuple[tuple[str, str], ...] = (), *, required: bool = False
) -> Package:
    """Package among the requirements of setup.py."""
    install = f"pip install -c constraints.txt {name}"
    return Package(name=name, module=module, install=install, required=required, purpose=purpose, flags=flags)


PACKAGES: tuple[Package, ...] = (
    _listed("torch", "torch", required=True),
    _listed("numpy", "numpy", required=True),
    _listed("safetensors", "safetensors", required=True),
    _listed("pyyaml", "yaml", required=True),
    _listed("sentencepiece", "sentencepiece", "tokens", (("--tokenizer-type", "SentencePieceTokenizer"),)),
    _listed("tokenizers", "tokenizers", "tokens", (("--tokenizer-type", "HuggingFaceTokenizer"),)),
    _listed("tensorboard", "tensorboard", "curves"),
    _listed("wandb", "wandb", "curves on a server", (("--wandb-project", "NAME"),)),
    _listed("rich", "rich", "live line of progress"),
    _listed("matplotlib", "matplotlib", "plots"),
    Package(
        name="tiktoken",
        module="tiktoken",
        install='pip install ".[text]"',
        purpose="tiktoken vocabularies",
        flags=(("--tokenizer-type", "TikTokenizer"),),
    ),
    Package(name="zstandard", module="zstandard", install='pip install ".[text]"', purpose="text in .zst files"),
    Package(
        name="triton", module="triton", install="comes with torch for CUDA", is_kernels=True, purpose="own GPU kernels"
    ),
    Package(
        name="transformer-engine",
        module="transformer_engine",
        install='pip install --no-build-isolation ".[te]"',
        is_kernels=True,
        purpose="kernels of Transformer Engine",
    ),
    Package(
        name="grouped-gemm",
        module="grouped_gemm",
        install='pip install --no-build-isolation ".[grouped-gemm]"',
        is_kernels=True,
        purpose="expert matrix products",
    ),
    Package(
        name="flash-attn-4",
        module="flash_attn",
        install='pip install ".[flash-attn]"',
        is_kernels=True,
        purpose="attention kernels",
    ),
    Package(
        name="deep-ep",
        module="deep_ep",
        install="built from source",
        is_kernels=True,
        purpose="expert all-to-all between GPUs",
        flags=(("--moe-token-dispatcher-type", "flex"),),
        obsolete="1.0.",
    ),
    Package(
        name="apex",
        module="apex",
        install="built from source",
        is_kernels=True,
        purpose="NVIDIA's fused optimizers and weight gradients",
        inside="multi_tensor_apply",
    ),
    Package(
        name="fla-core",
        module="fla",
        install="pip install fla-core",
        is_kernels=True,
        purpose="linear attention",
        flags=(("--experimental-attention-variant", "gated_delta_net"),),
    ),
    Package(
        name="emerging-optimizers",
        module="emerging_optimizers",
        install="pip install emerging-optimizers",
        is_kernels=True,
        purpose="Muon",
        flags=(("--optimizer", "muon"),),
    ),
)

HOW_TO_BUILD: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "apex": (
            "pip uninstall apex      # the unrelated package of the index, if installed",
            "git clone https://github.com/NVIDIA/apex && cd apex",
            "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation .",
        ),
        "deep-ep": (
            "pip uninstall deep-ep   # the obsolete release of the index, if installed",
            "pip install nvidia-nvshmem-cu13   # for several hosts; NVSHMEM_DIR selects another installation",
            "git clone --branch v1.2.1 https://github.com/deepseek-ai/DeepEP && cd DeepEP",
            "TORCH_CUDA_ARCH_LIST=9.0 pip install -v --no-build-isolation .   # Hopper; another list for other GPUs",
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class InstalledPackage:
    """Installed version of a package."""

    package: Package
    version: str | None
    """None if it is not installed."""
    tested: str | None
    """Tested version, or None."""
    trouble: str = ""
    """Reason why it is the wrong package or version."""

    @property
    def verdict(self) -> Verdict:
        if self.version is None:
            return "missing"
        if self.trouble:
            return "wrong"
        if self.tested is None:
            return "untested"
        return "tested" if _release(self.version) == _release(self.tested) else "other version"


def find_all(constraints: Path = CONSTRAINTS) -> tuple[InstalledPackage, ...]:
    """Installed versions of all `PACKAGES`."""
    pins = pinned_versions(constraints)
    return tuple(find(package, pins) for package in PACKAGES)


def find(package: Package, pins: Mapping[str, str]) -> InstalledPackage:
    """Installed version of one package; checks ambiguous names by the contents of the package folder."""
    version = _version(package)
    trouble = "" if version is None else _trouble(package, version)
    return InstalledPackage(package=package, version=version, tested=pins.get(package.name), trouble=trouble)


def pinned_versions(constraints: Path) -> dict[str, str]:
    """name -> version of constraints.txt; empty if the file does not exist."""
    lines = constraints.read_text(encoding="utf-8").splitlines() if constraints.is_file() else []
    return dict(line.split("==") for line in lines if re.fullmatch(r"[\w.-]+==\S+", line))


def summary(found: Iterable[InstalledPackage]) -> list[str]:
    """Log lines: versions of torch and the kernel packages, wrong packages, and untested versions."""
    every = tuple(found)
    present = [f"{each.package.name} {each.version}" for each in every if each.version and _is_shown(each)]
    lines = [f"packages: {', '.join(present)}"]
    lines += [f"warning: {each.trouble}" for each in every if each.verdict == "wrong"]
    untested = [
        f"{each.package.name} {each.version} ({each.tested})" for each in every if each.verdict == "other version"
    ]
    if untested:
        lines.append(f"other versions than the tested ones (in brackets): {', '.join(untested)}")
    return lines


def _is_shown(each: InstalledPackage) -> bool:
    return each.package.name == "torch" or (each.package.is_kernels and each.verdict != "wrong")


def _version(package: Package) -> str | None:
    if find_spec(package.module) is None:
        return None
    try:
        return metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _trouble(package: Package, version: str) -> str:
    where = _folder(package.module)
    if package.inside and not (where / package.inside).exists():
        return (
            f"the installed {package.name} {version} is an unrelated package of that name (no {package.inside} in "
            f"{where}); uninstall it and build the right one, see tools/doctor.py"
        )
    if package.obsolete and version.startswith(package.obsolete):
        return (
            f"the installed {package.name} {version} is an obsolete release from the package index; uninstall it and "
            f"build a newer one, see tools/doctor.py"
        )
    return ""


def _folder(module: str) -> Path:
    config = find_spec(module)
    places = list(config.submodule_search_locations or []) if config else []
    return Path(places[0]) if places else Path(".")


def _release(version: str) -> str:
    """Version without its local part: 2.13.0+cpu -> 2.13.0."""
    return version.partition("+")[0]
