"""Checks a command line for a cluster and generates its launch script for SLURM or torchrun.

    python tools/launch.py --nodes 4 --dry-run --recipe NAME --run-dir /shared/runs/a      prints the script
    python tools/launch.py --nodes 4 --submit  --recipe NAME --run-dir /shared/runs/a      writes and submits it
    python tools/launch.py --launcher torchrun --gpus-per-node 2 --submit --config my.yaml starts it here

Without `--dry-run` and `--submit` the script is written to the run folder. All other arguments are flags of
pretrain_moe.py, checked for the cluster's ranks before anything is written. A plan that cannot be trained yet, because
a feature, data or a checkpoint is missing, is rejected with exit code 2; `--dry-run` prints its script with the reasons
as comments and exits with 15, like pretrain_moe.py --dry-run. With `--container`, data are not looked for on this host.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from arguments.container import ContainerPaths, Mount
from arguments.dry_run.inputs import missing_inputs
from arguments.environment import Variable
from arguments.errors import FlagErrors, Problem
from arguments.explain import derived_value_comments
from arguments.flags import with_dashes
from arguments.launch import rank_0_of
from arguments.parser import split
from arguments.read import read_plan, settings_of
from arguments.slurm import Job, slurm_script, slurm_setting, torchrun_script
from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode
from megatron_moe.config.run import RunPlan
from megatron_moe.data.tokenizer import vocab_size_of
from tools._common import (
    ROOT,
    add_cluster_options,
    positive,
    reports_errors,
    requested_cluster,
    run_command,
    run_main,
    tool_parser,
    writing,
)

_LAUNCHERS = ("SLURM_", "OMPI_", "TORCHELASTIC_", "PMI")
_PLANNED = ("CUDA_DEVICE_", "CUBLAS_", "NCCL_", "NVTE_", "PYTORCH_")
"""Prefixes of variables that the script sets. Their values in the tool's own environment are therefore ignored."""


def parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__, allow_abbrev=False)
    add_cluster_options(parser)
    parser.add_argument("--launcher", choices=("slurm", "torchrun"), default="slurm")
    parser.add_argument("--submit", action="store_true", help="sbatch the script, or run it here under torchrun")
    parser.add_argument("--dry-run", action="store_true", help="only print the script")
    parser.add_argument("--name", help="name of the job (default: that of the recipe or file)")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    parser.add_argument("--slurm", **several, metavar="X=Y", help="sbatch options; no-mem omits mem")
    parser.add_argument("--container", help="image for pyxis")
    parser.add_argument("--mounts", **several, metavar="HOST[:INSIDE]", help="folders mounted in the container")
    parser.add_argument("--setup", type=Path, metavar="FILE", help="shell commands before the run (modules, conda)")
    parser.add_argument(
        "--grace", type=positive, help="seconds from SIGTERM to the end of the job (SLURM: 300, torchrun: 30)"
    )
    parser.add_argument("--python", help="interpreter of the ranks (default: this one; python in a container)")
    return parser


def plan_of(
    flags: Sequence[str], nodes: int, ranks_per_node: int, environ: Mapping[str, str], *, waiting: bool
) -> RunPlan:
    """Plan of rank 0 on the cluster. Raises FlagErrors with all problems. `waiting`: accept a plan that cannot be
    trained yet, because a feature or an input is missing."""
    here = {name: value for name, value in environ.items() if not name.startswith(_LAUNCHERS + _PLANNED)}
    ranks = rank_0_of(nodes * ranks_per_node, ranks_per_node)
    return read_plan(flags, here | ranks, vocab_size_of=vocab_size_of, waiting=waiting)


def cluster_size(options: argparse.Namespace, flags: Sequence[str], environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns (number of nodes, ranks per node), from the options, otherwise from the recipe or config file.

    The default is one node for SLURM and one rank for torchrun. Raises FlagErrors if the ranks do not fill all nodes.
    """
    found = requested_cluster(options, flags, environ, default=1 if options.launcher == "torchrun" else None)
    if found.num_nodes * found.ranks_per_node != found.world_size:
        what = f"{found.world_size} ranks do not fill nodes of {found.ranks_per_node}"
        raise FlagErrors([Problem(what=what, remedy="give --nodes and --gpus-per-node")])
    return found.num_nodes, found.ranks_per_node


def job_of(options: argparse.Namespace, flags: list[str], environ: Mapping[str, str]) -> Job:
    """Checks the flags and returns the job. Without --name, the job is named after the recipe or config file."""
    if options.launcher == "torchrun" and options.container:
        raise FlagErrors.of("--container needs --launcher slurm", "leave it out, or run this command in the container")
    if options.launcher == "torchrun" and options.slurm:
        raise FlagErrors.of(f"--slurm {' '.join(options.slurm)} needs --launcher slurm", "leave it out")
    if options.mounts and not options.container:
        raise FlagErrors.of(f"--mounts {' '.join(options.mounts)} needs --container", "give the image, or leave it out")
    given = {with_dashes(each.option): each.words or () for each in split(flags)[0]}
    if "--no-exit-signal-handler" not in given:  # else the warning signal kills the job before it saves
        flags = [*flags, "--exit-signal-handler"]
    source = given.get("--recipe") or given.get("--config")
    name = options.name or (Path(source[0]).stem if source else "megatron-moe")
    nodes, ranks_per_node = cluster_size(options, flags, environ)
    plan = plan_of(flags, nodes, ranks_per_node, environ, waiting=options.dry_run)
    if plan.logging.run_dir is None:
        flags = [*flags, "--run-dir", f"runs/{name}"]
        plan = plan_of(flags, nodes, ranks_per_node, environ, waiting=options.dry_run)
    assert plan.logging.run_dir is not None, f"the flags have no --run-dir: {flags}"
    if not (options.dry_run or options.container) and (missing := missing_inputs(plan)):
        raise FlagErrors([Problem(what=each) for each in missing])
    pairs = zip(plan.environment, plan.environment_reasons, strict=True)
    job = Job(
        name=name,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        root=ROOT,
        folder=Path.cwd(),
        run_dir=Path.cwd() / plan.logging.run_dir,
        python=options.python or ("python" if options.container else sys.executable),
        flags=tuple(flags),
        variables=tuple(Variable(name, value, reason) for (name, value), reason in pairs),
        summary=tuple(line.removeprefix("derived: ") for line in derived_value_comments(plan)[1:]),
        waits=(*plan.missing_inputs, *plan.blockers),
        grace=options.grace,
        slurm=tuple(map(slurm_setting, options.slurm)),
        container=options.container,
        mounts=tuple(map(Mount.of, options.mounts)),
        setup=setup_commands(options.setup),
    )
    return job if job.container is None else in_container(job, environ)


def in_container(job: Job, environ: Mapping[str, str]) -> Job:
    """The job with the paths of its container; prints those that differ. Raises FlagErrors if no mount covers one."""
    paths = ContainerPaths(job.folder, job.all_mounts)
    ranks = rank_0_of(job.nodes * job.ranks_per_node, job.ranks_per_node)
    flags = paths.command_line(job.flags, *settings_of(job.flags, {**environ, **ranks}))
    for note in paths.notes:
        print(note, file=sys.stderr)
    return replace(job, flags=tuple(flags), summary=(*job.summary, *paths.notes))


def setup_commands(path: Path | None) -> str:
    """Text of the file with set-up commands, with a comment that names it; empty without a file. Raises
    EnvironmentProblem if it cannot be read, or if bash cannot parse it."""
    if path is None:
        return ""
    try:
        text = path.read_text(encoding="utf-8").rstrip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise EnvironmentProblem(f"--setup {path} cannot be read: {reason}") from error
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if checked.returncode:
        raise EnvironmentProblem(f"--setup {path} is not a valid bash script: {checked.stderr.strip()}")
    return f"# from {path}:\n{text}\n\n"


def write_script(job: Job, script: str, launcher: str) -> Path:
    """Writes the script to the run folder, creates the folder of SLURM's logs and returns the path of the script."""
    path = job.run_dir / ("job.sbatch" if launcher == "slurm" else "job.sh")
    with writing(path):
        (job.run_dir / "slurm").mkdir(parents=True, exist_ok=True)
        path.write_text(script, encoding="utf-8")
    return path


def submit(path: Path, job: Job, launcher: str) -> int:
    """Submits the script with sbatch, or runs it here; returns the exit code."""
    if launcher == "slurm":
        if shutil.which("sbatch") is None:
            raise EnvironmentProblem(
                f"sbatch is not installed on this machine; submit {path} elsewhere, or use --launcher torchrun"
            )
        return run_command(["sbatch", str(path)])
    if job.nodes > 1:
        raise EnvironmentProblem(
            f"torchrun cannot reach {job.nodes} machines from here; start it on each of them: "
            f"NODE_RANK=0..{job.nodes - 1} MASTER_ADDR=HOST bash {shlex.quote(str(path))}"
        )
    return run_command(["bash", str(path)])


@reports_errors
def main(argv: Sequence[str]) -> int:
    options, flags = parser().parse_known_args(argv)
    job = job_of(options, flags, os.environ)
    body = ROOT / "scripts" / "slurm" / "body.sh"
    is_local = options.launcher == "torchrun"
    script = torchrun_script(job) if is_local else slurm_script(job, body.read_text(encoding="utf-8"))
    if options.dry_run:
        print(script, end="")
        return ExitCode.NOT_READY if job.waits else ExitCode.OK
    path = write_script(job, script, options.launcher)
    if options.submit:
        return submit(path, job, options.launcher)
    starter = "sbatch" if options.launcher == "slurm" else "bash"
    print(f"wrote {path}; start it with: {starter} {shlex.quote(str(path))}")
    return ExitCode.OK


if __name__ == "__main__":
    run_main(main)
