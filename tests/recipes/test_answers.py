"""The table of recipes: what every row says, which proxies run, and how an interrupted run continues."""

from pathlib import Path

import pytest

from tests.recipes import answers as module
from tests.recipes.answers import Answer, answers, table
from tests.recipes.published import STARTS, TRAINS, Case, proxy

WORDS = (
    *"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64".split(),
    *"--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 64".split(),
    *("--tokenizer-type", "NullTokenizer"),
)
GOOD = Case("here", "good", WORDS)
SAME = Case("here", "the same|again", (*WORDS, "--train-iters", "7"))
WIDER = Case("there", "wider", (*WORDS, "--hidden-size", "64"))
BAD = Case("there", "bad", (*WORDS, "--hidden-size", "33"))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the cases whose proxies ran; all train, without running anything."""
    names: list[str] = []

    def train(case: Case) -> str:
        names.append(case.name)
        return TRAINS

    monkeypatch.setattr(module, "proxy", train)
    return names


def test_a_proxy_on_two_ranks_trains_or_gives_its_reason() -> None:
    assert proxy(GOOD) == TRAINS
    assert proxy(BAD) == "at full size: 4 heads do not divide the hidden size 33"


def test_rows_with_the_same_proxy_run_once(tmp_path: Path, ran: list[str]) -> None:
    rows = list(answers([GOOD, SAME, WIDER, BAD], tmp_path / "answers", "c0ffee"))
    assert ran == ["good", "wider"]
    assert [row.dry_run == STARTS for row in rows] == [True, True, True, False]
    text = table(rows)
    assert "- here: of 2 rows 2 start, and the proxies of 2 train" in text
    assert "- there: of 2 rows 1 start, and the proxies of 1 train" in text
    assert "| 1 | good | starts | trains |" in text and "| 2 | the same/again | starts | trains, as row 1 |" in text
    assert "| 3 | wider | starts | trains |" in text
    assert rows[3].proxy in text and "33" in rows[3].proxy and "at commit c0ffee" in text


def test_an_interrupted_run_continues_and_repeats_what_did_not_train(tmp_path: Path, ran: list[str]) -> None:
    path = tmp_path / "answers"
    first = list(answers([GOOD, BAD], path, "c0ffee"))
    again = list(answers([GOOD, SAME, WIDER, BAD], path, "decaf"))
    assert ran == ["good", "wider"]
    assert again[0] == first[0] and [row.commit for row in again] == ["c0ffee", "decaf", "decaf", "decaf"]
    assert len(path.read_text().splitlines()) == 5


def test_the_table_states_all_commits_and_the_time_of_proxies() -> None:
    row = Answer(source="here", name="good", commit="c0ffee", dry_run=STARTS, proxy=TRAINS, plan="1", seconds=90.0)
    later = Answer(source="here", name="better", commit="decaf", dry_run=STARTS, proxy=TRAINS, plan="2", seconds=30.0)
    assert "at commit c0ffee, decaf. 2 proxies ran in 2 minutes" in table([row, later])
