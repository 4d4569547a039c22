"""Logits and the loss of every token."""

import torch

from megatron_moe.kernels import reference
from megatron_moe.model.head import Head
from megatron_moe.model.init import init_parameters
from megatron_moe.parallel.context import ParallelContext
from tests.tiny_models import HIDDEN, UNIT_GAIN, VOCAB, microbatch, model_spec, randn
from tests.tolerances import FP64_REF


def test_the_loss_of_a_token_is_minus_the_log_of_its_labels_share():
    head = Head(model_spec(head_bias=True), ParallelContext.single(), reference.bundle())
    init_parameters(head, 5, UNIT_GAIN)
    hidden_SBH, labels_BS = randn(4, 2, HIDDEN), microbatch(2, 4).labels_BS
    loss_BS = head.loss(head(hidden_SBH), labels_BS)
    assert loss_BS.shape == (2, 4)
    for b in range(2):
        for s in range(4):
            scores = torch.exp(head.weight @ hidden_SBH[s, b] + head.bias)
            FP64_REF.check(loss_BS[b, s], -torch.log(scores[labels_BS[b, s]] / scores.sum()), f"token {b}, {s}")


def test_a_tied_head_has_no_matrix_of_its_own():
    head = Head(model_spec(tied_embeddings=True), ParallelContext.single(), reference.bundle())
    assert not list(head.parameters())
    untied = Head(model_spec(), ParallelContext.single(), reference.bundle())
    assert untied.weight.shape == (VOCAB, HIDDEN)
    assert untied.weight.meta.role == "head"


def test_the_loss_of_a_bf16_model_is_fp32():
    head = Head(model_spec(), ParallelContext.single(dtype=torch.bfloat16), reference.bundle())
    init_parameters(head, 5, UNIT_GAIN)
    hidden_SBH = randn(4, 2, HIDDEN).bfloat16()
    logits_SBV = head(hidden_SBH)
    assert logits_SBV.dtype == torch.bfloat16
    assert head.loss(logits_SBV, microbatch(2, 4).labels_BS).dtype == torch.float32
