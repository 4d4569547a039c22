"""Pretrains Mixture-of-Experts language models from one command line of Megatron-style flags.

  python pretrain_moe.py --recipe quickstart                  # a small MoE on this machine
  torchrun --nproc-per-node 8 pretrain_moe.py --config my.yaml --lr 3e-4
  python pretrain_moe.py --help

`docs/tour.md` walks through this file; `megatron_moe/specs/exitcodes.py` lists the exit codes.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_moe.specs.run import RunPlan


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs one command line to its end and returns the exit code."""
    from arguments.errors import Finished  # imported late: see `command`
    from arguments.read import read_plan
    from megatron_moe.data.tokenizer import vocab_size_of
    from megatron_moe.specs.exitcodes import ExitCode, RunError

    rank = ""
    try:
        plan = read_plan(argv, environ, vocab_size_of=vocab_size_of)
        rank = f"rank {plan.launch.rank}: "
        os.environ.update(plan.environment)  # before torch, which reads them
        if plan.emulation is not None:
            from megatron_moe.emulate.run import emulate

            return tell(emulate(plan))
        with ExitStack() as goodbye:
            pretrain(plan, goodbye)
    except Finished as answer:  # --help and its kin
        return tell(answer.text, answer.code)
    except RunError as problem:
        print(f"{rank}{problem}", file=sys.stderr)
        return int(problem.code)
    except KeyboardInterrupt as interrupt:
        if interrupt.args:
            print(f"{rank}left at once: {interrupt}", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.OK)


def pretrain(plan: "RunPlan", goodbye: ExitStack) -> None:
    """Builds what the plan describes and trains it. `goodbye` closes everything, in whatever way the run ends."""
    begun = time.monotonic()
    from megatron_moe.watch.launcher import supervise

    signals, status = supervise(plan, goodbye)  # from here on status.json has the outcome
    with signals.exit_at_once(status):  # torch comes in only here; --help and refused command lines answer without it
        from megatron_moe import build
        from megatron_moe.emulate.rehearse import rehearse
        from megatron_moe.logs.reporter import Reporter
        from megatron_moe.parallel.agreement import check_agreement
        from megatron_moe.train.checkpoints import Checkpoints
        from megatron_moe.train.leave import Leave
        from megatron_moe.train.progress import Progress
        from megatron_moe.train.validate import Validation
        from megatron_moe.watch.peers import Peers

    # who we are, where we report, what we compute with
    deadlines = goodbye.enter_context(build.build_deadlines(plan, status))
    compiled = rehearse(plan, deadlines)
    peers = Peers(plan.logging.run_dir, status, rank=plan.launch.rank, world_size=plan.launch.world_size)
    with peers:
        context = build.build_context(plan)
        goodbye.callback(context.stop)
        reporter = Reporter(plan, context)
    goodbye.callback(reporter.close)
    goodbye.enter_context(peers)
    status.starting(say=reporter.note)
    check_agreement(plan.resolved_yaml, context)
    saver = build.build_saver(plan, context, reporter)
    if saver:
        goodbye.callback(saver.close)
    kernels = build.build_kernels(plan, context)

    # the model, its optimizer, its data
    model = build.build_model(plan, context, kernels)
    trainer = build.build_trainer(plan, context, model, kernels, reporter.timers)
    for listener in build.build_listeners(plan, context, trainer, reporter, goodbye):
        deadlines.then(listener)
    datasets = build.build_data(plan, context)
    loader = build.build_train_loader(plan, context, datasets)
    if loader:
        goodbye.callback(loader.close)
    validation = Validation(plan, trainer.pipeline, build.build_eval_loaders(plan, context, datasets), reporter)
    build.introduce(plan, context, kernels, model, datasets, reporter)
    reporter.note(compiled)

    # where the run left off, or its beginning
    checkpoints = Checkpoints(plan, context, trainer, saver, reporter, status)
    goodbye.callback(checkpoints.close)
    goodbye.callback(signals.ignore)  # runs first when the run ends: its exit code is decided
    state = checkpoints.restore(loader)
    last = state.last_iteration(plan)
    reporter.begin(iteration=state.iteration, last_iteration=last, consumed_samples=state.consumed_samples)

    # train
    progress = Progress(trainer, reporter, loader)
    leave = Leave(plan.loop, context, iteration=state.iteration, last_iteration=last, signals=signals, begun=begun)
    while loader and not leave.now(state.iteration):
        deadlines.enter("step", state.iteration + 1)
        if state.iteration + 1 in plan.loop.iterations_to_skip:
            progress.pass_over(loader, state)
            continue
        outcome = trainer.step(progress.next_step(loader), state)
        state.advance(outcome.num_samples, plan)
        status.update(state="running", iteration=state.iteration)
        progress.after(outcome)
        checkpoints.commit_if_written()
        trainer.compare_replicas(state.iteration)
        if validation.due(state.iteration) or checkpoints.due(state.iteration):
            progress.catch_up()
            deadlines.enter("evaluation", state.iteration)
            validation.run_if_due(state)
            deadlines.enter("save", state.iteration)
            checkpoints.save_if_due(state, loader)
            progress.restart_clock()

    # the end: nothing held back, the last checkpoint, the last validation
    progress.catch_up()
    reporter.note(leave.reason)
    deadlines.enter("save", state.iteration)
    if leave.preempted:
        checkpoints.leave_preempted(state, loader, leave.reason)
    checkpoints.save_last(state, loader)
    deadlines.enter("evaluation", state.iteration)
    validation.final(state)
    deadlines.enter("exit", state.iteration)


def tell(text: str, code: int = 0) -> int:
    """Prints an answer and returns its exit code; a reader that has seen enough of it (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
    return int(code)


def command() -> None:
    """The installed program `pretrain_moe`."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # imports may turn KeyboardInterrupt into other errors
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    code = main(sys.argv[1:], os.environ)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # or a signal while Python ends would replace the exit code
    sys.exit(code)


if __name__ == "__main__":
    command()
