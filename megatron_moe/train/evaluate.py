"""Validation: the mean loss per token over a number of global batches, without gradients, dropout or counters."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from megatron_moe.data.batch import MicroBatch
from megatron_moe.model.gpt import GPT, objective
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext


@torch.no_grad()
def evaluate(model: GPT, batches: Iterable[MicroBatch], context: ParallelContext) -> float:
    """Mean `lm loss` over all tokens of all ranks' microbatches; one host read at the end."""
    model.eval()
    totals = torch.zeros(2, device=context.device, dtype=torch.float64)
    for batch in batches:
        batch = replace(batch, meta=replace(batch.meta, random_key=None, tally=None, training=False))
        _, sums = objective(model(batch), batch, mtp=None, per_token=True)
        totals += torch.stack([value.double() for value in sums["lm loss"]])
    model.train()
    # dp_cp: 16 bytes
    all_reduce_(totals, context.group("dp_cp"))
    return float(totals[0] / totals[1].clamp(min=1))
