"""tools/launch.py: printed and submitted scripts, cluster sizes and rejected plans."""

import os
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from tests.helpers.command_lines import SMALL, words
from tests.scripts.stubs import logged_commands, write_stubs
from tools.launch import ROOT, cluster_size, main, parser

GOLDENS = ROOT / "tests" / "goldens"
FLAGS = [
    *words(SMALL, "--tokenizer-type --tokenizer-model --run-dir --micro-batch-size"),
    *("--tokenizer-type", "ByteTokenizer", "--micro-batch-size", "1"),
]
SPREAD = ["--expert-model-parallel-size", "4", "--moe-token-dispatcher-type", "alltoall", "--deterministic-mode"]
SLURM = ["--slurm", "partition=big", "time=4:00:00", "--container", "image.sqsh", "--mounts", "/data:/data"]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with data and stand-ins for SLURM, independent of variables of this machine."""
    monkeypatch.chdir(tmp_path)
    for ending in (".idx", ".bin"):
        Path(f"corpus_text_document{ending}").touch()
    for name, value in write_stubs(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: ExitCode = ExitCode.OK) -> str:
    assert main(argv) == code
    return capsys.readouterr().out


@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_golden_scripts(here, capsys, launcher):
    more = SLURM if launcher == "slurm" else []
    script = printed(
        capsys, "--nodes", "2", "--gpus-per-node", "4", "--dry-run", "--name", "mine", "--launcher", launcher,
        "--python", "python", *more, *FLAGS, *SPREAD,
    )  # fmt: skip
    text = script.replace(str(here), "/here").replace(str(ROOT), "/project")
    golden = GOLDENS / f"launch_{launcher}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_dry_run_prints_the_submitted_script_and_writes_nothing(here, capsys):
    before = sorted(here.iterdir())
    script = printed(capsys, "--dry-run", "--gpus-per-node", "4", *FLAGS)
    assert sorted(here.iterdir()) == before
    printed(capsys, "--submit", "--gpus-per-node", "4", *FLAGS)
    path = here / "runs" / "megatron-moe" / "job.sbatch"
    assert path.read_text() == script and logged_commands(here) == [f"sbatch {path}"]
    assert (path.parent / "slurm").is_dir(), "SLURM makes no folder for its logs"


def test_setup_commands_come_first_and_the_run_handles_signals(here, capsys):
    Path("site.sh").write_text("module load cuda\nexport SITE=$UNSET_NAME")
    for launcher in ("slurm", "torchrun"):
        words = ["--dry-run", "--launcher", launcher, "--gpus-per-node", "4", "--setup", "site.sh", *FLAGS]
        script = printed(capsys, *words)
        assert script.index("export SITE=$UNSET_NAME\n") < script.index("set -") and "# from site.sh:\n" in script
        assert "    --exit-signal-handler\n" in script
        assert "    --exit-signal-handler\n" not in printed(capsys, *words, "--no-exit-signal-handler")
    assert main(["--setup", "none.sh", "--gpus-per-node", "4", *FLAGS]) == ExitCode.ENVIRONMENT
    assert "--setup none.sh cannot be read" in capsys.readouterr().err
    Path("site.sh").write_text("if true; then module load cuda")
    assert main(["--dry-run", "--setup", "site.sh", "--gpus-per-node", "4", *FLAGS]) == ExitCode.ENVIRONMENT
    assert "--setup site.sh is not a valid bash script: bash: line 2" in capsys.readouterr().err


def test_paths_outside_of_the_mounts_of_a_container_are_rejected(here, capsys, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    words = ["--dry-run", "--gpus-per-node", "4", *FLAGS, "--save", str(elsewhere / "saves")]
    printed(capsys, *words)
    assert main([*words, "--container", "image.sqsh"]) == ExitCode.CONFIG
    assert f"--save {elsewhere}/saves is in no folder that the container mounts" in capsys.readouterr().err
    printed(capsys, *words, "--container", "image.sqsh", "--mounts", f"{elsewhere}:{elsewhere}")
    assert main([*words, "--container", "image.sqsh", "--launcher", "torchrun"]) == ExitCode.CONFIG
    assert main([*words, "--slurm", "time=1:00", "--launcher", "torchrun"]) == ExitCode.CONFIG
    assert "--slurm time=1:00 needs --launcher slurm" in capsys.readouterr().err
    capsys.readouterr()
    assert main([*words, "--mounts", "/data:/data"]) == ExitCode.CONFIG
    assert "--mounts /data:/data needs --container" in capsys.readouterr().err


def test_paths_of_every_kind_must_be_mounted(here, capsys, tmp_path_factory):
    code, recipes, logs = (tmp_path_factory.mktemp(name) for name in ("code", "recipes", "logs"))
    (code / "mine.py").write_text("")
    (recipes / "base.yaml").write_text("tensorboard-dir: null\n")
    Path("run.yaml").write_text(f"base: [{recipes}/base.yaml]\nimport: [{code}/mine.py]\ntensorboard-dir: {logs}/t\n")
    words = ["--dry-run", "--gpus-per-node", "4", "--config", "run.yaml", *FLAGS, "--container", "image.sqsh"]
    assert main(words) == ExitCode.CONFIG
    message = capsys.readouterr().err
    named = (f"--import {code}/mine.py", f"--tensorboard-dir {logs}/t", f"`base` of run.yaml: {recipes}/base.yaml")
    assert all(each in message for each in named), message
    mounts = message.partition("add --mounts ")[2].split()
    assert sorted(mounts) == sorted(f"{each}:{each}" for each in (code, recipes, logs))
    assert all(f",{each}" in printed(capsys, *words, "--mounts", *mounts) for each in mounts)
    with_accumulate = [word for mount in [*mounts, mounts[0]] for word in ("--mounts", mount)]
    script = printed(capsys, *words, *with_accumulate, "--slurm", "time=1:00", "--slurm", "partition=big")
    assert f":{here},{','.join(mounts)}'" in script, "every mount once, in order"
    assert "--time=1:00\n" in script and "--partition=big\n" in script


@pytest.mark.parametrize("flag", ["--config", "--data-path", "--tokenizer-model"])
def test_a_path_on_the_command_line_must_be_mounted(here, capsys, tmp_path_factory, flag):
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("a.idx", "a.bin", "run.yaml", "tokenizer.json"):
        (folder / name).touch()
    name = {"--config": "run.yaml", "--data-path": "a", "--tokenizer-model": "tokenizer.json"}[flag]
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--vocab-size", "300"] if flag == "--tokenizer-model" else []
    words = ["--dry-run", "--gpus-per-node", "4", "--container", "image.sqsh", *FLAGS, *kind, flag, f"{folder}/{name}"]
    assert main(words) == ExitCode.CONFIG
    message = capsys.readouterr().err
    assert f"{flag} {folder}/{name} is in no folder that the container mounts" in message
    assert f"add --mounts {folder}:{folder}\n" in f"{message}\n"
    code = ExitCode.NOT_READY if kind else ExitCode.OK  # the tokenizer is empty
    assert f"    {flag} {folder}/{name}\n" in printed(capsys, *words, "--mounts", f"{folder}:{folder}", code=code)


def test_the_run_folder_is_mounted(here, capsys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere") / "run"
    words = ["--dry-run", "--gpus-per-node", "4", "--container", "image.sqsh", *FLAGS, "--run-dir", str(folder)]
    script = printed(capsys, *words)
    assert f"--container-mounts={ROOT}:{ROOT},{here}:{here},{folder}:{folder}'" in script


def test_paths_of_renamed_mounts_are_those_of_the_container(here, capsys, tmp_path_factory):
    host, code = tmp_path_factory.mktemp("host"), tmp_path_factory.mktemp("code")
    for name in ("a.idx", "a.bin", "mine.py"):
        (host / name).touch()
    (code / "other.py").touch()
    (host / "run.yaml").write_text(f"base: parts/base.yaml\nwandb-save-dir: {host}/w\n")
    (host / "parts").mkdir()
    (host / "parts" / "base.yaml").write_text("log-interval: 7\n")
    words = ["--dry-run", "--gpus-per-node", "4", "--container", "image.sqsh", "--mounts", f"{host}:/data:ro"]
    flags = [*FLAGS, "--config", f"{host}/run.yaml", "--data-path", "1", f"{host}/a", f"--import={host}/mine.py"]
    assert main([*words, *flags]) == ExitCode.OK
    out, err = capsys.readouterr()
    renamed = ("--config /data/run.yaml", "--data-path 1 /data/a", "--import /data/mine.py", "--wandb-save-dir /data/w")
    for line in renamed:
        assert f"    {line}\n" in out, line
    for text in (err, out.replace("# ", "")):
        assert f"--data-path {host}/a is /data/a in the container\n" in text
    for line in (f"base: {host}/parts/base.yaml", f"import: [{host}/mine.py]"):
        (host / "run.yaml").write_text(line)
        assert main([*words, *flags]) == ExitCode.CONFIG
        assert "in the container" in capsys.readouterr().err


def test_script_is_written_with_the_command_to_start_it(here, capsys):
    out = printed(capsys, "--launcher", "torchrun", "--gpus-per-node", "2", *FLAGS, "--run-dir", "runs/x")
    assert out == f"wrote {here}/runs/x/job.sh; start it with: bash {here}/runs/x/job.sh\n"
    assert logged_commands(here) == []


@pytest.mark.parametrize("mode", ["--submit", "--dry-run"])
def test_invalid_layout_is_rejected_before_anything_is_written(here, capsys, mode):
    words = [mode, "--nodes", "2", "--gpus-per-node", "4", *FLAGS, "--expert-model-parallel-size", "16"]
    assert main(words) == ExitCode.CONFIG
    assert "--expert-model-parallel-size" in capsys.readouterr().err
    assert logged_commands(here) == [] and not (here / "runs").exists()


def test_unavailable_features_are_listed_in_a_dry_run_and_rejected_otherwise(here, capsys):
    flags = ["--recipe", "deepseek-v4-flash-gb200-128", "--moe-flex-dispatcher-backend", "symmetric"]
    reason = "--cuda-graph-impl full_iteration with experts over 64"
    script = printed(capsys, "--dry-run", *flags, code=ExitCode.NOT_READY)
    reasons = [line for line in script.splitlines() if line.startswith("# Cannot start yet: ")]
    assert any(reason in line for line in reasons)
    assert script.index(reasons[0]) < script.index("flags=(") and "#SBATCH --nodes=32\n" in script
    for more in ([], ["--submit"]):
        assert main([*more, *flags]) == ExitCode.CONFIG
        assert reason in capsys.readouterr().err
    assert logged_commands(here) == [] and not (here / "runs").exists()


def test_job_and_folder_are_named_after_the_recipe(here, capsys):
    words = ["--recipe", "quickstart", "--tokenizer-type", "ByteTokenizer", "--gpus-per-node", "1", "--mock-data"]
    script = printed(capsys, "--dry-run", *words)
    assert "#SBATCH --job-name=quickstart\n" in script and "run_dir=" + str(here / "runs" / "quickstart") in script


@pytest.mark.parametrize(
    ("argv", "size"),
    [
        ("--recipe m27", (1, 4)),
        ("--recipe=m27", (1, 4)),
        ("--recipe q6 --recipe=m27", (1, 4)),
        ("--recipe mixtral-8x22b-h100-128", (16, 8)),
        ("--recipe deepseek-v3-gb200-256", (64, 4)),
        ("--recipe mixtral-8x22b-h100-128 --nodes 32", (32, 8)),
        ("--recipe mixtral-8x22b-h100-128 --gpus-per-node 4", (32, 4)),
        ("--config a.yaml", (1, 8)),
        ("--config a.yaml --launcher torchrun", (1, 1)),
        ("--config a.yaml --nodes 3", (3, 8)),
        ("--config a.yaml --gpus 32", (4, 8)),
        ("--config a.yaml --world-size 32 --gpu gb200", (8, 4)),
        ("--config a.yaml --gpus 8 --nodes 2", (2, 4)),
        ("--config b.yaml", (6, 4)),
        ("--recipe m27 --config b.yaml", (6, 4)),
        ("--config b.yaml --gpus 8", (2, 4)),
    ],
)
def test_cluster_size_from_options_recipe_or_file(here, argv, size):
    Path("a.yaml").touch()
    Path("b.yaml").write_text("about: {gpu: GB300, gpus: 24}")
    options, flags = parser().parse_known_args(argv.split())
    assert cluster_size(options, flags, {}) == size


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--gpus 9 --nodes 2", "--gpus 9 and --nodes 2 contradict each other"),
        ("--gpus 12", "12 ranks do not fill nodes of 8"),
        ("--config a.yaml", "a.yaml: `gpus` of `about` is 'many'"),
    ],
)
def test_invalid_cluster_sizes_are_rejected(here, capsys, argv, sentence):
    Path("a.yaml").write_text("about: {gpus: many}")
    assert main([*argv.split(), "--dry-run", *FLAGS]) == ExitCode.CONFIG
    assert sentence in capsys.readouterr().err


def test_environment_of_the_submitting_machine_is_ignored(here, capsys, monkeypatch):
    for name, value in {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "NCCL_ALGO": "Ring"}.items():
        monkeypatch.setenv(name, value)
    script = printed(capsys, "--dry-run", "--gpus-per-node", "4", *FLAGS, "--deterministic-mode")
    assert 'export NCCL_ALGO="${NCCL_ALGO:-^NVLS}"' in script


def test_torchrun_cannot_start_other_machines(here, capsys):
    code = main(["--launcher", "torchrun", "--nodes", "2", "--gpus-per-node", "2", "--submit", *FLAGS])
    assert code == ExitCode.ENVIRONMENT
    assert "NODE_RANK=0..1 MASTER_ADDR=HOST bash" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--name", "a\ntouch x"], ["--slurm", "comment=a\ntouch x"], ["--run-dir", "a\nb"]])
def test_values_with_newlines_are_rejected(here, capsys, words):
    assert main(["--submit", "--gpus-per-node", "4", *FLAGS, *words]) == ExitCode.CONFIG
    assert "which contains the character U+000A" in capsys.readouterr().err
    assert logged_commands(here) == [] and not (here / "runs").exists()


def test_missing_sbatch_is_reported(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(here / "nothing"))
    assert main(["--submit", "--gpus-per-node", "4", *FLAGS]) == ExitCode.ENVIRONMENT
    assert "sbatch is not installed on this machine" in capsys.readouterr().err


def test_missing_data_are_reported_before_anything_is_written(here, capsys):
    words = ["--gpus-per-node", "4", *FLAGS, "--data-path", "nowhere"]
    assert main(["--submit", *words]) == ExitCode.CONFIG
    assert "2 of 2 files of --data-path do not exist, such as nowhere.idx" in capsys.readouterr().err
    assert logged_commands(here) == [] and not (here / "runs").exists()
    assert main(["--submit", *words, "--container", "image.sqsh"]) == ExitCode.OK, "an image may contain data"
