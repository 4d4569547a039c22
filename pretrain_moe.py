"""Pretrains Mixture-of-Experts language models from one command line of Megatron-style flags.

  python pretrain_moe.py --recipe quickstart                  # a small MoE on this machine
  torchrun --nproc-per-node 8 pretrain_moe.py --config my.yaml --lr 3e-4

`docs/tour.md` walks through this file; `megatron_moe/config/exit_codes.py` lists the exit codes.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import cache_from_source
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_moe.config.run import RunPlan


def main(argv: Sequence[str], environ: Mapping[str, str], parent: int | None = None) -> int:
    """Runs the program for one command line and returns the exit code. `parent`: see `ProcessInfo`."""
    from arguments.errors import Finished  # imported late, see `command`
    from arguments.read import read_plan
    from megatron_moe.config.exit_codes import ExitCode, RunError
    from megatron_moe.data.tokenizer import vocab_size_of
    from megatron_moe.resilience.launcher import with_launcher_identity

    rank = ""
    try:
        plan = read_plan(argv, environ, vocab_size_of=vocab_size_of)
        rank = f"rank {plan.process.rank}: "
        os.environ.update(plan.environment)  # set before torch is imported, because torch reads them
        if plan.emulation is not None:
            from megatron_moe.memory_emulation.run import emulate

            raise Finished(emulate(plan))
        with ExitStack() as stack:
            pretrain(replace(plan, process=with_launcher_identity(plan.process, parent)), stack)
    except Finished as answer:  # --help, --dry-run and similar
        return answer.show()
    except RunError as problem:
        print(f"{rank}{problem}", file=sys.stderr)
        return int(problem.code)
    except KeyboardInterrupt as interrupt:
        if interrupt.args:
            print("; ".join([f"{rank}interrupted: {interrupt}", *getattr(interrupt, "__notes__", [])]), file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.OK)


def pretrain(plan: "RunPlan", stack: ExitStack) -> None:
    """Builds and trains the model of `plan`. Registers resources on `stack`, which closes them even after an error."""
    begun = time.monotonic()
    from megatron_moe.resilience.launcher import supervise

    launch, run_dir = plan.process, plan.logging.run_dir
    signals, status = supervise(launch, run_dir, plan.resilience.exit_signals, stack)  # writes status.json from here on
    with signals.exit_at_once(status):  # torch is imported here, so that --help and flag errors do not need it
        from megatron_moe import build
        from megatron_moe.parallel.agreement import check_agreement
        from megatron_moe.resilience.peer_failure import PeerFailures
        from megatron_moe.train.exit_conditions import ExitConditions
        from megatron_moe.warmup.kernel_warmup import warm_up_kernels

    # process groups, reporting, kernels
    watchdog = stack.enter_context(build.build_watchdog(plan, status))
    compiled = warm_up_kernels(plan, watchdog)
    peers = PeerFailures(run_dir, status, watchdog, rank=launch.rank, world_size=launch.world_size)
    with peers:
        context = build.build_context(plan)
        stack.callback(context.stop)
        reporter = build.build_reporter(plan, context)
    stack.callback(reporter.close)
    stack.enter_context(peers)
    status.starting(say=reporter.note, warning=plan.warning)
    check_agreement(plan.resolved_yaml, context)
    saver = build.build_saver(plan, context, reporter, stack)
    kernels = build.build_kernels(plan, context)

    # model, optimizer, data
    model = build.build_model(plan, context, kernels)
    trainer = build.build_trainer(plan, context, model, kernels, reporter.timers)
    events = build.build_run_events(plan, context, trainer, reporter, watchdog, stack)
    datasets = build.build_data(plan, context)
    loader = build.build_train_loader(plan, context, datasets)
    if loader:
        stack.callback(loader.close)
    evaluation = build.build_evaluation(plan, trainer.pipeline, datasets, reporter)
    build.log_run_summary(plan, context, kernels, model, datasets, reporter)
    reporter.note(compiled)

    # resume from the newest checkpoint, or start at iteration 0
    checkpointing = build.build_checkpointing(plan, trainer, saver, reporter, status)
    config = build.build_train_state_config(plan)
    stack.callback(checkpointing.close)
    stack.callback(signals.ignore)  # runs first at exit: signals no longer change the exit code
    state = checkpointing.restore(loader)
    last = state.last_iteration(config)
    reporter.begin_run(state.iteration, last, samples=state.consumed_samples, tokens=state.consumed_tokens)

    # training loop
    supervisor = build.build_supervisor(plan, trainer, loader, reporter)
    stop = ExitConditions(
        plan.loop, context, iteration=state.iteration, last_iteration=last, signals=signals, begun=begun
    )
    signals.begin_training()
    while loader and not stop.is_reached(state.iteration):
        events.enter("step", state.iteration + 1)
        if state.iteration + 1 in plan.loop.iterations_to_skip:
            supervisor.skip_iteration(state)
            continue
        outcome = supervisor.step(state)
        state.advance(outcome.counts, config)
        status.update(state="running", iteration=state.iteration)
        supervisor.after_step(outcome)
        checkpointing.commit_if_written()
        trainer.compare_replicas(state.iteration)
        if evaluation.is_due(state.iteration) or checkpointing.is_due(state.iteration):
            supervisor.catch_up()
            events.enter("evaluation", state.iteration)
            evaluation.run_if_due(state)
            events.enter("save", state.iteration)
            checkpointing.save_if_due(state, loader)
            supervisor.restart_clock()

    # flush the log, save, evaluate
    supervisor.catch_up()
    reporter.note(stop.reason)
    events.enter("save", state.iteration)
    if stop.preempted:
        checkpointing.exit_preempted(state, loader, stop.reason)
    checkpointing.save_last(state, loader)
    events.enter("evaluation", state.iteration)
    evaluation.run_last(state)
    events.enter("exit", state.iteration)


def command() -> None:
    """Entry point of the installed command `pretrain_moe`."""
    if not os.path.exists(cache_from_source(f"{os.path.dirname(os.path.realpath(__file__))}/arguments/read.py")):
        print("first start: Python compiles the program, which takes seconds", file=sys.stderr, flush=True)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # imports may hide a KeyboardInterrupt
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    code = main(sys.argv[1:], os.environ, os.getppid())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # keeps a late signal from replacing the exit code
    sys.exit(code)


if __name__ == "__main__":
    command()
