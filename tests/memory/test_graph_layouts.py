"""The command lines of the GPU tests of CUDA graphs in published layouts are valid and capture what they name."""

import pytest

from arguments.read import read_plan
from megatron_moe.data.tokenizer import vocab_size_of
from tests.gpu.graph_layouts import CASES, SHAPES, SHORT_OF_PAGES
from tests.helpers.graph_counts import expected_graphs

BOTH = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("name", CASES)
def test_command_lines_of_gpu_tests_are_valid(name: str) -> None:
    layout, kinds = CASES[name]
    for rank in ("0", "1"):
        environ = {**BOTH, "RANK": rank, "LOCAL_RANK": rank}
        eager = read_plan([*SHAPES.split(), *layout.split()], environ, vocab_size_of=vocab_size_of)
        assert bool(eager.parallel.tp_comm_overlap) == ("--tp-comm-overlap" in layout)
        assert not eager.cuda_graphs.full_iteration and not eager.cuda_graphs.cuda_graph_modules
        for words in kinds:
            plan = read_plan([*SHAPES.split(), *layout.split(), *words.split()], environ, vocab_size_of=vocab_size_of)
            assert (plan.model, plan.parallel, plan.batch) == (eager.model, eager.parallel, eager.batch)
            assert expected_graphs(plan, int(rank) if plan.parallel.pp > 1 else 0) > 0, words


def test_cases_short_of_pages_have_a_stash() -> None:
    assert all("--moe-paged-stash" in CASES[name][0] for name in SHORT_OF_PAGES)
