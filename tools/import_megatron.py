"""Turns a Megatron-Core checkpoint into one of this program, weights and optimizer, on a CPU, one tensor at a time.

    python tools/import_megatron.py --load ckpts/iter_0010000 --save runs/my/checkpoints -- --config my.yaml

What stands behind `--` is the command line of pretrain_moe.py with which the run goes on; it describes the model. Reads
`torch_dist` checkpoints with the optimizer's state by parameter (Megatron's --dist-ckpt-optim-fully-reshardable), and
with --no-optimizer the weights of any `torch_dist` checkpoint and of older ones with a folder mp_rank_* per rank. Start
then with `--load runs/my/checkpoints`: the run goes on at that iteration, or anew from the weights with --finetune.
Nothing that the checkpoint names is executed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script, from any folder

from arguments.errors import Finished, FlagErrors  # noqa: E402
from megatron_moe.checkpoint.directory import (  # noqa: E402
    TRACKER,
    list_checkpoints,
    read_tracker,
)
from megatron_moe.checkpoint.megatron.source import imported, opened  # noqa: E402
from megatron_moe.checkpoint.save import CheckpointSaver  # noqa: E402
from megatron_moe.config.exit_codes import (  # noqa: E402
    CheckpointProblem,
    EnvironmentProblem,
    ExitCode,
    RunError,
)
from megatron_moe.parallel.context import ParallelContext  # noqa: E402
from megatron_moe.train.train_state import TrainState  # noqa: E402
from tools._common import run_main, split_at_dashes  # noqa: E402
from tools.convert_checkpoint import skeleton  # noqa: E402
from tools.generate import plan_of_run  # noqa: E402


def main(argv: Sequence[str]) -> int:
    own, words = split_at_dashes(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, required=True, help="iter_NNNNNNN, or the folder that holds it")
    parser.add_argument("--save", type=Path, required=True, help="folder for checkpoints, without any yet")
    parser.add_argument("--no-optimizer", action="store_true", help="weights alone, as iteration 0")
    options = parser.parse_args(own)
    try:
        print(convert(newest(options.load), options.save, words, optimizer=not options.no_optimizer))
    except Finished as answer:
        print(answer.text)
        return int(ExitCode.OK)
    except FlagErrors as problems:
        print(problems.report(), file=sys.stderr)
        return int(ExitCode.CONFIG)
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    return int(ExitCode.OK)


def newest(folder: Path) -> Path:
    """The checkpoint itself, or the one that the tracker file of a folder names."""
    text = read_tracker(folder)
    if text is None:
        return folder
    found = folder / (f"iter_{int(text):07d}" if text.isdecimal() else text)
    if found.parent != folder or not found.is_dir():
        raise CheckpointProblem(f"{folder / TRACKER} names {text!r}, which is not in {folder}")
    return found


def convert(folder: Path, save: Path, words: Sequence[str], *, optimizer: bool) -> str:
    """Writes the checkpoint; returns a sentence about it."""
    if list_checkpoints(save):
        raise EnvironmentProblem(f"{save} holds checkpoints already; give another folder")
    plan = plan_of_run(words)
    megatron = opened(folder)
    source = imported(megatron, skeleton(plan, folder).state_dict(), optimizer=optimizer)
    state = TrainState()
    if optimizer:
        state.iteration, state.consumed_samples = source.iteration, source.consumed_samples
        state.consumed_tokens = state.consumed_samples * plan.data.seq_length
    saver = CheckpointSaver(save, ParallelContext.single(), stop_after=1)
    try:
        path = saver.save(state.iteration, source.tensors, state.to_json(plan), texts={"run.yaml": plan.resolved_yaml})
    finally:
        saver.close()
    told = "".join(f"\n{note}" for note in source.notes)
    return f"{folder} -> {path}: {len(source.tensors)} tensors, iteration {state.iteration}{told}"


if __name__ == "__main__":
    run_main(main)
