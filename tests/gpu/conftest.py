"""Writes the result of every GPU test when it ends, so that an interrupted run keeps the results of completed tests."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="file to which every test appends its outcome and output as it ends")


class _Results:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            text = f"{report.outcome} {report.duration:.1f} s {report.nodeid}\n{report.capstdout}{report.longreprtext}"
            with self._file.open("a") as file:
                file.write(f"{text.rstrip()}\n")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--results", None)
    if file is not None:
        config.pluginmanager.register(_Results(file))
