"""Rank and world size from the environment of torchrun, srun or mpirun."""

import re
from collections.abc import Iterator, Mapping
from typing import NoReturn

from arguments.errors import FlagErrors, Problem
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.text import counted

_SRUN_SPECIAL_STEPS = 4294967290
"""First of the step numbers that SLURM reserves for interactive, batch and external steps."""
_LAST_PORT = 65535
_MOST_RANKS = 1_000_000_000
"""Maximum number of ranks. A larger number is a typo, for which the checks of all ranks would take minutes."""


def launch_of(environ: Mapping[str, str]) -> ProcessInfo:
    """Reads rank and world size from the environment; without a launcher there is one process.

    torchrun's variables take precedence. If torchrun set them, srun's variables are ignored, because srun may have
    started one torchrun per host. If the user set them for processes of srun, they must agree with srun's variables.

    Raises:
        FlagErrors: a variable is missing or not a number, or two launchers contradict each other.
    """
    if "RANK" in environ or "TORCHELASTIC_RUN_ID" in environ:
        launch = _torchrun(environ)
        if "TORCHELASTIC_RUN_ID" not in environ and _started_by_srun(environ):
            _agree(launch, _slurm(environ))
    elif "OMPI_COMM_WORLD_RANK" in environ:
        launch = _openmpi(environ)
    elif _started_by_srun(environ):
        launch = _slurm(environ)
    else:
        _reject_several_ranks(environ)
        launch = ProcessInfo(master_addr=environ.get("MASTER_ADDR", "127.0.0.1"), master_port=_port(environ))
    return _checked(launch)


def _reject_several_ranks(environ: Mapping[str, str]) -> None:
    """Rejects a WORLD_SIZE other than 1 if RANK is not set."""
    world_size = _number({"WORLD_SIZE": "1", **environ}, "WORLD_SIZE")
    if world_size != 1:
        raise FlagErrors.of(
            f"WORLD_SIZE={world_size}, but RANK is not set and no launcher was detected",
            "unset WORLD_SIZE for one process, set RANK, or start with torchrun, srun or mpirun",
        )


def rank_0_of(world_size: int, ranks_per_node: int | None = None) -> dict[str, str]:
    """Environment variables that torchrun sets for rank 0. `ranks_per_node`: None means that all ranks are on one
    node."""
    local = str(ranks_per_node or world_size)
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": local}


def environ_of_rank_0(environ: Mapping[str, str], world_size: int) -> dict[str, str]:
    """`environ` with the variables of `rank_0_of`, for the plan of a run that this process only describes. SLURM's rank
    of this process, as in a shell started by srun, is left out, because it would contradict them."""
    return {name: value for name, value in environ.items() if name != "SLURM_PROCID"} | rank_0_of(world_size)


def allocation_note(environ: Mapping[str, str]) -> str | None:
    """Warning if the process is in a SLURM allocation but was not started by srun; otherwise None."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environ and tasks != "1" and not _started_by_srun(environ) and "RANK" not in environ:
        return f"in a SLURM allocation of {tasks} tasks, but not started by srun: running as one process"
    return None


def other_ranks(
    world_size: int | None, nodes: int | None, gpus_per_node: int | None, launch: ProcessInfo
) -> Iterator[Problem]:
    """Yields a problem for each of `--world-size`, `--nodes` and `--gpus-per-node` that differs from the launch."""
    started_nodes = -(-launch.world_size // launch.local_world_size)
    for option, planned, started, unit in (
        ("--world-size", world_size, launch.world_size, "rank"),
        ("--nodes", nodes, started_nodes, "node"),
        ("--gpus-per-node", gpus_per_node, launch.local_world_size, "local rank"),
    ):
        if planned not in (None, started):
            what = f"{option} {planned}, but this run was started with {counted(started, unit)}"
            remedy = f"start that number with torchrun or srun, add --dry-run, or leave {option} out"
            yield Problem(what=what, remedy=remedy)


def _torchrun(environ: Mapping[str, str]) -> ProcessInfo:
    world_size = _number(environ, "WORLD_SIZE")
    single = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if world_size == 1 else {}
    known = {**single, **environ}
    return ProcessInfo(
        rank=_number(known, "RANK"),
        world_size=world_size,
        local_rank=_number(known, "LOCAL_RANK"),
        local_world_size=_number(known, "LOCAL_WORLD_SIZE"),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_port(environ),
        launcher="torchrun",
        supervised="TORCHELASTIC_RUN_ID" in environ,
        start_id=_joined(environ, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    )


def _started_by_srun(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process. Shells in an allocation have most srun variables, but no regular step id."""
    if "SLURM_PROCID" not in environ or not environ.keys() & {"SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"}:
        return False
    step = environ.get("SLURM_STEP_ID")
    if step is None:
        return environ.get("ENVIRONMENT") != "BATCH"
    return not step.isdecimal() or int(step) < _SRUN_SPECIAL_STEPS


def _slurm(environ: Mapping[str, str]) -> ProcessInfo:
    """Reads srun's variables. Step variables override job variables, because a step may have fewer tasks and hosts."""
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    return ProcessInfo(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number({"SLURM_LOCALID": "0", **environ} if world_size == 1 else environ, "SLURM_LOCALID"),
        local_world_size=_slurm_tasks_here(environ, world_size),
        master_addr=environ.get("MASTER_ADDR") or _first_host(hosts) or _missing("SLURM_JOB_NODELIST"),
        master_port=_port(environ, 20000 + _number({"SLURM_JOB_ID": "0", **environ}, "SLURM_JOB_ID") % 20000),
        launcher="slurm",
        supervised=True,
        start_id=_joined(environ, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    )


def _slurm_tasks_here(environ: Mapping[str, str], world_size: int) -> int:
    """Number of ranks on this host, from the task counts of all hosts (`8(x3),4`) and the index of this host."""
    if not environ.get("SLURM_STEP_TASKS_PER_NODE") and environ.get("SLURM_NTASKS_PER_NODE"):
        return min(_number(environ, "SLURM_NTASKS_PER_NODE"), world_size)
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    per_host = _tasks_per_host(counts)
    if not per_host:
        return 1 if world_size == 1 else _missing("SLURM_NTASKS_PER_NODE")
    place = _number({"SLURM_NODEID": "0", **environ}, "SLURM_NODEID")
    if place >= len(per_host):
        raise FlagErrors.of(f"SLURM_NODEID={place}, but SLURM lists tasks of {len(per_host)} hosts: {counts}")
    return per_host[place]


def _tasks_per_host(counts: str) -> list[int]:
    """Parses SLURM's task counts: `8(x3),4` -> [8, 8, 8, 4]. Returns [] for any other format."""
    found: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _first_host(node_list: str) -> str:
    """First host of a SLURM node list: `node[003-010,012]-ib,other5` -> `node003-ib`."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", node_list).partition(",")[0]


def _openmpi(environ: Mapping[str, str]) -> ProcessInfo:
    world_size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    local_world_size = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    if world_size != local_world_size and "MASTER_ADDR" not in environ:
        raise FlagErrors.of(
            f"mpirun started {world_size} ranks on several hosts, but MASTER_ADDR is not set",
            "export MASTER_ADDR, the name of the host of rank 0, with mpirun -x MASTER_ADDR",
        )
    return ProcessInfo(
        rank=_number(environ, "OMPI_COMM_WORLD_RANK"),
        world_size=world_size,
        local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=local_world_size,
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_port(environ),
        launcher="openmpi",
        supervised=True,
        start_id=_joined(environ, "PMIX_NAMESPACE"),
    )


def _agree(launch: ProcessInfo, slurm: ProcessInfo) -> None:
    for variable, value, other_value, name in (
        ("RANK", launch.rank, slurm.rank, "SLURM_PROCID"),
        ("WORLD_SIZE", launch.world_size, slurm.world_size, "SLURM_NTASKS"),
        ("LOCAL_RANK", launch.local_rank, slurm.local_rank, "SLURM_LOCALID"),
    ):
        if value != other_value:
            raise FlagErrors.of(
                f"two launchers contradict each other: {variable}={value}, but {name}={other_value}",
                f"unset {variable}, or start torchrun instead of setting its variables",
            )


def _checked(launch: ProcessInfo) -> ProcessInfo:
    if launch.world_size > _MOST_RANKS:
        raise FlagErrors.of(f"{launch.world_size:,} ranks exceed the {_MOST_RANKS:,} that this program supports")
    if not 0 <= launch.rank < launch.world_size:
        raise FlagErrors.of(f"rank {launch.rank} does not exist in a world of {launch.world_size} ranks")
    if not 0 <= launch.local_rank < launch.local_world_size:
        raise FlagErrors.of(
            f"local rank {launch.local_rank} does not exist on a host with {launch.local_world_size} ranks"
        )
    if launch.local_world_size > launch.world_size:
        raise FlagErrors.of(f"{launch.local_world_size} ranks per host exceed the world size of {launch.world_size}")
    return launch


def _joined(environ: Mapping[str, str], *names: str) -> str:
    return ".".join(environ[name] for name in names if name in environ)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        _missing(name)
    try:
        return int(str(text))
    except ValueError:
        raise FlagErrors.of(f"the environment variable {name} is {text!r}, which is not an integer") from None


def _port(environ: Mapping[str, str], otherwise: int = 29500) -> int:
    port = _number({"MASTER_PORT": str(otherwise), **environ}, "MASTER_PORT")
    if not 0 <= port <= _LAST_PORT:
        raise FlagErrors.of(f"MASTER_PORT={port} is not a port", f"export MASTER_PORT=1024 to {_LAST_PORT}")
    return port


def _missing(name: str) -> NoReturn:
    raise FlagErrors.of(
        f"the launcher did not set the environment variable {name}", "start with torchrun, srun, mpirun or plain python"
    )
