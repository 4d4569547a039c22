"""The door: `--proxy` rewrites the flags of a big run into those of a small one that takes the same paths."""

from collections.abc import Mapping
from dataclasses import replace

from arguments.checks.run import FULL_SIZE_RULES, broken_rules
from arguments.errors import FlagErrors
from arguments.parser import Setting, Settings
from arguments.proxy import fold
from arguments.proxy.depth import lower_depth
from arguments.proxy.draft import Draft
from arguments.proxy.machine import on_this_machine
from arguments.proxy.ranks import fold_ranks, lower_batch, lower_length
from arguments.proxy.width import lower_width
from megatron_moe.specs.parallel import Launch


def proxied(settings: Settings, pinned: Mapping[str, Setting], num_ranks: int) -> tuple[Settings, list[str]]:
    """Settings of a small run on `num_ranks` ranks, and a line about every rewrite.

    Args:
        settings: of the run at full size; every required flag is known.
        pinned: values that stay as they are, whatever they do to the rest.
        num_ranks: of the small run.

    Raises:
        FlagErrors: the model at full size breaks a rule.
    """
    draft = Draft(settings, pinned)
    on_this_machine(draft)
    problems = list(broken_rules(draft.settings, Launch(), FULL_SIZE_RULES))
    if problems:
        raise FlagErrors([replace(problem, what=f"at full size: {problem.what}") for problem in problems])
    wanted, etp_is_tp, two_levels = wanted_sizes(draft.settings)
    sizes = fold.fold(wanted, num_ranks, etp_is_tp=etp_is_tp, two_levels=two_levels)
    lower_depth(draft, sizes)
    lower_width(draft, sizes)
    fold_ranks(draft, sizes)
    draft.take_pinned()
    lower_length(draft, sizes)
    lower_batch(draft, sizes)
    return draft.settings, draft.notes


def wanted_sizes(settings: Settings) -> tuple[fold.Sizes, bool, bool]:
    """Sizes of the axes at full size; are experts split like the rest; are context-parallel ranks on two levels.

    How many ranks there are at full size is not known here, so both grids are taken to hold copies.
    """

    def size(name: str) -> int:
        return int(settings.setting(name).value)

    etp, tp = settings.setting("expert_tensor_parallel_size").value, size("tensor_model_parallel_size")
    wanted = fold.Sizes(
        tp=tp,
        cp=size("context_parallel_size"),
        pp=size("pipeline_model_parallel_size"),
        ep=size("expert_model_parallel_size") if settings.setting("num_experts").value else 1,
        etp=etp or tp,
        dp=2,
        edp=2,
    )
    return wanted, etp is None, "a2a+p2p" in settings.setting("cp_comm_type").value
