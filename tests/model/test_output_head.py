"""Logits and the loss of every token."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.init import init_parameters
from megatron_moe.model.output_head import Head
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.tiny_models import HIDDEN, UNIT_GAIN, VOCAB, microbatch, model_config, randn
from tests.helpers.tolerances import BF16_KERNEL, FP64_REF


def test_loss_is_the_negative_log_likelihood_of_the_label():
    head = Head(model_config(head_bias=True), ParallelContext.single(), reference.bundle())
    init_parameters(head, 5, UNIT_GAIN)
    hidden_SBH, labels_BS = randn(4, 2, HIDDEN), microbatch(2, 4).labels_BS
    loss_BS = head.loss(head(hidden_SBH), labels_BS)
    assert loss_BS.shape == (2, 4)
    for b in range(2):
        for s in range(4):
            scores = torch.exp(head.weight @ hidden_SBH[s, b] + head.bias)
            FP64_REF.check(loss_BS[b, s], -torch.log(scores[labels_BS[b, s]] / scores.sum()), f"token {b}, {s}")


def test_tied_head_has_no_weight():
    head = Head(model_config(tied_embeddings=True), ParallelContext.single(), reference.bundle())
    assert not list(head.parameters())
    untied = Head(model_config(), ParallelContext.single(), reference.bundle())
    assert untied.weight.shape == (VOCAB, HIDDEN)
    assert untied.weight.meta.role == "head"


def test_loss_of_bf16_logits_is_fp32():
    head = Head(model_config(), ParallelContext.single(dtype=torch.bfloat16), reference.bundle())
    init_parameters(head, 5, UNIT_GAIN)
    hidden_SBH = randn(4, 2, HIDDEN).bfloat16()
    logits_SBV = head(hidden_SBH)
    assert logits_SBV.dtype == torch.bfloat16
    assert head.loss(logits_SBV, microbatch(2, 4).labels_BS).dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_loss_equals_the_whole_loss(chunk, tied):
    outcomes = []
    for config in (model_config(head_bias=True), model_config(head_bias=True, loss_chunk=chunk)):
        head = Head(replace(config, tied_embeddings=tied), ParallelContext.single(), reference.bundle())
        init_parameters(head, 5, UNIT_GAIN)
        hidden_SBH = randn(4, 2, HIDDEN).requires_grad_()
        matrix = randn(VOCAB, HIDDEN, seed=3).requires_grad_() if tied else head.weight
        loss_BS = head(hidden_SBH, matrix if tied else None, labels_BS=microbatch(2, 4).labels_BS)
        outcomes.append(
            [loss_BS, *torch.autograd.grad((loss_BS * randn(2, 4, seed=1)).sum(), [hidden_SBH, matrix, head.bias])]
        )
    for name, plain, chunked in zip(("loss", "hidden", "matrix", "bias"), *outcomes, strict=True):
        FP64_REF.check(chunked, plain, name)


class Later:
    """Gradient accumulator that defers its computations."""

    def __init__(self, grad):
        self.grad, self.waiting = grad, []

    def add(self, compute):
        self.waiting.append(compute)


def test_chunked_loss_accumulates_its_weight_gradient_in_the_deferred_accumulator():
    gradients = []
    for chunk in (None, 3):
        head = Head(model_config(loss_chunk=chunk), ParallelContext.single(), reference.bundle())
        init_parameters(head, 5, UNIT_GAIN)
        head.weight.grad_accumulator = Later(torch.ones_like(head.weight.data))
        hidden_SBH = randn(4, 2, HIDDEN).requires_grad_()
        head(hidden_SBH, labels_BS=microbatch(2, 4).labels_BS).sum().backward()
        (compute,) = head.weight.grad_accumulator.waiting
        compute(head.weight.grad_accumulator.grad, True)
        gradients.append((hidden_SBH.grad, head.weight.grad_accumulator.grad))
    for name, plain, chunked in zip(("hidden", "matrix"), *gradients, strict=True):
        FP64_REF.check(chunked, plain, name)


def test_bf16_chunks_are_accumulated_in_fp32():
    gradients = []
    for chunk in (None, 1):
        head = Head(model_config(loss_chunk=chunk), ParallelContext.single(dtype=torch.bfloat16), reference.bundle())
        init_parameters(head, 5, UNIT_GAIN)
        head(randn(64, 2, HIDDEN).bfloat16(), labels_BS=microbatch(2, 64).labels_BS).sum().backward()
        gradients.append(head.weight.grad)
    BF16_KERNEL.check(gradients[1], gradients[0], "matrix")
