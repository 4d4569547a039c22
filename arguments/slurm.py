"""Launch scripts of a planned run for SLURM and torchrun; `tools/launch.py` writes and submits them.

A script contains all resolved values: flags, number of ranks, and environment variables (each with its reason).
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from arguments.container import Mount
from arguments.environment import Variable, character_problem, naming_problem
from arguments.errors import FlagErrors, Problem

_SHEBANG = "#!/usr/bin/env bash\n"
_WIDTH = 110
_SLURM_GRACE = 300
"""Default of `Job.grace` for SLURM."""
_SLURM_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on `nodes` machines with `ranks_per_node` processes each."""

    name: str
    nodes: int
    ranks_per_node: int
    root: Path
    """Root folder of the repository."""
    folder: Path
    """Working directory of the run; relative paths in flags and recipes refer to it."""
    run_dir: Path
    python: str
    flags: tuple[str, ...]
    """Command-line arguments of pretrain_moe.py."""
    variables: tuple[Variable, ...] = ()
    summary: tuple[str, ...] = ()
    """Lines that describe the plan, which the script contains as comments."""
    waits: tuple[str, ...] = ()
    """Reasons why the run cannot start yet. A script with such reasons can be printed but not submitted."""
    grace: int | None = None
    """Seconds between SIGTERM, on which the run saves a checkpoint, and the end of the job; None means 300 for SLURM
    and torchrun's default."""
    slurm: tuple[tuple[str, str | None], ...] = ()
    """sbatch options as (option, value), which override the defaults. The value None removes a default option."""
    container: str | None = None
    """Container image, started with SLURM's pyxis plugin; None means no container."""
    mounts: tuple[Mount, ...] = ()
    """Mounts in addition to `root`, `folder` and `run_dir`, which are always mounted."""
    setup: str = ""
    """Shell commands at the beginning of the script, such as `module load` and `conda activate`."""

    @property
    def all_mounts(self) -> tuple[Mount, ...]:
        folders: list[Path] = []
        for path in (self.root, self.folder, self.run_dir):
            if not any(path.is_relative_to(known) for known in folders):
                folders.append(path)
        return tuple(dict.fromkeys((*map(Mount.of, map(str, folders)), *self.mounts)))

    def __post_init__(self) -> None:
        """Raises FlagErrors if a name or value cannot be written safely into a script."""
        problems = [
            Problem(what=f"{source} is {text!r}, {character_problem(text)}", remedy="choose a text without it")
            for source, text in self._texts()
            if character_problem(text)
        ]
        for variable in self.variables:
            wrong, remedy = naming_problem(variable.name)
            problems += [Problem(what=f"the configuration {wrong}", remedy=remedy)] if wrong else []
        for option, _ in self.slurm:
            if not _SLURM_OPTION.fullmatch(option):
                what = f"--slurm {option!r} is not the name of an sbatch option"
                problems.append(Problem(what=what, remedy="write NAME=VALUE, as in --slurm time=4:00:00"))
        if problems:
            raise FlagErrors(problems)

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yields (source, value) of the names, paths, flags, variables, sbatch options and mounts that are written into
        the script, to check them for control characters and surrogates."""
        yield from (("--name", self.name), ("the folder of the project", str(self.root)))
        yield from (("the current folder", str(self.folder)), ("--run-dir", str(self.run_dir)))
        yield from (("--python", self.python), ("--container", self.container or ""))
        yield from (("a word of the command line", word) for word in self.flags)
        yield from ((f"the environment variable {each.name}", each.value) for each in self.variables)
        yield from ((f"--slurm {option}", value or "") for option, value in self.slurm)
        yield from (("--mounts", str(mount)) for mount in self.mounts)


def slurm_script(job: Job, body: str) -> str:
    """Script for `sbatch`. `body` is the text of scripts/slurm/body.sh, which is the same for all runs."""
    options = slurm_options(job)
    settings = {"root": str(job.root), "python": job.python, "run_dir": str(job.run_dir)}
    settings |= {"grace": str(job.grace or _SLURM_GRACE), "excluded": options.get("exclude", "")}
    return "".join(
        (
            _SHEBANG,
            *(f"#SBATCH {_option(name, value)}\n" for name, value in options.items()),
            _comment(job),
            job.setup,
            _exports(job.variables),  # precedes the script's own variables, which override equal names
            *(f"{name}={shlex.quote(value)}\n" for name, value in settings.items()),
            _array("container", _container(job)),
            _array("needed", _needed_on_nodes(job)),
            _array("flags", job.flags),
            f"cd {shlex.quote(str(job.folder))} || exit 3\n",
            "\n",
            _without_head(body),
        )
    )


def torchrun_script(job: Job) -> str:
    """Script that runs scripts/launch.sh with all settings. It must be started on every node."""
    settings = {"NNODES": str(job.nodes), "RANKS_PER_NODE": str(job.ranks_per_node)}
    settings |= {"RUN_DIR": str(job.run_dir), "PYTHON": job.python} | ({"GRACE": str(job.grace)} if job.grace else {})
    return "".join(
        (
            _SHEBANG,
            _comment(job),
            job.setup,  # precedes strict mode, under which the scripts of modules and conda may fail
            "set -euo pipefail\n",
            _exports(job.variables),
            _array("flags", job.flags),
            f"cd {shlex.quote(str(job.folder))}\n",
            *(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()),
            f'exec bash {shlex.quote(str(job.root / "scripts" / "launch.sh"))} "${{flags[@]}}"\n',
        )
    )


def slurm_options(job: Job) -> dict[str, str]:
    """sbatch options by name, without the leading dashes. A switch has an empty value."""
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.ranks_per_node),
        "gpus-per-node": str(job.ranks_per_node),
        "exclusive": "",
        "mem": "0",
        "requeue": "",
        "open-mode": "append",
        "output": str(job.run_dir / "slurm" / "%x-%j.log"),
        "signal": f"TERM@{job.grace or _SLURM_GRACE}",
    }
    for name, value in job.slurm:
        if value is None:
            options.pop(name, None)
        else:
            options[name] = value
    return options


def slurm_setting(text: str) -> tuple[str, str | None]:
    """Parses a --slurm setting: `time=4:00:00`, `exclusive` (empty value) or `no-mem` (None: removes the default)."""
    name, equals, value = text.lstrip("-").partition("=")
    if not equals and name.startswith("no-"):
        return name.removeprefix("no-"), None
    return name, value


def _option(name: str, value: str) -> str:
    return f"--{name}={shlex.quote(value)}" if value else f"--{name}"


def _comment(job: Job) -> str:
    """Comment lines with the origin of the script and a summary of the run."""
    ranks = job.nodes * job.ranks_per_node
    lines = [f"Written by tools/launch.py: {job.name} on {job.nodes} x {job.ranks_per_node} = {ranks} ranks."]
    lines += [f"Cannot start yet: {reason}" for reason in job.waits]
    return "".join(f"# {line}\n" for text in [*lines, *job.summary] for line in text.splitlines()) + "\n"


def _array(name: str, words: Sequence[str]) -> str:
    """Assignment of `words` to a bash array `name`, with one flag and its values per line."""
    lines = "".join(f"    {line}\n" for line in _by_flag(words))
    return f"{name}=(\n{lines})\n" if words else f"{name}=()\n"


def _by_flag(words: Sequence[str]) -> Iterator[str]:
    line = ""
    for word in map(_quoted, words):
        if line and (word.startswith("--") or len(line) + len(word) > _WIDTH):
            yield line
            line = ""
        line = f"{line} {word}" if line else word
    if line:
        yield line


def _quoted(word: str) -> str:
    """Quotes a word for bash. Words with commas are always quoted, because the commas look like separators."""
    quoted = shlex.quote(word)
    return f"'{word}'" if quoted == word and "," in word else quoted


def _exports(variables: Sequence[Variable]) -> str:
    """Export statements with their reasons as comments. Variables that are already set keep their values."""
    lines = ""
    for each in variables:
        value = re.sub(r'["\\$`}]', r"\\\g<0>", each.value)  # escaped for double quotes
        lines += f'# {each.reason}\nexport {each.name}="${{{each.name}:-{value}}}"\n'
    return lines


def _container(job: Job) -> list[str]:
    """srun options that start the container with pyxis; empty if the job has no container."""
    if job.container is None:
        return []
    return [
        f"--container-image={job.container}",
        f"--container-mounts={','.join(map(str, job.all_mounts))}",
        f"--container-workdir={job.folder}",
    ]


def _needed_on_nodes(job: Job) -> list[str]:
    """Files that must exist on every node: the program, and interpreter and image if they are given as paths."""
    given = job.python if job.container is None else job.container
    return [str(job.root / "pretrain_moe.py"), *([given] if given.startswith(("/", "./", "../")) else [])]


def _without_head(body: str) -> str:
    """Removes the shebang and leading comments of `body`."""
    lines = body.splitlines(keepends=True)
    first = next(place for place, line in enumerate(lines) if not line.startswith("#"))
    return "".join(lines[first:])
