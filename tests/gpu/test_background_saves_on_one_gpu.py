"""Asynchronous saves from a GPU: tensors are copied to pinned memory with their values at the time of the call."""

import time
from pathlib import Path

import pytest
import torch

from megatron_moe.checkpoint.async_save import HostBuffer
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import TensorBox, TensorShard
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.tolerances import EXACT

pytestmark = pytest.mark.gpu1


def tensors(num_bytes: int) -> dict[str, TensorShard]:
    base = torch.randn(num_bytes // 4 // 1024, 1024, device="cuda")
    half = torch.randn(1024, 2048, device="cuda").bfloat16()
    boxes = (TensorBox((0, 0), half[:512]), TensorBox((512, 0), half[512:]))
    step = TensorShard.whole(torch.tensor(3, device="cuda"))
    return {"master.a": TensorShard.whole(base), "model.b": TensorShard((1024, 2048), boxes), "optimizer.step": step}


def test_host_copy_is_pinned_fast_and_consistent() -> None:
    state = tensors(1 << 30)
    buffer = HostBuffer()
    buffer.copy(state)
    expected = state["master.a"].boxes[0].data.cpu()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    taken = buffer.copy(state)
    seconds = time.perf_counter() - begin
    state["master.a"].boxes[0].data.zero_()
    assert taken["master.a"].boxes[0].data.is_pinned()
    EXACT.check(taken["master.a"].boxes[0].data, expected, "the copy")
    EXACT.check(taken["model.b"].boxes[1].data, state["model.b"].boxes[1].data.cpu(), "a box")
    print(f"copy to host: {(1 << 30) / 1e9 / seconds:.1f} GB/s")
    buffer.release()
    assert not taken["master.a"].boxes[0].data.is_pinned()


def test_background_save_writes_the_files_of_a_plain_save(tmp_path: Path) -> None:
    context = ParallelContext.single(device="cuda")
    state = tensors(1 << 26)
    plain, background = CheckpointSaver(tmp_path / "a", context), CheckpointSaver(tmp_path / "b", context)
    assert plain.save(1, state, {}) is not None
    assert background.start(1, state, {}) is None
    for tensor in state.values():
        for box in tensor.boxes:
            box.data.zero_()
    saved = background.wait()
    assert saved is not None and plain.last is not None
    for path in (tmp_path / "a" / "iter_0000001").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / "iter_0000001" / path.name).read_bytes(), path.name
    print(f"plain save {plain.last.seconds:.2f} s, in the background it blocked {saved.blocked_seconds:.3f} s")
