"""Wheel, pinned versions, container images, scripts and Makefile."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.house_rules.source import ROOT, report, sources

CONSTRAINTS = ROOT / "constraints.txt"
DOCKERFILE = ROOT / "Dockerfile"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Wheel built from a copy of the repository."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("megatron_moe", "arguments", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "pretrain_moe.py"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", "dist"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (path,) = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def pins() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def requirements(wheel: zipfile.ZipFile) -> list[Requirement]:
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    lines = wheel.read(name).decode().splitlines()
    return [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist: ")]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_wheel_holds_program_packages_and_recipes_and_nothing_else(wheel):
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    data = {top for top in tops if top.endswith(".data")}
    assert tops - data == {"pretrain_moe.py", "megatron_moe", "arguments"}
    place, recipes = "/share/megatron_moe/recipes/", ROOT / "scripts" / "recipes"
    shipped = {name.split(place)[1] for name in names if place in name}
    assert shipped == {path.relative_to(recipes).as_posix() for path in recipes.rglob("*.yaml")}
    ours = {file.path for file in sources("megatron_moe", "arguments")}
    report(sorted(ours - set(names)), "files missing from the wheel: is there an __init__.py in their folder?")


def test_the_wheel_prints_help_outside_the_repository(wheel, tmp_path):
    wheel.extractall(tmp_path)
    command = [sys.executable, "-c", "import sys, pretrain_moe; sys.argv[1:] = ['--help']; pretrain_moe.command()"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "pretrain_moe.py" in done.stdout


def test_requirements_are_pinned_within_their_bounds(wheel):
    pinned = pins()
    tested = [each for each in requirements(wheel) if each.marker is None or each.marker.evaluate({"extra": "test"})]
    assert {"torch", "pytest"} <= {each.name for each in tested}
    loose = [each.name for each in tested if normal(each.name) not in pinned and each.name != "setuptools"]
    report(loose, "constraints.txt pins the requirements of setup.py")
    outside = [str(each) for each in tested if not each.specifier.contains(pinned.get(normal(each.name), "99999"))]
    report(outside, "the pins of constraints.txt lie within the bounds of setup.py")
    assert pinned["torch"] == "2.13.0"


def test_direct_requirements_are_pinned_first_and_others_name_their_dependents(wheel):
    head, *groups = CONSTRAINTS.read_text().split("\n# Needed by ")
    direct = {line.partition("==")[0] for line in head.splitlines() if "==" in line}
    requested = {
        normal(each.name)
        for each in requirements(wheel)
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("text", "test", "browser"))
    }
    assert direct == requested - {"setuptools"}
    needed_by = {name for group in groups for name in group.splitlines()[0].split(", ")}
    assert needed_by <= direct | {"several of these"}


def test_the_images_install_torch_first_and_start_the_program():
    text = DOCKERFILE.read_text()
    stages = {part.split("\n", 1)[0].split(" AS ")[1]: part for part in text.split("\nFROM ")[1:]}
    assert list(stages) == ["sources", "cpu", "kernels", "cuda"], "the last stage is what `docker build` makes"
    for name in ("cpu", "cuda"):
        stage = stages[name]
        assert stage.index("torch==") < stage.index("pip install --no-cache-dir", stage.index("torch=="))
        assert 'ENTRYPOINT ["python", "pretrain_moe.py"]' in stage
        assert "COPY --from=sources" in stage
    assert "\nCOPY . ./\n" in stages["cpu"], "tests read the whole repository"
    assert f"TORCH_VERSION={pins()['torch']}" in stages["cpu"] and "-c constraints.txt" in stages["cpu"]
    torch = re.search(r"ARG TORCH_VERSION=(.*)", stages["cuda"])
    assert torch is not None and f"pytorch/pytorch:{torch[1]}-cuda13" in text, "torch is the base image's"
    assert "constraints.txt" not in stages["cuda"], "the tested set is of the CPU"


def test_the_images_copy_existing_files():
    copied = [line.split()[1:-1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY ")]
    names = [name for names in copied for name in names if not name.startswith("--from") and not name.startswith("/")]
    report([name for name in names if not (ROOT / name).exists()], "COPY of missing files")


def test_shell_scripts_parse_and_stop_at_errors():
    scripts = [*sorted((ROOT / "scripts").rglob("*.sh")), ROOT / ".ci" / "run"]
    for script in scripts:
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        text = script.read_text()
        assert text.startswith("#!/usr/bin/env bash\n"), script
        assert re.search(r"^(set -e?uo pipefail|exec )", text, re.MULTILINE), script


def test_every_tool_starts_from_any_folder_without_installation():
    findings = []
    for file in sources("tools"):
        before = file.text.partition("\nsys.path.insert(0, str(")[0]
        ours = r"^(from|import) (arguments|megatron_moe|pretrain_moe|tests|tools)\b"
        if "__main__" in file.text and re.search(ours, before, re.MULTILINE):
            findings.append(f"{file.path}: imports the program before sys.path has the repository's root")
    report(findings, "tools need no installed program")


def test_continuous_integration_runs_the_test_script():
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111, ".ci/run can be executed"


def test_every_makefile_target_has_a_description():
    text = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z0-9 ]+):(.*)$", text, re.MULTILINE)
    assert {"help", "check", "test", "nightly", "goldens"} <= {name for names, _ in targets for name in names.split()}
    report([names for names, rest in targets if "## " not in rest], "targets without a `## ` sentence")


def test_the_torch_of_the_install_script_comes_before_the_project():
    lines = (ROOT / "scripts" / "install.sh").read_text().splitlines()
    steps = [line for line in lines if "pip install" in line and "--constraint constraints.txt" in line]
    assert len(steps) == 2 and steps[0].endswith(" torch") and "--editable" in steps[1]


def test_decisions_are_numbered_once():
    numbers = [path.name[:4] for path in (ROOT / "docs" / "decisions").glob("*.md")]
    assert all(number.isdigit() for number in numbers)
    report(sorted({number for number in numbers if numbers.count(number) > 1}), "two decisions with one number")


def test_the_repository_has_no_stray_top_level():
    known = {
        "pretrain_moe.py", "megatron_moe", "arguments", "scripts", "tools", "tests", "setup.py", "Dockerfile",
        "README.md", "docs", "benchmarks", "constraints.txt", "pyproject.toml", "Makefile", "CHANGELOG.md", "LICENSE",
    }  # fmt: skip
    made_by_tools = {"build", "dist", "data", "runs"}
    found = {path.name for path in Path(ROOT).iterdir() if not path.name.startswith(".")}
    stray = [name for name in found - known - made_by_tools if not name.endswith((".egg-info", "__pycache__"))]
    report(sorted(stray), "top-level names are fixed by the design")
