"""Order of the packages and the check of imports against it."""

import sys
from collections.abc import Iterable
from pathlib import PurePosixPath

from tests.house_rules.source import Import, Source, imports

PACKAGES = (
    "config", "precision", "parallel", "kernels", "pipeline", "cost_model", "planner", "optim", "logs", "data",
    "checkpoint", "resilience", "memory", "layers", "moe", "model", "train", "build", "memory_emulation",
    "warmup", "layout_check", "api",
)  # fmt: skip
"""Packages below `megatron_moe` from low to high. A module imports from its own and from lower packages only."""

NO_TORCH = (
    "config", "cost_model", "pipeline.actions", "pipeline.overlap", "pipeline.schedule", "pipeline.simulator",
    "pipeline.slots",
    "planner", "parallel.grid", "optim.param_layout", "checkpoint.huggingface.config_map",
    "checkpoint.huggingface.config_write", "checkpoint.huggingface.config_deepseek_v4",
    "checkpoint.huggingface.config_reader", "data.packing", "kernels.backend_names", "logs.metric_values",
    "resilience.packages",
)  # fmt: skip
"""Packages and modules that load without torch, so that `--help` and `--dry-run` start fast."""

THIRD_PARTY = ("torch", "numpy", "safetensors", "yaml")
"""Packages that a module may import at its top. Modules of `NO_TORCH` import none of them, `arguments` only yaml."""

OPTIONAL = (
    "deep_ep", "huggingface_hub", "matplotlib", "rich", "sentencepiece", "tensorboard", "tiktoken", "tokenizers",
    "torch.distributed._tools", "torch.utils.tensorboard", "transformers", "wandb", "zstandard",
)  # fmt: skip
"""Packages that are imported inside the functions that use them, so that other runs start faster."""

KERNEL_PACKAGES = (
    "apex", "emerging_optimizers", "fla", "flash_attn", "fused_weight_gradient_mlp_cuda", "grouped_gemm",
    "transformer_engine", "transformer_engine_torch", "triton",
)  # fmt: skip
"""Packages that only `kernels/backends/` may import."""


def loads_without_torch(module: str) -> bool:
    """Whether a module below `megatron_moe` belongs to `NO_TORCH`."""
    return any(_within(module, name) for name in NO_TORCH)


def level_findings(files: Iterable[Source]) -> list[str]:
    """One message per forbidden import."""
    findings = []
    for file in files:
        for each in imports(file):
            problem = _problem(file, each)
            if problem is not None:
                findings.append(f"{file.path}:{each.line} imports {each.module}: {problem}")
    return findings


def _problem(file: Source, each: Import) -> str | None:
    if each.module.split(".")[0] in sys.stdlib_module_names:
        return None
    if each.module.split(".")[0] in ("megatron_moe", "arguments", "pretrain_moe", "tools", "tests", "benchmarks"):
        return _own_problem(file, each.module)
    return _third_party_problem(file, each)


def _own_problem(file: Source, imported: str) -> str | None:
    importer_top, imported_top = file.module.split(".")[0], imported.split(".")[0]
    if imported_top in ("pretrain_moe", "tools", "tests", "benchmarks"):
        return None if imported_top == importer_top == "tools" else "nothing imports a program or a test"
    if importer_top in ("pretrain_moe", "tools"):
        return None
    if importer_top == "arguments":
        allowed = imported_top == "arguments" or loads_without_torch(_below(imported))
        return None if allowed else "arguments may import modules without torch only"
    if imported_top == "arguments":
        allowed = file.module == "megatron_moe.api"
        return None if allowed else "arguments is imported by pretrain_moe.py, megatron_moe/api.py and tools only"
    return _level_problem(_below(file.module), _below(imported))


def _level_problem(importer: str, imported: str) -> str | None:
    """Returns a message if the first module (dotted name below `megatron_moe`) may not import the second one."""
    package, other = importer.split(".")[0], imported.split(".")[0]
    if "" in (package, other):
        return None
    for name in (package, other):
        if name not in PACKAGES:
            return f"PACKAGES of tests/house_rules/layers.py does not list {name}"
    if PACKAGES.index(other) > PACKAGES.index(package):
        return f"{other} is above {package}"
    if loads_without_torch(importer) and not loads_without_torch(imported):
        return f"{importer} loads without torch, {imported} does not"
    return None


def _third_party_problem(file: Source, each: Import) -> str | None:
    path, name = PurePosixPath(file.path), _below(file.module)
    without_torch = path.parts[0] == "megatron_moe" and loads_without_torch(name)
    if any(_within(each.module, kernel) for kernel in KERNEL_PACKAGES):
        inside = PurePosixPath("megatron_moe/kernels/backends") in path.parents
        return None if inside else "kernel packages are imported in kernels/backends/ only"
    if any(_within(each.module, optional) for optional in OPTIONAL):
        if without_torch or path.parts[0] == "arguments":
            return f"{file.module} may not import optional packages"
        return None if each.in_function else "optional packages are imported inside the function that needs them"
    if each.module.split(".")[0] not in THIRD_PARTY:
        return "not among the packages that the project requires"
    if without_torch:
        return f"{name} imports the standard library only"
    if path.parts[0] == "arguments" and each.module.split(".")[0] != "yaml":
        return "arguments imports the standard library, yaml and modules without torch only"
    return None


def late_import_findings(files: Iterable[Source]) -> list[str]:
    """Imports inside functions, of anything but an optional or a kernel package.

    pretrain_moe.py may import the project late: its flags are read before torch is loaded, and Ctrl-C ends it without
    a traceback meanwhile.
    """
    return [
        f"{file.path}:{each.line} imports {each.module} inside a function"
        for file in files
        for each in imports(file)
        if each.in_function
        and not (file.path == "pretrain_moe.py" and each.module.startswith(("megatron_moe.", "arguments.")))
        and not any(_within(each.module, name) for name in (*OPTIONAL, *KERNEL_PACKAGES))
    ]


def cycles(files: Iterable[Source]) -> list[list[str]]:
    """Groups of modules that import one another, directly or indirectly."""
    files = list(files)
    known = {file.module for file in files}
    edges = {file.module: sorted({each.module for each in imports(file)} & known - {file.module}) for file in files}
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        open_ends = list(edges[start])
        while open_ends:
            module = open_ends.pop()
            if module not in seen:
                seen.add(module)
                open_ends += edges[module]
        reach[start] = seen
    rings = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in edges if a in reach[a]}
    return [list(ring) for ring in sorted(rings)]


def _below(module: str) -> str:
    return module.removeprefix("megatron_moe").removeprefix(".")


def _within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")
