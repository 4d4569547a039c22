"""Pipeline parallelism with NCCL gives the results of one GPU, in fp64 with the reference kernels."""

from functools import cache

import pytest
import torch
from torch import Tensor

from megatron_moe.config.model import MTPConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.training import BatchConfig
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import tiny
from tests.helpers.contexts import context_of_rank
from tests.helpers.pipelines import laid_out, together, train
from tests.helpers.ranks import on_gpus
from tests.helpers.tolerances import FP64_LAYOUT

pytestmark = pytest.mark.gpu2

LIMIT_S = 120.0
BIASED = tiny.router(score_function="sigmoid", expert_bias=True, bias_update_rate=0.01)
MODEL = tiny.model(
    num_layers=4, moe_config=tiny.moe(BIASED), tied_embeddings=True, embedding_dropout=0.1, mtp=MTPConfig(num_layers=1)
)
PLAN = tiny.plan(model=MODEL, batch=BatchConfig(micro_batch_size=1, global_batch_size=4))
PLANS = {
    "1F1B": laid_out(PLAN, "Ett|ttmL", 2),
    "chunks": laid_out(PLAN, "Et|t|t|tmL", 2),
    "chunks, split backward": laid_out(PLAN, "Et|t|t|tmL", 2, delay_wgrad_compute=True),
    "prediction before the loss stage": laid_out(PLAN, "Et|tt|t|mL", 2),
}


def run(context: ParallelContext, name: str) -> dict[str, Tensor]:
    plan = PLANS[name]
    here = context_of_rank(plan.parallel, context.rank, device=context.device, handles=context.handles)
    return {key: value.cpu() for key, value in train(plan, here).items()}


@cache
def of_one_gpu() -> dict[str, Tensor]:
    alone = ParallelContext.single(dtype=torch.float64, device="cuda:0")
    return {key: value.cpu() for key, value in train(PLAN, alone).items()}


@pytest.mark.parametrize("name", PLANS)
def test_every_schedule_matches_one_gpu(name: str) -> None:
    by_rank = on_gpus(ParallelConfig(world_size=2), run, name, timeout=LIMIT_S)
    FP64_LAYOUT.check_all(together(by_rank), of_one_gpu(), name)
