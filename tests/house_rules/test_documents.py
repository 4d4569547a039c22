"""README, docs/ and CHANGELOG.md: links, paths and flags exist, decision records are complete."""

import re
from functools import cache
from pathlib import Path

from arguments.deprecated import old_names
from arguments.flags import Registry, with_dashes
from arguments.recognised import find_recognised
from tests.house_rules.source import ROOT, report, sources

REGISTRY = Registry.declared()

DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")), *DECISIONS]
MAX_README_LINES = 220
PARTS = ("**Status.** ", "## Context\n", "## Decision\n", "## Consequences\n")
ROOTS = (ROOT, ROOT / "megatron_moe", ROOT / "docs", *(path for path in (ROOT / "tests").iterdir() if path.is_dir()))
"""Folders that paths in documents are relative to."""
FOREIGN = ("pretrain_gpt.py", "--flag", "--value", "--x", "--no-x", "--kill-on-bad-exit", "--segment", "--wait")
"""Names of Megatron-LM, SLURM and examples."""
RUN_FOLDERS = ("runs/", "tensorboard/", "checkpoints/", "crash/")


def broken_links(path: Path, text: str) -> list[str]:
    links = re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", text)
    return [f"{path.name}: {link}" for link in links if not (path.parent / link).exists()]


def stale_paths(name: str, text: str) -> list[str]:
    """Python files and folders in code spans that do not exist."""
    spans = re.findall(r"`((?:[a-z_]\w*/)*(?:[a-z_]\w*\.py|[a-z_]\w*/))`", text)
    ours = [span for span in spans if span not in FOREIGN and not span.startswith(RUN_FOLDERS)]
    missing = [span for span in ours if not any((root / span).exists() for root in ROOTS)]
    return [f"{name}: {span}" for span in missing if "/" in span or not any(ROOT.glob(f"*/**/{span}"))]


def unknown_flags(name: str, text: str, scripts: str) -> list[str]:
    """Flags that neither pretrain_moe.py nor a tool, benchmark or script has."""
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w(?![\w-]*[-*])", text)) - set(FOREIGN)
    return [f"{name}: {flag}" for flag in sorted(flags) if not _is_known(flag) and f'"{flag}"' not in scripts]


@cache
def _is_known(flag: str) -> bool:
    name = with_dashes(flag)
    return REGISTRY.find(name) is not None or name in old_names() or find_recognised(name) is not None


def test_paths_in_documents_exist() -> None:
    pages = [path for path in PAGES if path.name != "CHANGELOG.md"]
    report([each for path in pages for each in stale_paths(path.name, path.read_text(encoding="utf-8"))], "stale paths")


def test_flags_in_documents_exist() -> None:
    scripts = "".join(file.text for file in sources("tools", "benchmarks", "tests"))
    pages = [path for path in PAGES if path.name != "recipes.md"]
    findings = [each for path in pages for each in unknown_flags(path.name, path.read_text(encoding="utf-8"), scripts)]
    report(findings, "unknown flags")


def test_a_stale_path_and_an_unknown_flag_are_found() -> None:
    assert stale_paths("a.md", "`moe/router.py`, `specs/` and `moe/gate.py`") == ["a.md: specs/", "a.md: moe/gate.py"]
    assert unknown_flags("a.md", "`--num-layers 2 --num-lairs 3 --fault-*`", "") == ["a.md: --num-lairs"]


def test_relative_links_of_documents_resolve() -> None:
    report([link for path in PAGES for link in broken_links(path, path.read_text(encoding="utf-8"))], "broken links")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_decision_records_are_complete() -> None:
    assert DECISIONS
    findings = []
    for path in DECISIONS:
        text = path.read_text(encoding="utf-8")
        findings += [f"{path.name}: title"] * (not text.startswith(f"# {path.name[:4]} "))
        findings += [f"{path.name}: no {part.strip()}" for part in PARTS if part not in text]
    report(findings, "a decision record has status, context, decision and consequences")


def test_references_to_decision_records_in_code_and_pages_exist() -> None:
    numbers = {path.name[:4] for path in DECISIONS}
    files = [*(path for top in ("megatron_moe", "arguments", "tools") for path in (ROOT / top).rglob("*.py")), *PAGES]
    findings = [
        f"{path.relative_to(ROOT)}: {number}"
        for path in files
        for number in re.findall(r"decisions/(\d{4})", path.read_text(encoding="utf-8"))
        if number not in numbers
    ]
    report(findings, "references to decision records that do not exist")


def test_a_broken_link_is_found() -> None:
    assert broken_links(ROOT / "README.md", "[a](docs/none.md) [b](docs/tour.md) [c](https://example.org)") == [
        "README.md: docs/none.md"
    ]
