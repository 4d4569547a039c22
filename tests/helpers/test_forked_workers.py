"""Tests run in forked processes have the reports of an ordinary session."""

import xml.etree.ElementTree as xml
from pathlib import Path

from tests.helpers.ranks import run_python

PASSES = """
import os, pytest

@pytest.fixture(scope="session")
def torn_down(tmp_path_factory):
    yield
    open(os.environ["TORN_DOWN"], "a").write("x")

@pytest.mark.parametrize("number", range(3))
def test_a(number, torn_down, capfd, caplog):
    os.system("echo out")
    assert capfd.readouterr().out == "out\\n"
"""
FAILS = """
import os

def test_b():
    print("a line")
    assert 1 > 2

def test_c():
    os._exit(7)

def test_d():
    pass
"""


def test_results_failures_and_deaths_are_reported(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_fails.py").write_text(FAILS)
    for number in range(4):
        (tmp_path / f"test_{number}.py").write_text(PASSES)
    options = ("-m", "pytest", "-q", "-p", "tests.helpers.forked_workers", "--workers", "2", "--junitxml", "out.xml")
    done = run_python(*options, cwd=tmp_path, TORN_DOWN=str(tmp_path / "torn_down"))
    assert done.returncode == 1, done.stdout
    assert "3 failed, 12 passed" in done.stdout and "a line" in done.stdout and "exit code 7" in done.stdout
    cases = list(xml.parse(tmp_path / "out.xml").getroot().iter("testcase"))
    assert len(cases) == 15
    failed = {case.get("name") for case in cases if case.find("failure") is not None}
    assert failed == {"test_b", "test_c", "test_d"}, "the test after the death was not run, and is not lost"
    assert 1 <= len((tmp_path / "torn_down").read_text()) <= 2, "once in every worker that used the fixture"
