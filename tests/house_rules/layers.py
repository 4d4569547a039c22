"""Dependency levels of the packages and the check of imports against them."""

import sys
from collections.abc import Iterable
from pathlib import PurePosixPath

from tests.house_rules.source import Import, Source, imports

NO_TORCH = (
    "config", "cost_model", "pipeline", "planner", "parallel.grid", "optim.param_layout",
    "checkpoint.huggingface.config_map", "checkpoint.huggingface.config_reader",
)  # fmt: skip
"""Packages and modules that load without torch, so that `--help` and `--dry-run` answer at once."""

LEVELS = (
    NO_TORCH,
    ("precision",),
    ("parallel",),
    ("kernels",),
    ("logs", "data"),
    ("memory",),
    ("layers",),
    ("moe",),
    ("model", "pipeline.executor", "pipeline.segment", "pipeline.graph_cut", "optim", "checkpoint", "resilience"),
    ("train", "build", "memory_emulation", "layout_check", "precision.apply"),
)
"""Levels from low to high. A module imports from lower levels only; the longest matching prefix decides its level."""

SAME_LEVEL_ALLOWED = (
    ("data", "logs"),  # a batch carries the metrics, and preprocessing reports its progress
    ("build", "precision.apply"),
    ("build", "train"),  # the assembler builds the trainer
    ("memory_emulation", "build"),
    ("memory_emulation", "train"),
    ("train.warmup", "build"),
    ("train.warmup", "memory_emulation"),  # warm-up compiles kernels with the shapes of an emulated step
    ("layout_check", "build"),  # the check runs whole steps
    ("layout_check", "train"),
)
"""(importer, imported) below `megatron_moe`, by prefix; modules without torch may import one another."""

PUBLIC_MODULES = (
    ("model", "moe", ("moe.moe_layer", "moe.token_dispatcher.base")),
    ("optim", "moe", ()),
    ("checkpoint", "moe", ()),
    ("pipeline", "moe", ()),
    ("resilience", "moe", ()),
)
"""(importer, package, modules of that package it may use) where the level alone would allow the whole package."""

THIRD_PARTY = ("torch", "numpy", "safetensors", "yaml")
"""Packages that a module may import at its top. Modules of `NO_TORCH` import none of them, `arguments` only yaml."""

OPTIONAL = (
    "deep_ep", "matplotlib", "rich", "sentencepiece", "tensorboard", "tiktoken", "tokenizers",
    "torch.distributed._tools", "torch.utils.tensorboard", "transformers", "wandb", "zstandard",
)  # fmt: skip
"""Imported inside the function that uses them, so that other runs do not pay for the import."""

KERNEL_PACKAGES = (
    "apex", "emerging_optimizers", "fla", "flash_attn", "fused_weight_gradient_mlp_cuda", "grouped_gemm",
    "transformer_engine", "transformer_engine_torch", "triton",
)  # fmt: skip
"""Imported in `kernels/backends/` only."""


def level_of(module: str) -> int | None:
    """Index of the level of a module below `megatron_moe`; None if it has none."""
    matches = [(len(name), level) for level, names in enumerate(LEVELS) for name in names if _within(module, name)]
    return max(matches)[1] if matches else None


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
        allowed = imported_top == "arguments" or level_of(_below(imported)) == 0
        return None if allowed else "arguments may import modules without torch only"
    if imported_top == "arguments":
        return "arguments is imported by pretrain_moe.py and tools only"
    return _level_problem(_below(file.module), _below(imported))


def _level_problem(importer: str, imported: str) -> str | None:
    """Checks two dotted names below `megatron_moe`."""
    if "" in (importer, imported):
        return None
    level, other = level_of(importer), level_of(imported)
    if level is None or other is None:
        return f"no level of tests/house_rules/layers.py names {importer if level is None else imported}"
    package, other_package = importer.split(".")[0], imported.split(".")[0]
    if package == other_package and level > 0:
        return None
    if other > level:
        return f"{importer} is on level {level}, {imported} above it on level {other}"
    same = other == level and level > 0
    if same and not any(_within(importer, a) and _within(imported, b) for a, b in SAME_LEVEL_ALLOWED):
        return f"{package} and {other_package} are on the same level {level} and may not import each other"
    for who, what, public in PUBLIC_MODULES:
        if package == who and other_package == what and not any(_within(imported, name) for name in public):
            return f"{package} may use of {what} only: {', '.join(public) or 'nothing'}"
    return None


def _third_party_problem(file: Source, each: Import) -> str | None:
    path, name = PurePosixPath(file.path), _below(file.module)
    without_torch = path.parts[0] == "megatron_moe" and level_of(name) == 0
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
