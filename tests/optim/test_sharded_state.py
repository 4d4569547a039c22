"""Sharded optimizer state in checkpoints: a checkpoint of any layout loads into any other layout, bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_moe.checkpoint.load import find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import TensorShard, tensor_key
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.param_meta import sharded_dim
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter
from tests.helpers.optim_parameters import BF16, FP64
from tests.helpers.optim_ranks import make_optimizer, run
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

ZERO = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=100)
PLAIN = DataParallelConfig()
DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}


def tensors(optimizer: Optimizer) -> dict[str, TensorShard]:
    """Returns this rank's shards of weights and optimizer state by their keys in a checkpoint."""

    def saved(parameter: Parameter, data: Tensor, start: int = 0) -> TensorShard:
        dim = sharded_dim(parameter.meta) or 0
        return TensorShard.part(parameter.global_shape, parameter.boxes, dim, data, start)

    main_grads = optimizer.buffers.main_grads
    found = {tensor_key("model", each.name): saved(each.parameter, each.parameter.data.view(-1)) for each in main_grads}
    for state in optimizer.named_state():
        found[tensor_key(state.kind, state.name)] = saved(state.parameter, state.data, state.start)
    found[tensor_key("optimizer", "step_count")] = TensorShard.whole(optimizer.step_count)
    return found


def save(optimizer: Optimizer, folder: Path) -> None:
    saver = CheckpointSaver(folder, optimizer.buffers.context, say=lambda _: None)
    assert saver.save(1, tensors(optimizer), {}) is not None
    saver.close()


def restored(
    context: ParallelContext, config: DataParallelConfig, precision: PrecisionConfig, folder: Path
) -> Optimizer:
    optimizer = make_optimizer(context, config, precision)
    for buffer in optimizer.buffers.buffers:
        for _, weight in buffer.views(buffer.weights):
            weight.fill_(9.0)
    source = find_checkpoint(CheckpointConfig(save=folder), context)
    load_checkpoint(source, tensors(optimizer), context)
    optimizer.weights_from_masters()
    return optimizer


def all_state(optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Assembles the whole weights, moments and master weights from the shards of all ranks."""
    wholes: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for key, tensor in tensors(optimizer).items():
            whole = wholes.setdefault(key, torch.full(tensor.shape, 77, dtype=tensor.dtype))
            for box in tensor.boxes:
                whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.data.shape, strict=True))] = box.data
    return wholes


LAYOUTS = (
    (ParallelConfig(world_size=2), ZERO),
    (ParallelConfig(), PLAIN),
    (ParallelConfig(world_size=4), ZERO),
    (ParallelConfig(world_size=4, tp=2, ep=2), ZERO),
    (ParallelConfig(world_size=8, tp=2, pp=2, ep=2, etp=2), ZERO),
    (ParallelConfig(world_size=3), PLAIN),
)


@pytest.mark.parametrize("precision", [FP64, BF16], ids=["fp64", "bf16"])
def test_checkpoints_reshard_to_any_layout_without_changing_a_bit(precision: PrecisionConfig, tmp_path: Path) -> None:
    dtype = DTYPES[precision.params]
    first, config = LAYOUTS[0]

    def write(context: ParallelContext) -> Optimizer:
        optimizer = run(context, config, num_steps=2, precision=precision).optimizer
        save(optimizer, tmp_path / "0")
        return optimizer

    expected = all_state(on_threads(first, write, dtype=dtype))
    assert not any((whole == 77).any() for whole in expected.values()), "no rank saves some element"
    for number, (layout, data_parallel) in enumerate(LAYOUTS[1:], start=1):

        def reshard(
            context: ParallelContext, data_parallel: DataParallelConfig = data_parallel, number: int = number
        ) -> Optimizer:
            optimizer = restored(context, data_parallel, precision, tmp_path / str(number - 1))
            save(optimizer, tmp_path / str(number))
            return optimizer

        EXACT.check_all(all_state(on_threads(layout, reshard, dtype=dtype)), expected, f"state in {layout}")
