"""Batches on a GPU: same values as on the CPU, without host-device synchronisation."""

import numpy as np
import pytest
import torch

from megatron_moe.data.batch import MaskConfig, make_microbatch, to_device
from megatron_moe.data.datasets import MockTokens
from megatron_moe.data.samples import DocumentSamples, SampleRequest
from tests.gpu.host_sync import no_host_sync

pytestmark = pytest.mark.gpu1


def test_batches_are_copied_without_host_sync() -> None:
    source = MockTokens(vocab_size=1000, eod=999, num_documents=100_000)
    wanted = SampleRequest(documents=range(2000), split="train", seq_length=1024, num_samples=None, seed=1)
    masks = MaskConfig(vocab_size=1000, eod=999, pad=998, reset_position_ids=True, reset_attention_mask=True)
    made = make_microbatch(DocumentSamples(source, "mock", wanted, None), np.arange(8), masks, torch.float32)
    device = torch.device("cuda", torch.cuda.current_device())
    with no_host_sync():
        moved = to_device(made, device)
    assert to_device(moved, device) is moved
    pairs = [
        (moved.tokens_BS, made.tokens_BS),
        (moved.labels_BS, made.labels_BS),
        (moved.loss_mask_BS, made.loss_mask_BS),
        (moved.context.tokens.positions_BS, made.context.tokens.positions_BS),
        (moved.context.tokens.segments_BS, made.context.tokens.segments_BS),
        (moved.context.tokens.valid_BS, made.context.tokens.valid_BS),
    ]
    for on_device, on_host in pairs:
        assert on_device is not None and on_host is not None
        assert on_device.device == device
        assert torch.equal(on_device.cpu(), on_host)
