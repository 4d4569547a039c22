"""Published layouts: every row starts, or has an answer that names flags."""

import pytest

from arguments.read import read_plan
from megatron_moe.config.fsdp import FSDPConfig
from tests.helpers.thinned import thinned
from tests.recipes.published import STARTS, TRAINS, dry_run, models, proxy, published, shipped

ROWS = {case.name: case for case in published()}
SHIPPED = {case.name: case for case in shipped()}
HYBRIDS = {
    name: case
    for name, case in ROWS.items()
    if name.startswith(("Nemotron", "Qwen3-Next", "Qwen3.5", "qwen3/run_next"))
}
REFUSED = {"Nemotron-H-56B, GB300, bf16": "a global batch of 192 is not a multiple of 128"}
"""Prefix of a published layout's name -> reason why its dry run is rejected."""
SHARDED = [name for name, case in ROWS.items() if "--use-megatron-fsdp" in case.words]
MUON = [name for name, case in ROWS.items() if any(word.endswith("muon.yaml") for word in case.words)]


def test_every_source_is_in_the_table() -> None:
    assert len(ROWS) == len(list(published())) > 75
    assert {case.source.split("/")[2] for case in ROWS.values()} == {"github.com"}
    assert len({case.source for case in ROWS.values()}) == 5 and len(models()) > 20


@pytest.mark.parametrize("name", thinned(ROWS, 20))
def test_a_published_layout_starts_or_names_flags(name: str) -> None:
    answer = dry_run(ROWS[name])
    reasons = ("--", "experts cannot be folded", "a global batch of")
    assert answer == STARTS or any(reason in answer for reason in reasons), answer


def answers_as_expected(name: str) -> bool:
    expected = next((why for start, why in REFUSED.items() if name.startswith(start)), STARTS)
    return dry_run(ROWS[name]).startswith(expected)


@pytest.mark.parametrize("name", thinned(HYBRIDS, 12))
def test_published_hybrids_start(name: str) -> None:
    assert answers_as_expected(name), dry_run(HYBRIDS[name])


@pytest.mark.parametrize("name", thinned(SHARDED, 6))
def test_published_layouts_with_sharded_weights_start(name: str) -> None:
    assert answers_as_expected(name), dry_run(ROWS[name])


@pytest.mark.parametrize("name", thinned(MUON, 6))
def test_published_layouts_with_muon_start(name: str) -> None:
    assert len(MUON) == 20 and answers_as_expected(name), dry_run(ROWS[name])


def test_a_recipe_with_sharded_weights_keeps_them_as_a_proxy_on_two_ranks() -> None:
    """`test_a_recipe_trains_on_two_ranks` trains it; the replicas of its shards need four ranks."""
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    words = [*SHIPPED["nemotron-3-ultra-550b-a55b-gb300-256"].words, "--proxy"]
    plan = read_plan(words, ranks, lambda config: config.vocab_size or 512)
    assert plan.data_parallel.fsdp == FSDPConfig(grad_comm="bf16", gathers_from_peers=True, reduces_through_peers=True)
    assert plan.parallel.dp == 2


@pytest.mark.slow
def test_all_published_hybrids_start() -> None:
    assert len(HYBRIDS) >= 63 and [name for name in HYBRIDS if not answers_as_expected(name)] == []


@pytest.mark.slow
def test_most_published_layouts_start() -> None:
    assert sum(dry_run(case) == STARTS for case in ROWS.values()) >= 220


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "quickstart"])
def test_a_recipe_trains_on_two_ranks(name: str) -> None:
    if dry_run(SHIPPED[name]) == STARTS:
        assert proxy(SHIPPED[name]) == TRAINS
