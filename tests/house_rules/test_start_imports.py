"""Modules that a start must not import, because every run would pay for them."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from tests.house_rules.source import ROOT

PROGRAM = """
import json, sys

def imported():
    print(json.dumps(sorted(name for name in sys.modules if name.startswith(PREFIXES))))

PREFIXES = ("megatron_moe.kernels.backends.", "matplotlib", "sympy", "torch._dynamo", "torch._inductor",
            "torch.distributed.tensor", "triton", "wandb")
import megatron_moe.kernels.registry
imported()
import torch, megatron_moe.build
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.registry import select_kernels
select_kernels(KernelConfig(), torch.device("cpu"), torch.float32)
imported()
from megatron_moe.warmup.kernel_warmup import take_step
from tests.helpers import tiny
take_step(tiny.plan(), torch.device("cpu"))
imported()
"""
STAGES = ("the registry of kernels", "the selection of kernels on a CPU", "a warm-up step on a CPU")


@cache
def imported() -> dict[str, list[str]]:
    """Modules with a prefix of `PROGRAM` that are imported after each of its stages."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(STAGES, map(json.loads, done.stdout.splitlines()), strict=True))


BACKENDS = "megatron_moe.kernels.backends."
USED = tuple(f"{BACKENDS}{name}" for name in ("torch_native", "triton", "triton.launcher", "triton.precompile"))
"""Parts of backends that a run on a CPU uses. Those of Triton import neither Triton nor its kernels."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_start_imports_no_unused_packages(stage: str) -> None:
    """For example, the import of torch's compiler took seconds."""
    found = [name for name in imported()[stage] if not name.startswith(f"{USED[0]}.") and name not in USED]
    assert found == []
    assert (USED[0] in imported()[stage]) == (stage != STAGES[0])
