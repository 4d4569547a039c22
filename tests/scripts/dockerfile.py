"""Linter for Dockerfiles: errors that can be found without building."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INSTRUCTIONS = ("FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD")
_VARIABLE = re.compile(r"\$\{?([A-Z_]+)\}?")


@dataclass(frozen=True)
class Instruction:
    """One instruction with its continuation lines joined."""

    line: int
    name: str
    text: str


def instructions(text: str) -> list[Instruction]:
    """Instructions of a Dockerfile, without comments and empty lines."""
    found, number = [], 0
    lines = iter(text.splitlines())
    for line in lines:
        number += 1
        if not line.strip() or line.startswith("#"):
            continue
        start = number
        while line.endswith("\\"):
            line = line[:-1] + " " + next(lines).strip()
            number += 1
        name, _, rest = line.partition(" ")
        found.append(Instruction(start, name, rest.strip()))
    return found


def findings(text: str, root: Path) -> list[str]:
    """One message per error."""
    return [f"line {line}: {what}" for line, what in _findings(instructions(text), root)]


def _findings(found: list[Instruction], root: Path) -> Iterator[tuple[int, str]]:
    stages: list[str] = []
    known: set[str] = set()
    everywhere: set[str] = set()
    for each in found:
        if each.name not in INSTRUCTIONS:
            yield each.line, f"unknown instruction {each.name}"
        if each.name == "ARG":
            (known if stages else everywhere).add(each.text.partition("=")[0])
        elif each.name == "FROM":
            image, _, stage = each.text.partition(" AS ")
            yield from ((each.line, problem) for problem in _image(image, everywhere, found))
            stages.append(stage)
            known = {"PATH"}
        elif each.name == "ENV":
            yield from ((each.line, problem) for problem in _unknown(each.text, known))
            known |= {word.partition("=")[0] for word in shlex.split(each.text)}
        elif each.name == "RUN":
            yield from ((each.line, problem) for problem in (*_unknown(each.text, known), *_run(each.text)))
        elif each.name == "COPY":
            yield from ((each.line, problem) for problem in _copy(each.text, stages, root))
    if not stages or len(set(stages)) != len(stages) or "" in stages:
        yield 1, f"stages need names of their own: {stages}"


def _image(image: str, everywhere: set[str], found: list[Instruction]) -> Iterator[str]:
    """Yields a finding if an image has no fixed tag."""
    for name in _VARIABLE.findall(image):
        if name not in everywhere:
            yield f"{image} needs an ARG {name} above the first FROM"
        values = [each.text.partition("=")[2] for each in found if each.name == "ARG" and each.text.startswith(name)]
        image = values[0] if values else image
    if image != "scratch" and ("$" in image or ":" not in image or image.endswith(":latest")):
        yield f"the image {image} has no fixed tag"


def _unknown(text: str, known: set[str]) -> Iterator[str]:
    for name in sorted(set(_VARIABLE.findall(text)) - known):
        yield f"{name} is not declared in this stage"


def _run(text: str) -> Iterator[str]:
    if "apt-get install" in text and not ("apt-get update" in text and "rm -rf /var/lib/apt/lists" in text):
        yield "apt-get install belongs between apt-get update and the removal of its lists"
    if "apt-get install" in text and "--no-install-recommends" not in text:
        yield "apt-get install without --no-install-recommends"
    for command in re.split(r"&&|;", text):
        if re.search(r"\bpip (install|wheel)\b", command) and "--no-cache-dir" not in command:
            yield f"pip without --no-cache-dir: {command.strip()}"
        if "git clone" in command and "--branch" not in command and "checkout" not in text:
            yield f"a clone of whatever is newest: {command.strip()}"
        if re.search(r"\bpip install\b.*\b(apex|deep-ep)\b(?![/\w])", command) and "/wheels" not in command:
            yield "apex and deep-ep of the package index are other programs"


def _copy(text: str, stages: list[str], root: Path) -> Iterator[str]:
    words = text.split()
    origin = [word.removeprefix("--from=") for word in words if word.startswith("--from=")]
    if origin:
        if origin[0] not in stages:
            yield f"no stage {origin[0]} above"
        return
    for word in words[:-1]:
        if not (root / word).exists():
            yield f"{word} does not exist"
