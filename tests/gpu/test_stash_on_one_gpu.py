"""Paged stash on a GPU: compiled kernels equal the reference, can be captured, and do not synchronise with the host."""

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.pages import Pages, make_pages
from megatron_moe.kernels.reference import backend as reference
from tests.gpu.host_sync import no_host_sync
from tests.helpers.tolerances import EXACT

pytestmark = pytest.mark.gpu1

GPU, CPU = torch.device("cuda"), torch.device("cpu")
ROWS, WIDTH, PAGE = 5000, 1536, 64


def pages(number: int, device: torch.device, num_host: int = 0) -> Pages:
    host = torch.zeros((num_host + 1) * PAGE * WIDTH, dtype=torch.bfloat16, pin_memory=device == GPU)
    return make_pages(number, PAGE, WIDTH, dtype=torch.bfloat16, device=device, host=host)


def rows(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def count(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int32)


@pytest.mark.parametrize("num_host", [0, 40])
def test_compiled_page_kernels_match_the_reference(num_host: int) -> None:
    mine, theirs = pages(60 - num_host, GPU, num_host), pages(60 - num_host, CPU, num_host)
    waiting: list[tuple[Tensor, Tensor, int, int]] = []
    for number, used in enumerate((1000, 1, 0, 2000, 640, 641, 3000, 900)):
        given = rows(number)
        table = triton_kernels.pack_rows(given.cuda(), count(used).cuda(), mine)
        expected = reference.pack_rows(given, count(used), theirs)
        EXACT.check(table.cpu(), expected, f"table {number}")
        waiting.append((table, expected, used, number))
        if number % 3 == 2:  # frees a table in the middle of the queue, neither the oldest nor the newest
            old, same, kept, which = waiting.pop(len(waiting) // 2)
            got = triton_kernels.unpack_rows(old, ROWS, mine)[:kept].cpu()
            EXACT.check(got, rows(which)[:kept], f"rows {which}")
            triton_kernels.free_pages(old, mine)
            reference.free_pages(same, theirs)
        EXACT.check(mine.ends.cpu(), theirs.ends, "ends")
        assert bool(mine.overflowed) == bool(theirs.overflowed), number
    assert bool(mine.overflowed)
    lost = triton_kernels.unpack_rows(waiting[-1][0], ROWS, mine)[: waiting[-1][2]]
    assert bool(torch.isnan(lost).all()) == bool((waiting[-1][1] < -1).any())


@pytest.mark.parametrize("num_host", [0, 120])
def test_captured_graph_allocates_and_frees_pages_at_every_replay(num_host: int) -> None:
    ours, given, used = pages(200 - num_host, GPU, num_host), rows(0).cuda(), count(700).cuda()

    def there_and_back() -> Tensor:
        table = triton_kernels.pack_rows(given, used, ours)
        other = triton_kernels.pack_rows(given, used, ours)
        result = triton_kernels.unpack_rows(table, ROWS, ours)
        triton_kernels.free_pages(table, ours)
        triton_kernels.free_pages(other, ours)
        return result

    there_and_back()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = there_and_back()
    with no_host_sync():
        for number in range(1, 30):
            given.copy_(rows(number).pin_memory(), non_blocking=True)
            used.fill_(100 * number)
            graph.replay()
    EXACT.check(result[:2900].cpu(), rows(29)[:2900], "rows of the last replay")
    assert not bool(ours.overflowed)
    assert ours.ends.view(2, 2).diff().flatten().tolist() == [200 - num_host, num_host], "all pages are free again"
    assert sorted(ours.free_P[:200].tolist()) == list(range(200))
