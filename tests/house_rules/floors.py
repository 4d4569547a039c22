"""Which room may import which: the floors of the house, as data, and the check that reads them."""

import sys
from collections.abc import Iterable
from pathlib import PurePosixPath

from tests.house_rules.source import Import, Source, imports

FLOORS = (
    ("specs",),
    ("parallel", "kernels"),
    ("logs", "data"),
    ("precision", "memory"),
    ("moe",),
    ("model", "schedule", "optim", "checkpoint", "watch"),
    ("train", "build", "emulate", "compare"),
)
"""From the ground upwards. A room imports from lower floors; rooms of one floor do not know each other."""

SIBLINGS_ALLOWED = (
    ("kernels.autograd", "parallel.parameter"),  # weight gradients go to the sink that the parameter carries
    ("kernels", "parallel.rng"),  # dropout inside attention draws by key
    ("data", "logs"),  # a batch carries the tally, and preprocessing reports its progress
    ("build", "train"),  # the assembler makes the trainer
    ("emulate", "build"),
    ("emulate", "train"),
    ("compare", "build"),  # it runs whole steps
    ("compare", "train"),
)
"""(importer, imported) below `megatron_moe`, by prefix."""

NARROW_DOORS = (
    ("model", "moe", ("moe.layer", "moe.node_chain")),
    ("optim", "moe", ()),
    ("checkpoint", "moe", ()),
    ("schedule", "moe", ()),
    ("watch", "moe", ()),
)
"""(importer, room, modules of that room it may use) where the floor alone would allow the whole room."""

THIRD_PARTY = ("torch", "numpy", "safetensors", "yaml")
"""What a module may import at its top. `specs` none of them, `arguments` only yaml."""

OPTIONAL = (
    "matplotlib", "rich", "sentencepiece", "tensorboard", "tiktoken", "tokenizers", "torch.distributed._tools",
    "torch.utils.tensorboard", "transformers", "wandb", "zstandard",
)  # fmt: skip
"""Imported inside the function that needs them, so that a run without them never pays for them."""

KERNEL_PACKAGES = (
    "apex", "deep_ep", "emerging_optimizers", "fla", "flash_attn", "fused_weight_gradient_mlp_cuda", "grouped_gemm",
    "transformer_engine", "transformer_engine_torch", "triton",
)  # fmt: skip
"""Only `kernels/backends/` knows them."""


def floor_of(room: str) -> int | None:
    """Index of the floor a room stands on; None for a room nobody planned."""
    return next((level for level, rooms in enumerate(FLOORS) if room in rooms), None)


def floor_findings(files: Iterable[Source]) -> list[str]:
    """One sentence per import that the house forbids."""
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
    if each.module.split(".")[0] in ("megatron_moe", "arguments", "pretrain_moe", "tools", "tests"):
        return _own_problem(file, each.module)
    return _third_party_problem(file, each)


def _own_problem(file: Source, imported: str) -> str | None:
    importer_top, imported_top = file.module.split(".")[0], imported.split(".")[0]
    if imported_top in ("pretrain_moe", "tools", "tests"):
        return None if imported_top == importer_top == "tools" else "nothing imports a program or a test"
    if importer_top in ("pretrain_moe", "tools"):
        return None
    if importer_top == "arguments":
        allowed = imported_top == "arguments" or _within(imported, "megatron_moe.specs")
        return None if allowed else "arguments may import specs alone"
    if imported_top == "arguments":
        return "arguments is imported by pretrain_moe.py and tools alone"
    return _room_problem(_below(file.module), _below(imported))


def _room_problem(importer: str, imported: str) -> str | None:
    """Both as dotted names below `megatron_moe`."""
    room, other = importer.split(".")[0], imported.split(".")[0]
    if room == other or "" in (room, other):
        return None
    floor, other_floor = floor_of(room), floor_of(other)
    if floor is None or other_floor is None:
        return f"the floors of tests/house_rules/floors.py know no room {room if floor is None else other!r}"
    if other_floor > floor:
        return f"{room} is on floor {floor}, {other} above it on floor {other_floor}"
    if other_floor == floor and not any(_within(importer, a) and _within(imported, b) for a, b in SIBLINGS_ALLOWED):
        return f"{room} and {other} are siblings on floor {floor} and do not know each other"
    for who, what, doors in NARROW_DOORS:
        if room == who and other == what and not any(_within(imported, door) for door in doors):
            return f"{room} may use of {what} only: {', '.join(doors) or 'nothing'}"
    return None


def _third_party_problem(file: Source, each: Import) -> str | None:
    path = PurePosixPath(file.path)
    room = _below(file.module).split(".")[0] if path.parts[0] == "megatron_moe" else path.parts[0]
    if any(_within(each.module, name) for name in KERNEL_PACKAGES):
        inside = PurePosixPath("megatron_moe/kernels/backends") in path.parents
        return None if inside else "kernel packages are imported in kernels/backends/ alone"
    if any(_within(each.module, name) for name in OPTIONAL):
        if room in ("specs", "arguments"):
            return f"{room} needs no optional package"
        return None if each.in_function else "optional packages are imported inside the function that needs them"
    if each.module.split(".")[0] not in THIRD_PARTY:
        return "not among the packages that the project requires"
    if room == "specs":
        return "specs imports the standard library alone"
    if room == "arguments" and each.module.split(".")[0] != "yaml":
        return "arguments imports the standard library, yaml and specs alone"
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
    """Groups of modules that import one another, directly or in a ring."""
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
