"""Formatting of counts and sizes in messages."""

import pytest

from megatron_moe.config.text import counted, divisors, num_bytes_text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (640_000, "640 KB"), (11_000_000, "11 MB"), (1.0141e9, "1.01 GB")]
    + [(999_900_000, "1 GB"), (499e9, "499 GB"), (768e12, "768 TB"), (2e15, "2,000 TB")],
)
def test_sizes_have_a_unit_in_which_they_are_at_least_one(number: float, text: str) -> None:
    assert num_bytes_text(number) == text


def test_nouns_are_singular_for_one() -> None:
    assert [counted(number, "document") for number in (0, 1, 1234)] == ["0 documents", "1 document", "1,234 documents"]


@pytest.mark.parametrize(
    ("number", "near", "text"),
    [
        (12, 5, "1, 2, 3, 4, 6, 12"),
        (2**20, 3, "1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, ..."),
        (2**20, 2**20, "..., 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576"),
        (7168, 100, "..., 14, 16, 28, 32, 56, 64, 112, 128, 224, 256, 448, 512, ..."),
    ],
)
def test_divisors_near_a_number_are_shown(number: int, near: int, text: str) -> None:
    assert divisors(number, near) == text
