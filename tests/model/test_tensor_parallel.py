"""A tensor-parallel model equals the model on one rank: losses, gradients, and weights after three steps."""

import pytest
import torch

from tests.helpers.sharded import LAYOUTS, SEQUENCE_LAYOUTS, check_training
from tests.helpers.sharded_models import DENSE, SPARSE, batches
from tests.helpers.thinned import thinned


@pytest.mark.parametrize("layout", thinned(LAYOUTS.values()), ids=LAYOUTS)
@pytest.mark.parametrize("config", DENSE.values(), ids=DENSE)
def test_a_dense_model_trains_as_on_one_rank(config, layout):
    check_training(config, batches(), layout)


@pytest.mark.parametrize("layout", SEQUENCE_LAYOUTS.values(), ids=SEQUENCE_LAYOUTS)
@pytest.mark.parametrize("config", SPARSE.values(), ids=SPARSE)
def test_a_mixture_of_experts_trains_as_on_one_rank(config, layout):
    check_training(config, batches(), layout)


@pytest.mark.parametrize("layout", SEQUENCE_LAYOUTS.values(), ids=SEQUENCE_LAYOUTS)
def test_padding_is_not_routed_on_any_rank(layout):
    valid_BS = torch.ones(2, 12, dtype=torch.bool)
    valid_BS[0, 7:] = valid_BS[1, 3:5] = False
    check_training(SPARSE["shared"], batches(1, valid_BS=valid_BS), layout)
