"""Multi-latent attention against a loop over heads and positions."""

import pytest
import torch

from megatron_moe.config.attention import NormConfig
from tests.helpers.mixers import check_against_loop
from tests.helpers.tiny_models import make_mb, mla_config

CASES = {
    "with q latent": {},
    "without q latent": {"q_lora_rank": None},
    "without norms": {"qk_norm": False},
    "LayerNorm": {"norm": NormConfig(kind="LayerNorm")},
    "sinks": {"core": {"sinks": True}},
    "window": {"core": {"window": (2, 0)}},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_mla_equals_a_loop_over_heads_and_positions(changes):
    check_against_loop(mla_config(**changes), make_mb(2, 5))


def test_mla_equals_the_loop_with_documents_and_reset_positions():
    positions_BS = torch.tensor([[0, 1, 0, 1, 2]])
    segments_BS = torch.tensor([[0, 0, 1, 1, 1]])
    check_against_loop(mla_config(), make_mb(1, 5, positions_BS=positions_BS, segments_BS=segments_BS))
