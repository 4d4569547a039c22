"""Kernel warm-up: the kernels recorded on the `meta` device are those that the warm-up step launches on the GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.test_step_on_one_gpu import LAYERS, SMALL

pytestmark = pytest.mark.gpu1

PROGRAM = """
import json, os, sys
from pathlib import Path
from arguments.read import read_plan
from megatron_moe.data.tokenizer import vocab_size_of

plan = read_plan(sys.argv[1:], os.environ, vocab_size_of=vocab_size_of)
import torch, triton
from megatron_moe.warmup.kernel_warmup import compile_kernels, take_step

made = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **rest: cache_hit or made.append(src.name)
device = torch.device("cuda", 0)
error = compile_kernels(plan, device, Path(os.environ["TRITON_CACHE_DIR"]))
recorded = list(made)
take_step(plan, device)
print(json.dumps([error, recorded, made[len(recorded):]]))
"""
EXCHANGE = "--expert-model-parallel-size 2 --moe-token-dispatcher-type"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("flags", [LAYERS["q6"], f"{EXCHANGE} flex", f"{EXCHANGE} alltoall"], ids=["", "flex", "nccl"])
def test_warm_up_step_compiles_only_recorded_kernels(tmp_path: Path, flags: str, rank: int) -> None:
    launch = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    launch |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TRITON_CACHE_DIR": str(tmp_path)}
    words = [sys.executable, "-c", PROGRAM, "--recipe", "q6", *SMALL.split(), *flags.split()]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | launch)
    assert done.returncode == 0, done.stderr
    error, recorded, compiled_later = json.loads(done.stdout.splitlines()[-1])
    assert error == "" and len(recorded) > 30
    assert compiled_later == []
