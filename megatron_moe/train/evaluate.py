"""Validation: the mean loss per token over a number of global batches, without gradients, dropout or counters."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from megatron_moe.data.batch import MicroBatch
from megatron_moe.model.gpt import LossOutput, objective
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.train.stage import Pipeline


@torch.no_grad()
def evaluate(pipeline: Pipeline, batches: Iterable[MicroBatch], num_microbatches: int) -> float:
    """Mean `lm loss` over all tokens of all ranks' microbatches; one host read at the end.

    `num_microbatches` at a time pass the pipeline.
    """
    model, context = pipeline.model, pipeline.context
    totals = torch.zeros(2, device=context.device, dtype=torch.float64)

    def take_loss(output: LossOutput, batch: MicroBatch) -> Tensor:
        scalar, sums = objective(output, batch, mtp=None, per_token=True)
        totals.add_(torch.stack([value.double() for value in sums["lm loss"]]))
        return scalar

    model.eval()
    prepared = (replace(b, meta=replace(b.meta, random_key=None, tally=None, training=False)) for b in batches)
    while step := list(islice(prepared, num_microbatches)):
        pipeline.run(step, take_loss)
    model.train()
    # pp, dp_cp: 16 bytes
    all_reduce_(totals, context.group("pp"))
    all_reduce_(totals, context.group("dp_cp"))
    return float(totals[0] / totals[1].clamp(min=1))
