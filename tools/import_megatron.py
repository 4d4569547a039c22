"""Converts weights and optimizer state of a Megatron-Core checkpoint on CPU, with one tensor in memory at a time.

    python tools/import_megatron.py --load ckpts/iter_0010000 --save runs/my/checkpoints -- --config my.yaml

The arguments after `--` are pretrain_moe.py flags of the run to continue; they describe the model. Reads `torch_dist`
checkpoints with per-parameter optimizer state (--dist-ckpt-optim-fully-reshardable in Megatron) and `fsdp_dtensor`
checkpoints of Megatron-FSDP. With --no-optimizer, reads only the weights, from any of these or from the older format
with one mp_rank_* folder per rank.
To resume at the checkpoint's iteration, start the run with `--load runs/my/checkpoints`; add --finetune to start from
the weights only. No code that the checkpoint's pickles reference is executed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder
if __name__ == "__main__" and sys.stderr.isatty():
    print("loading torch", file=sys.stderr, flush=True)

from megatron_moe.api import plan_of_run
from megatron_moe.build import build_train_state_config
from megatron_moe.checkpoint.directory import TRACKER, iteration_folder, list_checkpoints, read_tracker
from megatron_moe.checkpoint.megatron.source import import_model, open_megatron
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.config.exit_codes import CheckpointProblem, EnvironmentProblem, ExitCode
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.train_state import TrainState
from tools._common import reports_errors, run_main, split_at_dashes, tool_parser
from tools.convert_checkpoint import build_meta_model


@reports_errors
def main(argv: Sequence[str]) -> int:
    own, flags = split_at_dashes(argv)
    parser = tool_parser(__doc__)
    parser.add_argument("--load", type=Path, required=True, help="iter_NNNNNNN, or the folder that contains it")
    parser.add_argument("--save", type=Path, required=True, help="folder for checkpoints, which must not hold any")
    parser.add_argument(
        "--no-optimizer", action="store_true", help="import only the weights, as a checkpoint of iteration 0"
    )
    options = parser.parse_args(own)
    print(convert(tracked_checkpoint(options.load), options.save, flags, optimizer=not options.no_optimizer))
    return ExitCode.OK


def tracked_checkpoint(folder: Path) -> Path:
    """Returns the checkpoint named by the folder's tracker file, or the folder itself if it has none."""
    text = read_tracker(folder)
    if text is None:
        return folder
    found = folder / (iteration_folder(int(text)) if text.isdecimal() else text)
    if found.parent != folder or not found.is_dir():
        raise CheckpointProblem(f"{folder / TRACKER} names {text!r}, which is not in {folder}")
    return found


def convert(folder: Path, save: Path, flags: Sequence[str], *, optimizer: bool) -> str:
    """Converts the Megatron checkpoint in `folder` to a checkpoint in `save`; returns a summary for the user."""
    if list_checkpoints(save):
        raise EnvironmentProblem(f"{save} holds checkpoints already; give another folder")
    plan = plan_of_run(flags)
    found = open_megatron(folder)
    tensors = build_meta_model(plan, folder).state_dict()
    source = import_model(found, tensors, plan.model.megatron_names, optimizer=optimizer)
    state = TrainState()
    if optimizer:
        state.iteration, state.consumed_samples = source.iteration, source.consumed_samples
        state.consumed_tokens = state.consumed_samples * plan.data.seq_length
    saver = CheckpointSaver(save, ParallelContext.single(), stop_after=1)
    try:
        train_state = state.to_json(build_train_state_config(plan))
        path = saver.save(state.iteration, source.tensors, train_state, texts={"run.yaml": plan.resolved_yaml})
    finally:
        saver.close()
    notes = "".join(f"\n{note}" for note in source.notes)
    return f"{folder} -> {path}: {len(source.tensors)} tensors, iteration {state.iteration}{notes}"


if __name__ == "__main__":
    run_main(main)
