"""Pipelines under NCCL give the numbers of one GPU, in fp64 on the reference kernels."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from megatron_moe.config.model import MTPConfig
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.training import BatchConfig
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import tiny
from tests.helpers.pipelines import laid_out, together, train
from tests.helpers.ranks import free_port
from tests.helpers.tolerances import FP64_LAYOUT

pytestmark = pytest.mark.gpu2

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


def rank_main(rank: int, port: int, folder: str) -> None:
    found = {}
    for number, (name, plan) in enumerate(PLANS.items()):
        launch = ProcessInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_port=port + number)
        context = ParallelContext.start(plan.parallel, launch, device="cuda", dtype="fp64")
        found[name] = {key: value.cpu() for key, value in train(plan, context).items()}
        context.stop()
    if rank == 0:
        alone = ParallelContext.single(dtype=torch.float64, device="cuda:0")
        found["one GPU"] = {key: value.cpu() for key, value in train(PLAN, alone).items()}
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


def test_every_schedule_matches_one_gpu(tmp_path: Path) -> None:
    mp.spawn(rank_main, args=(free_port(), str(tmp_path)), nprocs=2)
    first, second = (pickle.loads(Path(tmp_path, f"{rank}.pickle").read_bytes()) for rank in range(2))
    for name in PLANS:
        FP64_LAYOUT.check_all(together([first[name], second[name]]), first["one GPU"], name)
