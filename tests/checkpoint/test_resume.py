"""Resuming from a checkpoint is bitwise identical to an uninterrupted run."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_moe.checkpoint.load import find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import TensorShard, tensor_key
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.optim.clip_grads import clip_coefficient, gradient_norms
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import finish_grads
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.optim_parameters import BF16, FP32, make_buffers, make_gradients, make_parameters, set_grads
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT


class Run:
    """Training run whose gradients depend only on the iteration."""

    def __init__(self, precision: PrecisionConfig, context: ParallelContext, *, seed: int) -> None:
        dtype = torch.bfloat16 if precision is BF16 else torch.float32
        self.context = context
        self.parameters = make_parameters(dtype, seed=seed)
        self.buffers = make_buffers(self.parameters, precision, context, optimizer=OptimizerConfig(clip_grad=0.5))
        self.optimizer = Optimizer(self.buffers, precision)

    def train(self, first: int, last: int) -> None:
        for iteration in range(first, last):
            set_grads(self.buffers, make_gradients(100 * iteration + self.context.rank))
            finish_grads(self.buffers, self.context)
            scale = clip_coefficient(gradient_norms(self.buffers, self.context)["all"], 0.5)
            self.optimizer.step(lr=0.01, weight_decay=0.1, grad_scale=scale, apply_update=torch.tensor(True))

    def tensors(self) -> dict[str, Tensor]:
        found = {tensor_key("model", name): parameter.detach() for name, parameter in self.parameters.items()}
        found |= {tensor_key(each.kind, each.name): each.whole for each in self.optimizer.named_state()}
        return found | {tensor_key("optimizer", "step_count"): self.optimizer.step_count}

    def saved(self) -> dict[str, TensorShard]:
        return {key: TensorShard.whole(tensor) for key, tensor in self.tensors().items()}


def stopped_and_resumed(precision: PrecisionConfig, folder: Path, context: ParallelContext) -> dict[str, Tensor]:
    first = Run(precision, context, seed=1)
    first.train(0, 4)
    saver = CheckpointSaver(folder, context, say=lambda line: None)
    saver.save(4, first.saved(), {"iteration": 4})
    saver.close()
    second = Run(precision, context, seed=2)
    loaded = load_checkpoint(find_checkpoint(CheckpointConfig(save=folder), context), second.saved(), context)
    second.optimizer.weights_from_masters()
    EXACT.check_all(second.tensors(), first.tensors(), "state after loading")
    second.train(loaded.train_state["iteration"], 8)
    return second.tensors()


def straight_through(precision: PrecisionConfig, context: ParallelContext) -> dict[str, Tensor]:
    run = Run(precision, context, seed=1)
    run.train(0, 8)
    return run.tensors()


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_four_steps_and_four_more_equal_eight_steps_bitwise(tmp_path: Path, precision: PrecisionConfig) -> None:
    context = ParallelContext.single()
    resumed = stopped_and_resumed(precision, tmp_path, context)
    EXACT.check_all(resumed, straight_through(precision, context), "state after eight steps")


def test_two_ranks_resume_bitwise_from_what_the_first_one_wrote(tmp_path: Path) -> None:
    config = ParallelConfig(world_size=2)
    resumed = on_threads(config, lambda context: stopped_and_resumed(BF16, tmp_path, context))
    through = on_threads(config, lambda context: straight_through(BF16, context))
    for rank in range(2):
        EXACT.check_all(resumed[rank], through[rank], f"state of rank {rank}")
