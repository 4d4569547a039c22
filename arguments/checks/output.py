"""Rules about checkpoints, logging, kernels, fault injection and profiles."""

from pathlib import Path

from arguments.checks.violation import RuleFlags, Violations, conflict, enabled_options, lacks
from megatron_moe.config.faults import parse_fault
from megatron_moe.kernels.backend_names import requestable


def save_needs_interval(flags: RuleFlags) -> Violations:
    """--save requests checkpoints during training, so their interval must be set."""
    if flags.save and flags.save_interval is None:
        yield lacks("--save", "--save-interval", "set --save-interval")


def retain_interval_is_multiple_of_save_interval(flags: RuleFlags) -> Violations:
    """Only saved checkpoints can be retained."""
    if (
        flags.save_retain_interval is not None
        and flags.save_interval is not None
        and flags.save_retain_interval % flags.save_interval
    ):
        yield (
            f"--save-retain-interval {flags.save_retain_interval} is not a multiple of "
            f"--save-interval {flags.save_interval}",
            f"--save-retain-interval {-(-flags.save_retain_interval // flags.save_interval) * flags.save_interval}",
        )


def loaded_checkpoints_are_in_folders(flags: RuleFlags) -> Violations:
    """A checkpoint is a folder; a folder without one may be given to a first run, which starts from random weights."""
    if flags.load and Path(flags.load).is_file():
        yield f"--load {flags.load} is a file", "give a folder of checkpoints, or hf:FOLDER for a Hugging Face model"
    if flags.pretrained_checkpoint and Path(flags.pretrained_checkpoint).is_file():
        yield f"--pretrained-checkpoint {flags.pretrained_checkpoint} is a file", "give a folder of checkpoints"


def ckpt_step_needs_folder(flags: RuleFlags) -> Violations:
    """--ckpt-step selects an iteration in a checkpoint directory."""
    if flags.ckpt_step is not None and not (flags.load or flags.save or flags.run_dir):
        yield lacks(f"--ckpt-step {flags.ckpt_step}", "a checkpoint directory", "set --load")


def ckpt_step_is_not_moved_aside(flags: RuleFlags) -> Violations:
    """--fresh moves the checkpoints in this run's directory aside before the run starts."""
    if flags.ckpt_step is not None and flags.fresh and flags.load in (None, flags.save):
        remedy = "leave out --fresh, or set --load to another directory"
        yield conflict(f"--ckpt-step {flags.ckpt_step}", "--fresh", remedy)


def missing_checkpoint_exit_needs_load(flags: RuleFlags) -> Violations:
    """--exit-on-missing-checkpoint needs a directory in which a checkpoint is expected."""
    if flags.exit_on_missing_checkpoint and not flags.load and not flags.pretrained_checkpoint:
        yield lacks("--exit-on-missing-checkpoint", "a checkpoint directory", "set --load")


def hf_export_has_folder(flags: RuleFlags) -> Violations:
    """Exports are written next to the checkpoints."""
    if flags.save_hf_interval is not None and not flags.save and not flags.run_dir:
        remedy = "set --save or --run-dir"
        yield lacks(f"--save-hf-interval {flags.save_hf_interval}", "a directory to write to", remedy)


def wandb_run_has_name(flags: RuleFlags) -> Violations:
    """Runs of a W&B project are identified by name."""
    if flags.wandb_project and not flags.wandb_exp_name:
        yield lacks(f"--wandb-project {flags.wandb_project}", "a run name", "set --wandb-exp-name")


def kernel_requests_are_pairs(flags: RuleFlags) -> Violations:
    """Every value of --kernel-per-op has the form OP=BACKEND."""
    malformed = [request for request in flags.kernel_per_op if not all(request.partition("="))]
    if malformed:
        yield f"--kernel-per-op {malformed[0]} is not of the form OP=BACKEND", "write it like rms_norm=reference"


def kernel_backends_exist(flags: RuleFlags) -> Violations:
    """Every kernel backend is named after its file; `reference` is plain PyTorch."""
    known = requestable()
    requests = [("--kernel-backend", flags.kernel_backend)]
    requests += [("--kernel-per-op", request.partition("=")[2]) for request in flags.kernel_per_op]
    for option, name in requests:
        if name and name not in known:
            yield f"{option}: there is no kernel backend {name}", f"use {', '.join(known)}"


def injected_faults_are_valid(flags: RuleFlags) -> Violations:
    """A fault has a kind, an existing rank and an iteration."""
    for text in flags.inject:
        try:
            fault = parse_fault(text)
        except ValueError as problem:
            yield f"--inject {problem}", "write it like kill@1:7 or disk-full@0:20:save"
            continue
        if fault.rank >= flags.num_ranks:
            yield f"--inject {text} is for rank {fault.rank} of {flags.num_ranks}", "count ranks from 0"


def profiled_range_is_not_empty(flags: RuleFlags) -> Violations:
    """The profiled iterations are those after --profile-step-start, up to and including --profile-step-end."""
    if flags.profile and flags.profile_step_end <= flags.profile_step_start:
        yield (
            f"--profile-step-end {flags.profile_step_end} is not after --profile-step-start {flags.profile_step_start}",
            f"use --profile-step-end {flags.profile_step_start + 1} or more",
        )


def profile_needs_run_dir(flags: RuleFlags) -> Violations:
    """Traces and memory snapshots are written to the run directory."""
    writers = {
        "--profile --use-pytorch-profiler": flags.profile and flags.use_pytorch_profiler,
        "--record-memory-history": flags.record_memory_history,
    }
    if flags.run_dir is None and any(writers.values()):
        yield lacks(enabled_options(writers), "--run-dir", "set --run-dir")
