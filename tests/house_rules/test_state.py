"""R2, R8: no global state, no swallowed errors."""

import pytest

from tests.house_rules.source import PROGRAM, report, source, sources
from tests.house_rules.state import cache_findings, container_findings, except_findings, global_findings


def test_modules_have_no_mutable_global_state():
    report([finding for file in sources(*PROGRAM) for finding in global_findings(file)], "R2: no global statements")


def test_no_mutable_container_is_global():
    findings = [finding for file in sources(*PROGRAM) for finding in container_findings(file)]
    report(findings, "R2: no module-level or class-level mutable containers")


def test_no_function_is_cached_for_the_process():
    findings = [finding for file in sources("megatron_moe") for finding in cache_findings(file)]
    report(findings, "R2: no process-wide caches outside config, where all values are frozen")


def test_only_telemetry_catches_every_exception():
    findings = [finding for file in sources(*PROGRAM) for finding in except_findings(file)]
    report(findings, "R8: `except Exception` only where telemetry must not stop training")


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (global_findings, "x = 1\ndef f():\n    global x\n    x = 2"),
        (container_findings, "REGISTRY = {}"),
        (container_findings, "names: list[str] = []"),
        (container_findings, "class A:\n    seen = set()"),
        (container_findings, "if True:\n    table = collections.defaultdict(int)"),
        (cache_findings, "@functools.lru_cache(maxsize=None)\ndef f(): ..."),
        (except_findings, "try:\n    f()\nexcept:\n    pass"),
        (except_findings, "try:\n    f()\nexcept (ValueError, Exception):\n    pass"),
        (except_findings, "try:\n    f()\nexcept BaseException as error:\n    raise RuntimeError() from error"),
    ],
)
def test_the_checks_find_planted_state(check, text):
    assert len(check(source("megatron_moe/moe/router.py", text))) == 1


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (container_findings, "NAMES = ('a', 'b')\nTABLE = MappingProxyType({'a': 1})"),
        (container_findings, "def f():\n    seen = set()"),
        (container_findings, "class A:\n    names: list[str] = field(default_factory=list)"),
        (except_findings, "try:\n    f()\nexcept ValueError:\n    pass"),
        (except_findings, "try:\n    f()\nexcept BaseException:\n    clean_up()\n    raise"),
    ],
)
def test_the_checks_accept_allowed_code(check, text):
    assert check(source("megatron_moe/moe/router.py", text)) == []
