"""Pretrains Mixture-of-Experts language models from one command line of Megatron-style flags.

  python pretrain_moe.py --recipe quickstart                  # a small MoE on this machine
  torchrun --nproc-per-node 8 pretrain_moe.py --config my.yaml --lr 3e-4
  python pretrain_moe.py --help

This file is the story of a run, from top to bottom; `docs/tour.md` walks through it. A run that cannot go on ends with
one sentence and an exit code of `megatron_moe/specs/exitcodes.py`.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from arguments.errors import Finished
from arguments.read import read_plan
from megatron_moe.data.tokenizer import vocab_size_of
from megatron_moe.specs.exitcodes import ExitCode, RunError
from megatron_moe.specs.run import RunPlan


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs one command line to its end and returns the exit code."""
    try:
        plan = read_plan(argv, environ, vocab_size_of=vocab_size_of)
    except Finished as answer:  # --help and its kin
        return tell(answer.text, answer.code)
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    try:
        if plan.emulation is not None:
            return tell(emulated(plan))
        with ExitStack() as goodbye:
            pretrain(plan, goodbye)
    except RunError as problem:
        print(f"rank {plan.launch.rank}: {problem}", file=sys.stderr)
        return int(problem.code)
    except KeyboardInterrupt as interrupt:
        if interrupt.args:
            print(f"rank {plan.launch.rank}: left at once: {interrupt}", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.OK)


def pretrain(plan: RunPlan, goodbye: ExitStack) -> None:
    """Builds what the plan describes and trains it. `goodbye` closes everything, in whatever way the run ends."""
    begun = time.monotonic()
    # torch comes in only here, after the variables it reads; --help and refused command lines answer without it
    os.environ.update(plan.environment)
    from megatron_moe import build
    from megatron_moe.emulate.rehearse import rehearse
    from megatron_moe.logs.reporter import Reporter
    from megatron_moe.parallel.agreement import check_agreement
    from megatron_moe.train.checkpoints import Checkpoints
    from megatron_moe.train.leave import Leave
    from megatron_moe.train.progress import Progress
    from megatron_moe.train.validate import Validation
    from megatron_moe.watch.peers import Peers
    from megatron_moe.watch.signals import Signals
    from megatron_moe.watch.status import Status

    # who we are, where we report, what we compute with
    signals = goodbye.enter_context(Signals(plan.resilience.exit_signals))
    deadlines = goodbye.enter_context(build.build_deadlines(plan))
    compiled = rehearse(plan, deadlines)
    context = build.build_context(plan)
    goodbye.callback(context.stop)
    reporter = Reporter(plan, context)
    goodbye.callback(reporter.close)
    status = goodbye.enter_context(Status(plan.logging.run_dir, rank=context.rank, say=reporter.note))
    deadlines.reports_to(status)
    world_size = plan.launch.world_size
    goodbye.enter_context(Peers(plan.logging.run_dir, status, rank=context.rank, world_size=world_size))
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
    for line in (*build.introduction(plan, context, kernels, model, datasets), compiled):
        reporter.note(line)

    # where the run left off, or its beginning
    checkpoints = Checkpoints(plan, context, trainer, saver, reporter, status)
    goodbye.callback(checkpoints.close)
    state = checkpoints.restore(loader)
    reporter.begin(iteration=state.iteration, consumed_samples=state.consumed_samples)

    # train
    progress = Progress(trainer, reporter, loader)
    leave = Leave(plan.loop, context, iteration=state.iteration, signals=signals, begun=begun)
    while loader and not leave.now(state.iteration):
        deadlines.enter("step", state.iteration + 1)
        if state.iteration + 1 in plan.loop.iterations_to_skip:
            progress.pass_over(loader, state)
            continue
        outcome = trainer.step(loader.next_step(), state)
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


def emulated(plan: RunPlan) -> str:
    """What one rank of a cluster that is not there takes."""
    os.environ.update(plan.environment)
    from megatron_moe.emulate.run import emulate

    return emulate(plan)


def tell(text: str, code: ExitCode = ExitCode.OK) -> int:
    """Prints an answer and returns its exit code; a reader that has seen enough of it (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
    return int(code)


def command() -> None:
    """The installed program `pretrain_moe`."""
    sys.exit(main(sys.argv[1:], os.environ))


if __name__ == "__main__":
    command()
