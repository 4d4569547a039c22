"""The door: `--proxy` rewrites the flags of a big run into those of a small one that takes the same paths."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from arguments.checks.run import FULL_SIZE_RULES, broken_rules
from arguments.errors import FlagErrors, Problem
from arguments.parser import Setting, Settings
from arguments.proxy.depth import lower_depth
from arguments.proxy.draft import Draft
from arguments.proxy.fold import Sizes, Wish, fold
from arguments.proxy.machine import on_this_machine
from arguments.proxy.ranks import fold_ranks, lower_batch, lower_length
from arguments.proxy.width import lower_width
from megatron_moe.config.parallel import Launch
from megatron_moe.parallel.grid import FoldError

_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_model_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    }
)


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
    try:
        sizes = fold(wish_of(draft.settings, pinned), num_ranks)
    except FoldError as error:
        raise FlagErrors([Problem(what=str(error), remedy="give fewer of them, or other ranks")]) from None
    lower_depth(draft, sizes)
    lower_width(draft, sizes)
    fold_ranks(draft, sizes)
    draft.take_pinned()
    lower_length(draft, sizes)
    lower_batch(draft, sizes)
    return draft.settings, draft.notes


def wish_of(settings: Settings, pinned: Mapping[str, Setting]) -> Wish:
    """The layout at full size.

    How many ranks there are at full size is not known here, so both grids are taken to hold copies.
    """

    def size(name: str) -> int:
        return int(settings.setting(name).value)

    etp, tp = settings.setting(_FLAGS["etp"]).value, size(_FLAGS["tp"])
    sizes = Sizes(
        tp=tp,
        cp=size(_FLAGS["cp"]),
        pp=size(_FLAGS["pp"]),
        ep=size(_FLAGS["ep"]) if settings.setting("num_experts").value else 1,
        etp=etp or tp,
        dp=2,
        edp=2,
    )
    fixed = {axis: pinned[name].value for axis, name in _FLAGS.items() if name in pinned and pinned[name].value}
    return Wish(
        sizes=sizes,
        etp_is_tp=etp is None and "etp" not in fixed,
        two_levels="a2a+p2p" in settings.setting("cp_comm_type").value,
        fixed=fixed,
    )
