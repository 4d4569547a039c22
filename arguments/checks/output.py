"""Rules about checkpoints, logging, kernels, fault injection and profiles."""

from arguments.checks.violation import Violation, functions_returning
from megatron_moe.config.faults import parse_fault


def save_needs_interval(save: str | None, save_interval: int | None) -> Violation:
    """--save requests checkpoints during training."""
    if save and save_interval is None:
        return "--save without --save-interval", "set --save-interval"
    return None


def retain_interval_is_multiple_of_save_interval(
    save_retain_interval: int | None, save_interval: int | None
) -> Violation:
    """Only saved checkpoints can be retained."""
    if save_retain_interval is None or save_interval is None or save_retain_interval % save_interval == 0:
        return None
    return (
        f"--save-retain-interval {save_retain_interval} is not a multiple of --save-interval {save_interval}",
        f"--save-retain-interval {-(-save_retain_interval // save_interval) * save_interval}",
    )


def ckpt_step_needs_folder(ckpt_step: int | None, load: str | None, save: str | None, run_dir: str | None) -> Violation:
    """The iteration is loaded from a checkpoint directory."""
    if ckpt_step is not None and not (load or save or run_dir):
        return f"--ckpt-step {ckpt_step} without a checkpoint directory", "set --load"
    return None


def missing_checkpoint_exit_needs_load(
    exit_on_missing_checkpoint: bool, load: str | None, pretrained_checkpoint: str | None
) -> Violation:
    """The exit depends on a checkpoint that is expected to exist."""
    if exit_on_missing_checkpoint and not load and not pretrained_checkpoint:
        return "--exit-on-missing-checkpoint without a checkpoint directory", "set --load"
    return None


def hf_export_has_folder_and_config(
    save_hf_interval: int | None,
    save_hf_config: str | None,
    save: str | None,
    run_dir: str | None,
    load: str | None,
    pretrained_checkpoint: str | None,
) -> Violation:
    """Exports are written next to the checkpoints and include the model's config.json."""
    if save_hf_interval is None:
        return None
    if not save and not run_dir:
        return f"--save-hf-interval {save_hf_interval} without a directory to write to", "set --save or --run-dir"
    if not save_hf_config and not any((place or "").startswith("hf:") for place in (load, pretrained_checkpoint)):
        remedy = "set --save-hf-config, a directory with the config.json of the model"
        return f"--save-hf-interval {save_hf_interval} without a config.json", remedy
    return None


def wandb_run_has_name(wandb_project: str | None, wandb_exp_name: str | None) -> Violation:
    """Runs of a W&B project are identified by name."""
    if wandb_project and not wandb_exp_name:
        return f"--wandb-project {wandb_project} without a run name", "set --wandb-exp-name"
    return None


def kernel_requests_are_pairs(kernel_per_op: tuple[str, ...]) -> Violation:
    """A request maps an op to a backend."""
    malformed = [request for request in kernel_per_op if not all(request.partition("="))]
    if malformed:
        return f"--kernel-per-op {malformed[0]} is not a pair", "write it like rms_norm=reference"
    return None


def injected_faults_are_valid(inject: tuple[str, ...], world_size: int) -> Violation:
    """A fault has a kind, an existing rank and an iteration."""
    for text in inject:
        try:
            fault = parse_fault(text)
        except ValueError as problem:
            return f"--inject {problem}", "write it like kill@1:7 or disk-full@0:20:save"
        if fault.rank >= world_size:
            return f"--inject {text} is for rank {fault.rank} of {world_size}", "count ranks from 0"
    return None


def profiled_range_is_not_empty(profile: bool, profile_step_start: int, profile_step_end: int) -> Violation:
    """Profiling starts after --profile-step-start and ends with --profile-step-end."""
    if not profile or profile_step_end > profile_step_start:
        return None
    return (
        f"--profile-step-end {profile_step_end} is not after --profile-step-start {profile_step_start}",
        f"use --profile-step-end {profile_step_start + 1} or more",
    )


def profile_needs_run_dir(
    profile: bool, use_pytorch_profiler: bool, record_memory_history: bool, run_dir: str | None
) -> Violation:
    """Traces and memory snapshots are written to the run directory."""
    writes = {
        "--profile --use-pytorch-profiler": profile and use_pytorch_profiler,
        "--record-memory-history": record_memory_history,
    }
    given = [name for name, enabled in writes.items() if enabled]
    if run_dir is not None or not given:
        return None
    return f"{' and '.join(given)} without --run-dir", "set --run-dir"


RULES = functions_returning(Violation, globals())
