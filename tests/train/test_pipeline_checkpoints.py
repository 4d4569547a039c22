"""A checkpoint has no layout in it: any pipeline writes it, any other goes on from it with the same numbers."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.build import build_train_state_config
from megatron_moe.checkpoint.load import find, load
from megatron_moe.checkpoint.manifest import decode
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.verify import verify
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.model import MTPConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.training import BatchConfig
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.checkpointing import saved_tensors
from megatron_moe.train.train_state import TrainState
from tests.helpers import tiny
from tests.helpers.pipelines import laid_out, make_trainer, run_steps, together
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import FP64_LAYOUT

BIASED = tiny.router(
    score_function="sigmoid", expert_bias=True, bias_update_rate=0.01, balancing=("none",), aux_loss_coeffs=(0.0,)
)
MODEL = tiny.model(num_layers=4, moe_config=tiny.moe(BIASED), tied_embeddings=True, mtp=MTPConfig(num_layers=1))


def over_ranks(config):
    """With the dispatcher that moves rows between ranks."""
    layers = tuple(
        replace(layer, feed_forward=replace(layer.feed_forward, dispatcher="alltoall")) if layer.is_moe else layer
        for layer in config.layers
    )
    return replace(config, layers=layers)


PLAN = tiny.plan(model=MODEL, batch=BatchConfig(micro=1, global_size=4), data=replace(tiny.plan().data, seq_length=12))
ZERO = DataParallelConfig(sharded_optimizer=True)
PLANS = {
    "one rank": PLAN,
    "pp 2": laid_out(PLAN, "Ett|ttmL", 2),
    "pp 4 with chunks": laid_out(PLAN, "E|t|t||t|t|m|L", 4),
    "dp 2 with shards": replace(PLAN, parallel=ParallelConfig(world_size=2), data_parallel=ZERO),
}
PLANS["dp 2 x pp 2 with shards"] = replace(
    PLANS["pp 2"], parallel=replace(PLANS["pp 2"].parallel, world_size=4), data_parallel=ZERO
)
PLANS["tp 2 x pp 2, experts over ranks"] = replace(
    PLANS["pp 2"],
    model=over_ranks(MODEL),
    parallel=replace(PLANS["pp 2"].parallel, world_size=4, tp=2, ep=2, sequence_parallel=True),
)
WAYS = (
    ("one rank", "pp 2"),
    ("pp 2", "dp 2 x pp 2 with shards"),
    ("pp 4 with chunks", "one rank"),
    ("dp 2 with shards", "pp 4 with chunks"),
    ("dp 2 x pp 2 with shards", "tp 2 x pp 2, experts over ranks"),
    ("tp 2 x pp 2, experts over ranks", "dp 2 with shards"),
)


def run(plan, function):
    """The figures of all ranks of a plan together."""
    if plan.parallel.world_size == 1:
        return function(ParallelContext.single(dtype=torch.float64))
    return together(on_threads(plan.parallel, function))


def start_and_save(plan, folder):
    """One step, then a checkpoint."""

    def main(context):
        trainer = make_trainer(plan, context)
        state = TrainState()
        run_steps(plan, trainer, state, 1)
        saver = CheckpointSaver(folder, context, say=lambda line: None)
        train_state = state.to_json(build_train_state_config(plan))
        assert saver.save(1, saved_tensors(trainer, optimizer=True), train_state) is not None
        saver.close()
        return {}

    run(plan, main)


def go_on(plan, folder):
    """The figures of two more steps, from the checkpoint."""

    def main(context):
        other_seed = replace(plan, loop=replace(plan.loop, seed=99))
        trainer = make_trainer(other_seed, context)
        source = find(CheckpointConfig(save=folder), context, say=lambda line: None)
        assert source is not None
        loaded = load(source, saved_tensors(trainer, optimizer=True), context)
        trainer.restored(with_optimizer=True)
        trainer.loop = plan.loop
        return comparable(run_steps(plan, trainer, TrainState.from_json(loaded.train_state), 2))

    return run(plan, main)


def comparable(figures):
    """What every rank has whole: neither gradients nor weights, but what follows from them."""
    return {name: value for name, value in figures.items() if name.split()[0] in ("loss", "metric") or "norm " in name}


@pytest.fixture(scope="module")
def expected():
    """Three steps of one rank without a stop; the figures of the last two."""
    trainer = make_trainer(PLAN, ParallelContext.single(dtype=torch.float64))
    state = TrainState()
    run_steps(PLAN, trainer, state, 1)
    return comparable(run_steps(PLAN, trainer, state, 2))


@pytest.mark.parametrize("writer, reader", WAYS)
def test_what_any_layout_writes_every_layout_goes_on_from(writer, reader, tmp_path, expected):
    start_and_save(PLANS[writer], tmp_path)
    assert verify(tmp_path / "iter_0000001") == []
    FP64_LAYOUT.check_all(go_on(PLANS[reader], tmp_path), expected, f"written by {writer}, read by {reader}")


def test_every_logical_tensor_is_written_once_with_its_global_shape(tmp_path):
    start_and_save(PLANS["one rank"], tmp_path / "one")
    start_and_save(PLANS["dp 2 x pp 2 with shards"], tmp_path / "four")
    shapes = []
    for folder in (tmp_path / "one", tmp_path / "four"):
        manifest = decode((folder / "iter_0000001" / "manifest.json").read_bytes())
        shapes.append({key: (entry.dtype, entry.shape) for key, entry in manifest.tensors.items()})
    assert shapes[0] == shapes[1]
    assert sum("word_embeddings" in key for key in shapes[0]) == 3
