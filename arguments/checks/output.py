"""Rules about checkpoints, logs and kernels."""

from arguments.checks.violation import Violation
from megatron_moe.config.faults import parse_fault


def saving_has_a_rhythm(save: str | None, save_interval: int | None) -> Violation:
    """Somebody who names a folder for checkpoints expects them during the run."""
    if save and save_interval is None:
        return "--save does not say how often", "give --save-interval"
    return None


def retained_checkpoints_are_saved(save_retain_interval: int | None, save_interval: int | None) -> Violation:
    """A checkpoint that is to be kept must have been saved."""
    if save_retain_interval is None or save_interval is None or save_retain_interval % save_interval == 0:
        return None
    return (
        f"--save-retain-interval {save_retain_interval} is not a multiple of --save-interval {save_interval}",
        f"--save-retain-interval {-(-save_retain_interval // save_interval) * save_interval}",
    )


def step_belongs_to_a_folder(
    ckpt_step: int | None, load: str | None, save: str | None, run_dir: str | None
) -> Violation:
    """The iteration to load is one of a folder with checkpoints."""
    if ckpt_step is not None and not (load or save or run_dir):
        return f"--ckpt-step {ckpt_step} has no folder to load from", "give --load"
    return None


def missing_means_a_folder(
    exit_on_missing_checkpoint: bool, load: str | None, pretrained_checkpoint: str | None
) -> Violation:
    """A checkpoint can only be missing where one is expected."""
    if exit_on_missing_checkpoint and not load and not pretrained_checkpoint:
        return "--exit-on-missing-checkpoint expects a checkpoint, but no folder is given", "give --load"
    return None


def exports_have_a_place(
    save_hf_interval: int | None,
    save_hf_config: str | None,
    save: str | None,
    run_dir: str | None,
    load: str | None,
    pretrained_checkpoint: str | None,
) -> Violation:
    """Exports stand beside the checkpoints, and carry a config.json that somebody must give."""
    if save_hf_interval is None:
        return None
    if not save and not run_dir:
        return f"--save-hf-interval {save_hf_interval} has no folder to write to", "give --save or --run-dir"
    if not save_hf_config and not any((place or "").startswith("hf:") for place in (load, pretrained_checkpoint)):
        remedy = "give --save-hf-config, a folder with the config.json of the model"
        return f"--save-hf-interval {save_hf_interval} exports a model without a config.json", remedy
    return None


def wandb_run_has_a_name(wandb_project: str | None, wandb_exp_name: str | None) -> Violation:
    """Runs of a W&B project are told apart by their names."""
    if wandb_project and not wandb_exp_name:
        return f"the W&B project {wandb_project} gets a run without a name", "give --wandb-exp-name"
    return None


def kernel_wishes_are_pairs(kernel_per_op: tuple[str, ...]) -> Violation:
    """A wish names an op and the backend that shall compute it."""
    strange = [wish for wish in kernel_per_op if not all(wish.partition("="))]
    if strange:
        return f"--kernel-per-op {strange[0]} is not a pair", "write it like rms_norm=reference"
    return None


def faults_are_known(inject: tuple[str, ...], world_size: int) -> Violation:
    """A fault has a kind, a rank that is there, and an iteration."""
    for text in inject:
        try:
            fault = parse_fault(text)
        except ValueError as problem:
            return f"--inject {problem}", "write it like kill@1:7 or disk-full@0:20:save"
        if fault.rank >= world_size:
            return f"--inject {text} is for rank {fault.rank} of {world_size}", "count ranks from 0"
    return None


def profiles_have_an_end(profile: bool, profile_step_start: int, profile_step_end: int) -> Violation:
    """The first profiled iteration comes after the start, and the last one is the end."""
    if not profile or profile_step_end > profile_step_start:
        return None
    return (
        f"--profile from behind iteration {profile_step_start} to {profile_step_end} profiles nothing",
        f"give --profile-step-end {profile_step_start + 1} or more",
    )


def profiles_have_a_folder(
    profile: bool, use_pytorch_profiler: bool, record_memory_history: bool, run_dir: str | None
) -> Violation:
    """Traces and snapshots are files of a run."""
    writes = {
        "--profile --use-pytorch-profiler": profile and use_pytorch_profiler,
        "--record-memory-history": record_memory_history,
    }
    given = [name for name, there in writes.items() if there]
    if run_dir is not None or not given:
        return None
    return f"{' and '.join(given)} without a run folder", "give --run-dir"


RULES = (
    profiles_have_an_end,
    profiles_have_a_folder,
    faults_are_known,
    saving_has_a_rhythm,
    retained_checkpoints_are_saved,
    step_belongs_to_a_folder,
    missing_means_a_folder,
    exports_have_a_place,
    wandb_run_has_a_name,
    kernel_wishes_are_pairs,
)
