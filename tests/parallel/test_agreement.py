"""Ranks launched with different arguments raise an error that names them."""

import pytest

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.agreement import check_agreement
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads

YAML = "# derived: 2 ranks\noptimizer:\n  lr: 0.1      # command line\ndata:\n  data-path: /a/{rank}   # default\n"


def test_a_flag_that_differs_is_named_with_both_values_on_every_rank() -> None:

    def main(context: ParallelContext) -> str:
        with pytest.raises(EnvironmentProblem) as problem:
            check_agreement(YAML.replace("0.1", f"0.{1 + context.rank}"), context)
        return str(problem.value)

    for said in on_threads(ParallelConfig(world_size=2), main):
        assert said.endswith("  lr: 0.1 on rank 0, 0.2 on rank 1")


def test_paths_and_origins_may_differ() -> None:
    def main(context: ParallelContext) -> None:
        check_agreement(YAML.format(rank=context.rank).replace("command line", f"rank {context.rank}"), context)

    on_threads(ParallelConfig(world_size=2), main)
