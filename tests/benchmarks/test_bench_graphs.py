"""Tests of bench_graphs: the flags of each mode."""

import pytest

from arguments.read import read_plan
from benchmarks.harness import bench_graphs
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.memory import CudaGraphConfig
from tests.helpers.command_lines import plan_of


@pytest.mark.parametrize(
    ("mode", "graphs"),
    [
        ("none", CudaGraphConfig()),
        ("attn,moe_router", CudaGraphConfig(cuda_graph_modules=("attn", "moe_router"))),
        ("full_iteration", CudaGraphConfig(full_iteration=True)),
    ],
)
def test_modes_are_kinds_of_graphs(mode, graphs):
    still = "--attention-dropout 0 --hidden-dropout 0"
    assert plan_of(" ".join([still, *bench_graphs.flags_of(mode)])).cuda_graphs == graphs


@pytest.mark.parametrize("mode", ["none", "attn,moe_router,moe_preprocess", "attn,moe", "full_iteration"])
@pytest.mark.parametrize("recipe", ["q6", "m8"])
def test_the_recipes_that_are_timed_take_every_mode(recipe, mode):
    words = ["--recipe", recipe, *bench_graphs.flags_of(mode)]
    plan = read_plan(words, {}, vocab_size_of=lambda config: config.vocab_size or 0)
    assert plan.cuda_graphs.full_iteration or plan.cuda_graphs.cuda_graph_modules or mode == "none"


def test_a_missing_gpu_is_reported(capsys):
    assert bench_graphs.main(["none", "--", "--recipe", "q6"]) == ExitCode.ENVIRONMENT
    assert "torch finds no GPU here" in capsys.readouterr().err
