"""Helpers shared by the tools: command line, errors, output files, worker processes. Imports no torch."""

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from arguments.dry_run.cluster import Cluster, ClusterFlags, cluster_of, rates_of
from arguments.errors import Finished
from arguments.flags import Registry
from arguments.parser import start_settings
from megatron_moe.config.data import OTHER_TOKENIZER_NAMES, TokenizerConfig
from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode, RunError

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER_TYPES = (*get_args(get_type_hints(TokenizerConfig)["tokenizer_type"]), *OTHER_TOKENIZER_NAMES)
Item = TypeVar("Item")
Result = TypeVar("Result")


def tool_parser(docstring: str | None, **options: Any) -> argparse.ArgumentParser:
    """Argument parser that prints the tool's docstring as the description in `--help`."""
    style = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=docstring, formatter_class=style, **options)


def positive(text: str) -> int:
    """Argparse type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def tokenizer_config(options: argparse.Namespace) -> TokenizerConfig:
    """Builds a TokenizerConfig from the tool's options; option names equal field names."""
    given = {field.name: getattr(options, field.name) for field in fields(TokenizerConfig) if field.name in options}
    kind = OTHER_TOKENIZER_NAMES.get(options.tokenizer_type, options.tokenizer_type)
    return TokenizerConfig(**given | {"tokenizer_type": kind})


def add_cluster_options(parser: argparse.ArgumentParser, *aliases: str) -> None:
    """Adds `--gpus`, `--nodes` and `--gpus-per-node`, as in pretrain_moe.py. `aliases`: more names of `--gpus`."""
    parser.add_argument(
        "--gpus", "--world-size", *aliases, type=positive, help="total number of ranks (default: from recipe or file)"
    )
    parser.add_argument("--nodes", type=positive, help="number of nodes (default: as many as the ranks need)")
    parser.add_argument("--gpus-per-node", type=positive, help="ranks per node (default: usual for the GPU)")


def requested_cluster(
    options: argparse.Namespace, flags: Sequence[str], environ: Mapping[str, str], *, default: int | None = 1
) -> Cluster:
    """Cluster that the tool's options request. Missing sizes are taken from the recipe or config file in `flags`.
    `default`: number of ranks if no size is found; None means one full node. Raises FlagErrors if sizes conflict."""
    start = start_settings(flags, Registry.declared())
    kind = getattr(options, "gpu", None) or start.setting("gpu").value
    sizes = {"gpus": options.gpus, "nodes": options.nodes, "gpus_per_node": options.gpus_per_node}
    return cluster_of(ClusterFlags(gpu=kind, **sizes, rates=rates_of(start)), start, environ, otherwise=default)


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits at the first `--` into the arguments of the tool and the arguments of pretrain_moe.py."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def reports_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Decorator for a tool's `main` that prints the message of a RunError or Finished and returns its exit code."""

    @wraps(main)
    def run(*args: Any) -> int:
        try:
            return int(main(*args))
        except Finished as answer:
            print(answer.text)
            return int(answer.code)
        except RunError as problem:
            print(problem, file=sys.stderr)
            return int(problem.code)

    return run


def run_main(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs a tool's `main` and exits with its code; Ctrl-C and a closed pipe (`| head`) exit without a traceback."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # avoids an error when Python flushes at exit
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def run_command(command: Sequence[str]) -> int:
    """Runs a command and returns its exit code. Ctrl-C also interrupts the command; this function raises
    KeyboardInterrupt only after the command has ended, so that the command can clean up."""
    interrupt: KeyboardInterrupt | None = None
    with subprocess.Popen(command) as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt as pressed:
                interrupt = pressed
    if interrupt:
        raise interrupt
    return code


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager that converts an OSError while writing `path` into an EnvironmentProblem."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{path} cannot be written ({error.strerror or error}); choose another path"
        ) from error


def map_in_order(
    executor: Executor | None, function: Callable[[Item], Result], items: Iterable[Item], max_pending: int
) -> Iterator[Result]:
    """Yields the results of `function` in the order of the items. With an executor, at most `max_pending` items are
    submitted at a time; without one, the items are computed sequentially."""
    if executor is None:
        yield from map(function, items)
        return
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(executor.submit(function, item))
        if len(pending) >= max_pending:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class _Workers(ProcessPoolExecutor):
    """Process pool whose workers block SIGINT: `submit` blocks it while workers start, and they inherit this mask."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_workers(count: int) -> ProcessPoolExecutor:
    """Pool of spawned worker processes that ignore Ctrl-C."""
    return _Workers(count, mp_context=multiprocessing.get_context("spawn"))
