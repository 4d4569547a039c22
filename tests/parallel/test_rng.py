"""Random numbers do not depend on how a tensor is sharded."""

import pytest
import torch

from megatron_moe.parallel import rng
from tests.helpers.tiny_models import randn
from tests.helpers.tolerances import EXACT

KEY = (3, "site")


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_the_masks_of_the_parts_are_the_parts_of_the_mask(dim, num_parts):
    x = randn(8, 4, 8)
    whole = rng.dropout(x, 0.4, KEY)
    parts = [
        rng.dropout(part, 0.4, KEY, dim=dim, part=(index, num_parts))
        for index, part in enumerate(x.chunk(num_parts, dim=dim))
    ]
    EXACT.check(torch.cat(parts, dim=dim), whole, "dropped")
    assert 0.2 < (whole == 0).double().mean() < 0.6


@pytest.mark.parametrize("draw", [rng.uniform, rng.normal])
def test_the_numbers_of_the_parts_are_the_parts_of_the_numbers(draw):
    shape, device = torch.Size((6, 4)), torch.device("cpu")
    parts = [draw(torch.Size((2, 4)), KEY, device, part=(index, 3)) for index in range(3)]
    EXACT.check(torch.cat(parts), draw(shape, KEY, device), "numbers")


def test_other_keys_draw_other_masks_and_none_draws_no_mask():
    x = randn(50, 4)
    assert (rng.dropout(x, 0.5, KEY) != rng.dropout(x, 0.5, (3, "other"))).any()
    assert rng.dropout(x, 0.5, None) is x is rng.dropout(x, 0.0, KEY)


def test_the_key_of_a_site_is_flat_and_sites_of_other_scopes_differ():
    key = rng.RNGKey(1, 5, 3, ("cp", 1))
    assert key.with_scope("mtp", 0).draw_key("embedding") == (1, 5, 3, "cp", 1, "mtp", 0, "embedding")
    assert type(key.draw_key()) is tuple, "seeds are hashes of the key's repr"
    assert rng.seed_from_key(key.draw_key("a")) != rng.seed_from_key(key.with_scope("mtp", 0).draw_key("a"))
