"""Return type, argument type, decorators and helpers of the rules about flags."""

from collections.abc import Callable, Iterator, Mapping

from arguments.flags import Flags
from arguments.values import LayerPattern
from megatron_moe.config.text import counted

Violations = Iterator[tuple[str, str]]
"""Iterator of pairs of texts for the user: (problem, remedy). Only the first pair that a rule yields is reported."""


def conflict(setting: str, other: str, remedy: str = "leave one of them out") -> tuple[str, str]:
    """Violation by two settings that exclude each other. `other` may end with a reason: `--b, which has no c`."""
    return f"{setting} cannot be combined with {other}", remedy


def lacks(setting: str, needed: str, remedy: str) -> tuple[str, str]:
    """Violation by a setting that requires another one."""
    return f"{setting} cannot be used without {needed}", remedy


def enabled_options(options: Mapping[str, object]) -> str:
    """Joins the options whose value is true: `--a and --b`."""
    return " and ".join(option for option, value in options.items() if value)


def unfit_pattern(option: str, pattern: LayerPattern, num_layers: int) -> Violations:
    """Yields a violation if `pattern`, an interval or a list with a 0 or 1 per layer, does not fit `num_layers`."""
    if isinstance(pattern, int):
        if pattern < 1:
            yield f"{option} {pattern} is not an interval of layers", "use 1 or more"
        return
    if len(pattern) != num_layers:
        described = counted(len(pattern), "layer")
        yield f"{option} describes {described}, but the model has {num_layers}", "make the list as long as --num-layers"
    invalid = sorted(set(pattern) - {0, 1})
    if invalid:
        yield f"{option} holds {', '.join(map(str, invalid))}, but the entries must be 0 or 1", "use only 0 and 1"


class RuleFlags(Flags):
    """Flags, launch properties and derived values that rules can read."""

    num_ranks: int
    ranks_per_host: int
    missing_libraries: tuple[str, ...]
    """Modules of expert transports that are not installed; see `ProcessInfo`."""
    data_parallel_size: int
    """Number of data-parallel ranks; undefined if the model-parallel sizes do not divide the number of ranks."""
    forced_routing_of_files: str
    """Option that forces the routing and was not set on the command line; empty if there is none."""
    virtual_stages: int
    """Number of virtual stages per pipeline rank; undefined if the layers cannot be divided among the stages."""


def lists_given_flags(rule: Callable[..., Violations]) -> Callable[..., Violations]:
    """Decorates a rule whose report lists only flags set by the user. Reports of other rules also list defaults."""
    rule.lists_given_flags = True  # type: ignore[attr-defined]
    return rule


def missing_feature(rule: Callable[..., Violations]) -> Callable[..., Violations]:
    """Decorates a rule about a feature that is not implemented yet: a violation prevents a run, but not --dry-run."""
    rule.missing_feature = True  # type: ignore[attr-defined]
    return rule
