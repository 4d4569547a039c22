"""Generation of job scripts for SLURM and torchrun."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from arguments.container import ContainerPaths, Mount
from arguments.environment import Variable
from arguments.errors import FlagErrors
from arguments.slurm import Job, slurm_options, slurm_script, slurm_setting, torchrun_script

BODY = '#!/usr/bin/env bash\n# What it is.\nset -uo pipefail\n\nprintf "%s\\n" "${flags[@]}" "${container[@]}"\n'
JOB = Job(
    name="mine",
    nodes=2,
    ranks_per_node=4,
    root=Path("/opt/project"),
    folder=Path("/usr"),
    run_dir=Path("/usr/runs/mine"),
    python="python",
    flags=("--recipe", "mine", "--moe-layer-freq", "([0]*1+[1]*3)", "--split", "95,5,0", "--data-path", "a b", "c'd"),
)


def lines_printed(script: str) -> list[str]:
    """Runs the script in bash and returns the lines that it prints."""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.splitlines()


def test_the_flags_reach_the_program_word_for_word():
    assert lines_printed(slurm_script(JOB, BODY))[: len(JOB.flags)] == list(JOB.flags)


def test_a_container_gets_the_folders_that_the_run_needs_once():
    job = replace(JOB, container="image.sqsh", mounts=(Mount.of("/data:/data"),))
    assert lines_printed(slurm_script(job, BODY))[len(JOB.flags) :] == [
        "--container-image=image.sqsh",
        "--container-mounts=/opt/project:/opt/project,/usr:/usr,/data:/data",
        "--container-workdir=/usr",
    ]


def test_paths_are_those_of_the_container():
    job = replace(JOB, mounts=tuple(map(Mount.of, ("/lustre/data:/data:ro", "/models", "/lustre:/all", "/models"))))
    assert list(map(str, job.all_mounts[2:])) == ["/lustre/data:/data:ro", "/models:/models", "/lustre:/all"]
    paths = ContainerPaths(job.folder, job.all_mounts)
    for path, inside in (
        ("/data/a_document", "/data/a_document"),
        ("/lustre/data/a_document", "/data/a_document"),
        ("/lustre/other", "/all/other"),
        ("/models/m/../tokenizer.json", "/models/tokenizer.json"),
        ("runs/x", "/usr/runs/x"),
        ("/opt/project/scripts/a.yaml", "/opt/project/scripts/a.yaml"),
        ("/scratch/runs/mine", None),
        ("../usr2/x", None),
    ):
        assert paths.path_in_container(path) == (inside and Path(inside)), path
    for text in ("a:/b", "/a:b", ":/b"):
        with pytest.raises(FlagErrors, match="absolute folders"):
            Mount.of(text)


def test_variables_have_reasons_and_keep_values_that_are_set(monkeypatch):
    job = replace(JOB, variables=(Variable("MOE_A", "one", "--a needs it"), Variable("MOE_B", 'q"$}', "--b needs it")))
    script = slurm_script(job, 'printf "%s\\n" "$MOE_A" "$MOE_B"\n')
    assert "# --a needs it\nexport MOE_A=" in script
    assert lines_printed(script) == ["one", 'q"$}']
    monkeypatch.setenv("MOE_A", "mine")
    assert lines_printed(script) == ["mine", 'q"$}']


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a\ntouch x"}, r"--name is 'a\\ntouch x', which contains the character U\+000A"),
        ({"run_dir": Path("/runs/a\nb")}, r"--run-dir is '/runs/a\\nb'"),
        ({"folder": Path("/a\rb")}, r"the current folder is '/a\\rb', which contains the character U\+000D"),
        ({"python": "python\n"}, "--python is"),
        ({"container": "a\nb"}, "--container is"),
        ({"mounts": (Mount.of("/a:/a\n"),)}, "--mounts is"),
        ({"flags": ("--config", "a\nb.yaml")}, "a word of the command line is"),
        ({"flags": ("--config", "\udc80.yaml")}, r"which contains the character U\+DC80"),
        ({"slurm": (("comment", "a\nb"),)}, "--slurm comment is"),
        ({"slurm": (("a\nb", None),)}, r"--slurm 'a\\nb' is not the name of an sbatch option"),
        ({"slurm": (("a b", "c"),)}, "--slurm 'a b' is not the name"),
        ({"variables": (Variable("A;x", "1", "r"),)}, "the configuration names the environment variable 'A;x'"),
        ({"variables": (Variable("A", "1\n", "r"),)}, "the environment variable A is"),
    ],
)
def test_a_value_that_would_be_executed_is_rejected(changes, message):
    with pytest.raises(FlagErrors, match=message):
        replace(JOB, **changes)


def test_every_line_of_the_summary_is_a_comment():
    script = torchrun_script(replace(JOB, summary=("one\ntwo",), waits=("three\nfour",)))
    assert "# one\n# two\n" in script and "# Cannot start yet: three\n# four\n" in script


def test_default_slurm_options_can_be_changed_and_removed():
    settings = ["partition=big", "time=4:00:00", "no-mem", "--gpus-per-node=h100:4", "contiguous"]
    options = slurm_options(replace(JOB, slurm=tuple(map(slurm_setting, settings))))
    assert options["partition"] == "big" and options["time"] == "4:00:00" and options["contiguous"] == ""
    assert options["gpus-per-node"] == "h100:4" and "mem" not in options
    assert options["nodes"] == "2" and options["ntasks-per-node"] == "4"
    assert "requeue" in options and options["open-mode"] == "append" and options["output"].endswith("/%x-%j.log")


def test_every_option_is_one_line_above_the_first_command():
    script = slurm_script(replace(JOB, slurm=(("comment", "two words"),)), BODY).splitlines()
    first_command = next(place for place, line in enumerate(script) if line and not line.startswith("#"))
    options = [line for line in script if line.startswith("#SBATCH ")]
    assert options == script[1 : 1 + len(options)] and len(options) < first_command
    assert shlex.split(options[-1].removeprefix("#SBATCH ")) == ["--comment=two words"]


@pytest.mark.parametrize("nodes", [1, 3])
def test_torchrun_gets_the_number_of_machines_and_ranks(nodes):
    script = torchrun_script(replace(JOB, nodes=nodes))
    assert ("export NNODES=3\n" in script) == (nodes == 3)
    assert "export RANKS_PER_NODE=4\n" in script and "export RUN_DIR=/usr/runs/mine\n" in script
    assert script.endswith('exec bash /opt/project/scripts/launch.sh "${flags[@]}"\n')


def test_both_launchers_get_the_grace_period():
    assert "export GRACE" not in torchrun_script(JOB), "torchrun has its own default"
    assert "export GRACE=90\n" in torchrun_script(replace(JOB, grace=90))
    assert "#SBATCH --signal=TERM@300\n" in slurm_script(JOB, BODY) and "\ngrace=300\n" in slurm_script(JOB, BODY)
    script = slurm_script(replace(JOB, grace=90), BODY)
    assert "#SBATCH --signal=TERM@90\n" in script and "\ngrace=90\n" in script


def test_the_body_is_the_file_without_its_header():
    assert slurm_script(JOB, BODY).endswith('\nset -uo pipefail\n\nprintf "%s\\n" "${flags[@]}" "${container[@]}"\n')
