"""The Dockerfile passes a linter that finds planted errors."""

import pytest

from megatron_moe.resilience.packages import HOW_TO_BUILD
from tests.helpers.ranks import REPOSITORY
from tests.scripts.dockerfile import findings, instructions

TEXT = (REPOSITORY / "Dockerfile").read_text()


def test_the_dockerfile_has_no_finding():
    assert findings(TEXT, REPOSITORY) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ARG TE_VERSION=2.20.2\nARG GROUPED", "ARG GROUPED", "TE_VERSION is not declared in this stage"),
        ("python:3.11-slim-bookworm", "python:latest", "has no fixed tag"),
        ("python:3.11-slim-bookworm", "python", "has no fixed tag"),
        ("ARG PYTHON_IMAGE", "ARG OTHER_IMAGE", "needs an ARG PYTHON_IMAGE"),
        ("COPY --from=kernels", "COPY --from=kernel", "no stage kernel above"),
        ("COPY tools ./tools", "COPY tool ./tools", "tool does not exist"),
        ("git -C /src/apex checkout ${APEX_COMMIT}", "true", "a clone of whatever is newest"),
        (" && rm -rf /var/lib/apt/lists/*", "", "removal of its lists"),
        ("--no-install-recommends ", "", "without --no-install-recommends"),
        ("pip wheel --no-cache-dir", "pip wheel", "pip without --no-cache-dir"),
        ("nvidia-nvshmem-cu13\nWORKDIR", "nvidia-nvshmem-cu13 apex\nWORKDIR", "are other programs"),
        ("WORKDIR /wheels", "WORKDIRS /wheels", "unknown instruction WORKDIRS"),
        (" AS kernels", " AS cpu", "names of their own"),
    ],
)
def test_the_linter_finds_planted_errors(old, new, message):
    assert old in TEXT
    assert any(message in finding for finding in findings(TEXT.replace(old, new), REPOSITORY))


def test_continued_lines_are_one_instruction_under_its_first_number():
    found = instructions("# a\nFROM x:1 AS a\n\nRUN one \\\n    && two\nCMD z\n")
    assert [(each.line, each.name, each.text.split()) for each in found] == [
        (2, "FROM", ["x:1", "AS", "a"]),
        (4, "RUN", ["one", "&&", "two"]),
        (6, "CMD", ["z"]),
    ]


def test_the_doctor_builds_what_the_image_builds():
    tag = next(line for line in TEXT.splitlines() if line.startswith("ARG DEEPEP_TAG=")).partition("=")[2]
    assert any(
        f"git clone --branch {tag} https://github.com/deepseek-ai/DeepEP" in step for step in HOW_TO_BUILD["deep-ep"]
    )
    assert any("APEX_CPP_EXT=1 APEX_CUDA_EXT=1" in step for step in HOW_TO_BUILD["apex"])
    assert "APEX_CPP_EXT=1 APEX_CUDA_EXT=1" in TEXT
