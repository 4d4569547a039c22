"""Parses the flags of `--dry-run` and creates the report of a plan."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from arguments import derive
from arguments.checks.data import tokenizer_is_complete
from arguments.checks.violation import RuleFlags
from arguments.dry_run.cluster import ClusterFlags, cluster_of
from arguments.dry_run.inputs import random_start, unsupported_formats
from arguments.dry_run.packing import packed_rows
from arguments.dry_run.report import report
from arguments.errors import Finished, FlagErrors
from arguments.files import read_files
from arguments.flags import Flags
from arguments.launch import launch_of, rank_0_of
from arguments.parser import Settings, merge_settings
from arguments.plan_settings import planner_of, suggested_fits
from arguments.recipes import find_recipe
from arguments.run_length import RunLength
from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.exit_codes import ExitCode, RunError
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.planner.report import ReportValues, report_values, too_long_to_simulate

_GPT2_VOCABULARY = 50_257
_DRY_RUN_ONLY = ("gpu_memory", "gpu_tflops", "gpu_bandwidth", "link_bandwidth", "tokens", "gpu_hour_price")


@dataclass(frozen=True)
class DryRunRequest:
    """Format of the dry-run report, and the machine that it assumes."""

    fmt: Literal["text", "json"]
    gpu: GPU
    environ: Mapping[str, str]
    """Environment variables of rank 0."""


def dry_run_request(start: Settings, environ: Mapping[str, str]) -> DryRunRequest | None:
    """Parses the dry-run flags; returns None if `--dry-run` is not given. The world size is taken from the flags, else
    from the launcher, otherwise from the recipe, otherwise it is 1.

    Raises FlagErrors."""
    fmt = start.setting("dry_run").value
    if fmt is None:
        emulated = ("gpu_memory",) if start.setting("fake_process_group").value else ()
        given = [name for name in _DRY_RUN_ONLY if start.setting(name).value is not None and name not in emulated]
        if given:
            raise FlagErrors.of(f"{start.registry.flags[given[0]].option} without --dry-run", "add --dry-run")
        return None
    return DryRunRequest(fmt, *assumed_machine(start, environ))


def assumed_machine(start: Settings, environ: Mapping[str, str]) -> tuple[GPU, dict[str, str]]:
    """Returns the GPU type that a dry run or an emulation assumes, and the environment variables of rank 0."""
    flags = ClusterFlags.of(start)
    launched = 1 if flags.has_size else launch_of(environ).world_size
    if start.setting("proxy").value and not flags.has_size:
        flags = replace(flags, gpus=launched)
    cluster = cluster_of(flags, start, environ, launched=launched)
    rank_0 = rank_0_of(cluster.world_size, cluster.ranks_per_node)
    return cluster.gpu, {**environ, "TORCHELASTIC_RUN_ID": "dry run", **rank_0}


def or_size_from_flags(
    vocab_size_of: Callable[[TokenizerConfig], int] | None,
    flags: Flags,
    unavailable: list[str],
    *,
    checks_packages: bool,
) -> Callable[[TokenizerConfig], int] | None:
    """Wraps `vocab_size_of` (None is returned unchanged) for dry runs, which need only the vocabulary size, not the
    tokenizer.

    If the tokenizer cannot be read, adds the reason to `unavailable` and returns the size given by flags, or GPT-2's. A
    package that is not installed is a reason only if `checks_packages`.
    """
    if vocab_size_of is None:
        return None
    read_size, given = vocab_size_of, flags.vocab_size or flags.padded_vocab_size

    def vocab_size(config: TokenizerConfig) -> int:
        try:
            return read_size(config)
        except RunError as error:
            known = given or (_GPT2_VOCABULARY if config.tokenizer_type == "GPT2BPETokenizer" else None)
            if known is None:
                remedy = "give --vocab-size; a dry run needs no other part of the tokenizer"
                raise FlagErrors.of(str(error), remedy) from None
            if error.code is ExitCode.ENVIRONMENT and not checks_packages:
                return known
            if not given:
                unavailable.append(f"{error}; the figures assume GPT-2's vocabulary of {known:,} tokens")
            elif not any(tokenizer_is_complete(cast(RuleFlags, flags))):  # else reported as a broken rule
                unavailable.append(str(error))
            return known

    return vocab_size


def with_tokenizer(flags: Flags) -> Flags:
    """Substitutes a NullTokenizer if no tokenizer is given, since a dry run needs only the vocabulary size.

    Raises:
        FlagErrors: neither a tokenizer nor the vocabulary size is given.
    """
    kind = derive.tokenizer_type(flags)
    if flags.vocab_size is None and kind in (None, "NullTokenizer"):
        remedy = "give --vocab-size; a dry run needs no other part of the tokenizer"
        raise FlagErrors.of("the vocabulary size is not known", remedy)
    return flags if kind else replace(flags, tokenizer_type="NullTokenizer")


def finished_report(plan: RunPlan, request: DryRunRequest, settings: Settings) -> Finished:
    """Creates the report of a plan. The exit code is OK if the run would start, otherwise NOT_READY.

    Raises FlagErrors if the simulation of the pipeline schedule would take too long.
    """
    too_long = too_long_to_simulate(plan)
    if too_long:
        remedy = "use fewer pipeline ranks, smaller groups or a smaller --moe-expert-wgrad-interval"
        raise FlagErrors.of(too_long, remedy)
    missing = (*plan.missing_inputs, *unsupported_formats(plan.precision, request.gpu))
    plan = replace(plan, missing_inputs=missing, notes=(*plan.notes, *random_start(plan.checkpoint)))
    values = dry_run_values(plan, request.gpu, settings)
    text = json.dumps(values, indent=2) if request.fmt == "json" else report(values)
    return Finished(text, ExitCode.OK if values["would_start"] else ExitCode.NOT_READY)


def dry_run_values(plan: RunPlan, gpu: GPU, settings: Settings) -> ReportValues:
    """Returns the contents of the report: whether the run would start and what it lacks, figures of the plan, the
    environment, notes, and differences from the recipe."""
    recipe = settings.setting("recipe").value
    return {
        "recipe": recipe,
        "would_start": not (plan.missing_inputs or plan.blockers),
        "missing_inputs": list(plan.missing_inputs),
        **_with_estimates(plan, gpu, settings),
        "environment": dict(plan.environment),
        "cannot_train_yet": list(plan.blockers),
        "notes": list(plan.notes),
        "differences": _differences(settings) if recipe is not None else [],
    }


def _with_estimates(plan: RunPlan, gpu: GPU, settings: Settings) -> ReportValues:
    """Report values of the plan, with estimates of its time and, if it does not fit, with plans that do."""
    values = report_values(plan, gpu)
    if plan.unknown_layers:
        return values
    values["padding"]["packed_rows"] = packed_rows(plan)
    values["time"]["run"] = RunLength.of(settings).values(plan, values["time"]["estimate"]["step_ms"] / 1e3)
    if not values["memory"]["fits"]:
        values["memory"] |= suggested_fits(plan, planner_of(settings, gpu), settings)
    return values


def _differences(settings: Settings) -> list[str]:
    """Returns one line per flag whose value differs from the value in the recipe."""
    path = find_recipe(str(settings.setting("recipe").value))
    assert path is not None, "the recipe was read before"
    registry = settings.registry
    own = merge_settings(registry, [file.flags for file in read_files(path, registry, {})])
    lines = []
    for name, flag in registry.flags.items():
        before, after = own.setting(name), settings.setting(name)
        both_known = flag.group != "start" and own.known(name) and settings.known(name)
        if both_known and before.value != after.value:
            lines.append(f"{flag.option} {flag.text(after.value)} ({after.origin}); recipe: {flag.text(before.value)}")
    return lines


def without_texts(values: ReportValues) -> ReportValues:
    """Copy of a report for the documentation, with empty texts and environment."""
    lists: dict[str, list[str]] = {name: [] for name in ("missing_inputs", "cannot_train_yet", "notes", "differences")}
    return {**values, "would_start": True, "environment": {}, **lists}
