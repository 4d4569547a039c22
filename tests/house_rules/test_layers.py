"""R1, R4: import directions, and packages that load without torch."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.house_rules.layers import PACKAGES, cycles, late_import_findings, level_findings, loads_without_torch
from tests.house_rules.source import PROGRAM, ROOT, Source, report, source, sources


def test_modules_import_lower_packages_only():
    report(level_findings(sources(*PROGRAM)), "R1: imports of lower packages only, see tests/house_rules/layers.py")


def test_the_tour_lists_the_packages_in_order():
    section = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8").split("## Order of the packages", 1)[1]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == PACKAGES
    found = {path.stem for path in (ROOT / "megatron_moe").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__pycache__"} == set(PACKAGES)


def test_there_are_no_import_cycles():
    rings = [" -> ".join([*ring, ring[0]]) for ring in cycles(sources(*PROGRAM))]
    report(rings, "R1: no import cycles")


def test_imports_are_at_the_top_unless_the_package_is_optional():
    report(late_import_findings(sources(*PROGRAM)), "imports are at the top of the file")


def test_flags_configs_and_cost_model_load_without_torch():
    modules = [file.module for file in sources("arguments", "megatron_moe")]
    modules = [
        name for name in modules if name.startswith("arguments") or loads_without_torch(name[len("megatron_moe.") :])
    ]
    assert len(modules) > 100, modules
    program = "import importlib, sys\n"
    program += f"for name in {modules!r}: importlib.import_module(name)\n"
    program += "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy')))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"R4: modules without torch load torch or numpy, or fail:\n{done.stderr}"


GENERIC = (
    "arguments.emulation", "arguments.huggingface", "arguments.read", "build", "cost_model", "checkpoint",
    "memory_emulation", "model.gpt", "model.mtp", "model.transformer_layer", "planner", "precision", "resilience",
)  # fmt: skip
"""Packages and modules that treat all mixers and feed-forward modules alike, through the protocol of components."""
COMPONENTS = frozenset(
    "AttentionConfig SoftmaxMixerConfig MLAConfig DSAConfig LinearAttentionConfig GatedDeltaNetConfig MambaConfig "
    "KimiDeltaAttentionConfig KimiDeltaAttention "
    "MLPConfig Attention MLA DSA GatedDeltaNet Mamba MLP MoELayer".split()
)
PARSERS = tuple(f"checkpoint.huggingface.config_{name}" for name in ("deepseek_v4", "map", "reader", "write"))
"""Modules that translate between configs and a config.json."""
ROUTED = frozenset("MoEConfig RouterConfig ExpertsConfig moe moe_configs routed_experts with_experts".split())
"""Classes and attributes of MoE layers that the packages of `UNAWARE` must not use; `FeedForwardConfig` has methods for
what they need."""
UNAWARE = ("arguments.emulation.", "arguments.read.", "cost_model.", "memory_emulation.", "planner.")


def component_findings(files: Iterable[Source]) -> list[str]:
    """Imports and attributes of single components in `GENERIC`."""
    findings = []
    for file in files:
        module = file.module.removeprefix("megatron_moe.")
        if module in PARSERS or not any(f"{module}.".startswith(f"{name}.") for name in GENERIC):
            continue
        forbidden = COMPONENTS | ROUTED if f"{module}.".startswith(UNAWARE) else COMPONENTS
        for node in file.nodes:
            if isinstance(node, ast.ImportFrom):
                names = forbidden & {name.name for name in node.names}
                findings += [f"{file.path}:{node.lineno} imports {name}" for name in sorted(names)]
            elif isinstance(node, ast.Attribute) and node.attr in forbidden:
                findings.append(f"{file.path}:{node.lineno} uses {node.attr}")
    return findings


def test_generic_packages_name_no_component():
    report(component_findings(sources(*PROGRAM)), "cost model, planner, checkpoints and builders use Component only")
    planted = source("megatron_moe/planner/work.py", "from megatron_moe.config.mla import MLAConfig")
    assert len(component_findings([planted])) == 1
    for path in ("arguments/read.py", "megatron_moe/cost_model/work.py", "megatron_moe/memory_emulation/rank.py"):
        planted = source(path, "layer.moe.router")
        assert len(component_findings([planted])) == 1


def test_init_files_are_empty():
    findings = [
        f"{file.path}: {file.num_lines} lines" for file in sources(*PROGRAM) if _is_init(file.path) and file.text
    ]
    report(findings, "R1: __init__.py files are empty")


def _is_init(path: str) -> bool:
    return path.endswith("__init__.py")


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("megatron_moe/config/model.py", "import torch", "imports the standard library only"),
        ("megatron_moe/pipeline/schedule.py", "import numpy", "imports the standard library only"),
        ("megatron_moe/config/model.py", "from megatron_moe.parallel import context", "parallel is above config"),
        ("megatron_moe/pipeline/schedule.py", "import megatron_moe.pipeline.executor", "loads without torch"),
        ("megatron_moe/moe/router.py", "from megatron_moe.model.gpt import GPT", "model is above moe"),
        ("megatron_moe/optim/adamw.py", "import megatron_moe.model.gpt", "model is above optim"),
        ("megatron_moe/checkpoint/save.py", "from megatron_moe.moe.moe_layer import MoELayer", "above checkpoint"),
        ("megatron_moe/parallel/exchange.py", "from megatron_moe.kernels.autograd import linear", "above parallel"),
        ("megatron_moe/logs/log_line.py", "from megatron_moe.data.batch import MicroBatch", "data is above logs"),
        ("megatron_moe/moe/moe_layer.py", "import triton.language as tl", "kernels/backends/ only"),
        ("megatron_moe/logs/writers.py", "import wandb", "inside the function"),
        ("megatron_moe/logs/writers.py", "import pandas", "not among the packages"),
        ("megatron_moe/train/trainer.py", "from arguments.parser import read_plan", "api.py and tools only"),
        ("arguments/parser.py", "from megatron_moe.parallel.context import ParallelContext", "without torch only"),
        ("arguments/parser.py", "import numpy", "yaml and modules without torch only"),
        ("megatron_moe/train/trainer.py", "import tests.helpers.tolerances", "nothing imports a program or a test"),
        ("megatron_moe/cellar/wine.py", "import megatron_moe.config.model", "does not list cellar"),
    ],
)
def test_the_check_finds_a_forbidden_import(path, text, problem):
    (finding,) = level_findings([source(path, text)])
    assert problem in finding, finding


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("megatron_moe/kernels/autograd.py", "from megatron_moe.parallel.parameter import Parameter"),
        ("megatron_moe/data/batch.py", "from megatron_moe.logs.metrics import MetricAccumulator"),
        ("megatron_moe/model/gpt.py", "from megatron_moe.moe.moe_layer import MoELayer"),
        ("megatron_moe/kernels/backends/triton/swiglu.py", "import triton"),
        ("megatron_moe/logs/writers.py", "def start():\n    import wandb"),
        ("arguments/resolve.py", "from megatron_moe.cost_model.flops import count_flops"),
        ("pretrain_moe.py", "from arguments.parser import read_plan\nfrom megatron_moe.build import build_model"),
    ],
)
def test_the_check_accepts_allowed_imports(path, text):
    assert level_findings([source(path, text)]) == []


def test_the_checks_find_a_planted_cycle_and_a_planted_late_import():
    ring = [
        source("megatron_moe/moe/router.py", "import megatron_moe.moe.balancing"),
        source("megatron_moe/moe/balancing.py", "import megatron_moe.moe.router"),
    ]
    assert cycles(ring) == [["megatron_moe.moe.balancing", "megatron_moe.moe.router"]]
    assert late_import_findings([source("megatron_moe/moe/router.py", "def f():\n    import math")])
