"""Training steps with packed sequences equal steps with one sequence per row."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_moe import build
from megatron_moe.build import build_data, build_eval_loaders, build_model, build_train_loader, build_trainer
from megatron_moe.config.packing import PackingConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.evaluation import evaluate
from megatron_moe.train.train_state import TrainState
from tests.helpers import tiny, tiny_data
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import FP64_LAYOUT

KERNELS = reference.bundle()
PACKED = PackingConfig()
ALONE = PackingConfig(thd_max_packed_sequences=2)
ONE_RANK = ParallelContext.single(dtype=torch.float64)
STEPS = 3


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Data prefix of documents with 1 to 19 tokens, and some that are longer than a row."""
    lengths = np.random.default_rng(0).integers(1, 20, size=40)
    lengths[::9] = 40
    folder = tmp_path_factory.mktemp("corpus")
    return tiny_data.write_tokens(folder / "corpus", tiny_data.random_documents(1, lengths.tolist()))


def plan(prefix: str, packing: PackingConfig, *, dispatcher: Any = "local", micro: int = 1, **changes: Any) -> RunPlan:
    """Plan with rows of 32 positions, in which no loss depends on which tokens share a microbatch."""
    base = tiny.plan()
    data = replace(
        base.data,
        mock_data=False,
        train_data_path=(prefix,),
        valid_data_path=(prefix,),
        vocab_size=tiny_data.VOCAB,
        tokenizer=tiny_data.data_config().tokenizer,
        packing=packing,
    )
    moe = tiny.moe(tiny.router(balancing=(), aux_loss_coeffs=()), dispatcher=dispatcher)
    model = tiny.model(vocab_size=104, num_layers=2, moe_config=moe)
    loop = replace(base.loop, calculate_per_token_loss=True, eval_iters=2)
    batch = BatchConfig(micro_batch_size=micro, global_batch_size=8)
    return tiny.plan(data=data, model=model, loop=loop, batch=batch, **changes)


def figures(plan: RunPlan, context: ParallelContext) -> dict[str, torch.Tensor]:
    """Losses, norms and weights of some steps, the number of rows of this rank, and a validation loss."""
    trainer = build_trainer(plan, context, build_model(plan, context, KERNELS), KERNELS)
    datasets = build_data(plan, context)
    loader, state, found = build_train_loader(plan, context, datasets), TrainState(), {}
    rows = 0
    for step in range(STEPS):
        batches = loader.next_step()
        rows += len(batches) * plan.batch.micro_batch_size
        outcome = trainer.step(batches, state, loader.last_counts)
        state.advance(outcome.counts, build.build_train_state_config(plan))
        found[f"loss {step}"], found[f"norm {step}"] = outcome.loss, outcome.norms["all"]
    found["tokens"] = torch.tensor(state.consumed_tokens)
    found |= {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    valid, _ = build_eval_loaders(plan, context, datasets)
    found["validation"] = torch.tensor(evaluate(trainer.pipeline, valid["validation"].steps()))
    found["rows"] = torch.tensor(rows)
    return found


@pytest.fixture(scope="module")
def alone(prefix: str) -> dict[str, torch.Tensor]:
    found = figures(plan(prefix, ALONE), ONE_RANK)
    assert found.pop("rows") == STEPS * 8
    return found


POLICIES = {
    "packed": PACKED,
    "extend_last": PackingConfig(thd_tail_padding_policy="extend_last"),
    "aligned": PackingConfig(pad_packed_seq_alignment=4),
    "by length": PackingConfig(sequence_packing_scheduler="default_dynamic_cp"),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_packed_steps_equal_steps_of_single_sequences(prefix: str, alone: dict[str, torch.Tensor], policy: str) -> None:
    found = figures(plan(prefix, POLICIES[policy]), ONE_RANK)
    assert found.pop("rows") < 0.8 * STEPS * 8
    FP64_LAYOUT.check_all(found, alone, policy)


LAYOUTS = {
    "tp": ParallelConfig(world_size=2, tp=2, sequence_parallel=True),
    "cp": ParallelConfig(world_size=2, cp=2),
    "dynamic cp": ParallelConfig(world_size=2, cp=2, max_seqlen_per_dp_cp_rank=16),
    "pp": ParallelConfig(world_size=2, pp=2),
    "dp": ParallelConfig(world_size=2),
    "more ranks than rows": ParallelConfig(world_size=8),
    "tp, cp, pp": ParallelConfig(world_size=8, tp=2, cp=2, pp=2, sequence_parallel=True),
}


def check_ranks(plan: RunPlan, alone: dict[str, torch.Tensor], what: str) -> None:
    """Compares losses, norms and, where every rank has all weights, weights."""
    whole = plan.parallel.tp == plan.parallel.pp == plan.parallel.ep == 1
    names = [name for name in alone if whole or name.split()[0] in ("loss", "norm", "tokens", "validation")]
    for found in on_threads(plan.parallel, lambda context: figures(plan, context)):
        FP64_LAYOUT.check_all({name: found[name] for name in names}, {name: alone[name] for name in names}, what)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_steps_of_ranks_equal_steps_of_single_sequences(
    prefix: str, alone: dict[str, torch.Tensor], layout: str
) -> None:
    packed = plan(prefix, PACKED, parallel=LAYOUTS[layout], micro=2 if "dynamic" in layout else 1)
    check_ranks(packed, alone, layout)


def test_experts_over_ranks_with_padding_only_equal_single_sequences(
    prefix: str, alone: dict[str, torch.Tensor]
) -> None:
    """Ranks without sequences take part in the exchange of tokens."""
    parallel = ParallelConfig(world_size=8, ep=4)
    check_ranks(plan(prefix, PACKED, parallel=parallel, dispatcher="alltoall"), alone, "ep")
