"""Paged rows: pages are freed in any order, and the Triton kernels equal the reference."""

import random

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.pages import NO_ROOM, NONE, Pages, make_pages
from megatron_moe.kernels.reference import backend as reference
from tests.helpers.kernel_comparison import draw
from tests.helpers.tolerances import EXACT

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # numpy, of the interpreter
ROWS, WIDTH, PAGE = 22, 5, 4
BACKENDS = {"reference": reference, "triton": triton_kernels}


def make(number: int, num_host: int = 0) -> Pages:
    host = torch.zeros((num_host + 1) * PAGE * WIDTH) if num_host else None
    return make_pages(number, PAGE, WIDTH, dtype=torch.float32, device=torch.device("cpu"), host=host)


def rows(seed: int) -> Tensor:
    return draw(ROWS, WIDTH, seed=seed).float()


def count(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int32)


@pytest.mark.parametrize("num_host", [0, 5, 11, 17])
@pytest.mark.parametrize("name", BACKENDS)
def test_pages_are_freed_in_any_order_without_overwriting_others(name: str, num_host: int) -> None:
    kernels, pages, order = BACKENDS[name], make(17 - num_host, num_host), random.Random(1)
    waiting: list[tuple[Tensor, int, int]] = []
    for number in range(40):
        if len(waiting) == 3:
            table, used, seed = waiting.pop(order.randrange(3))
            got = kernels.unpack_rows(table, ROWS, pages)
            assert got.shape == (ROWS, WIDTH)
            EXACT.check(got[:used], rows(seed)[:used], f"rows {seed}")
            kernels.free_pages(table, pages)
        used = order.randrange(ROWS)
        waiting.append((kernels.pack_rows(rows(number), count(used), pages), used, number))
        held = [page for table, *_ in waiting for page in table.tolist() if page >= 0]
        assert len(set(held)) == len(held) == sum(-(-used // PAGE) for _, used, _ in waiting)
    assert not pages.overflowed


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_without_a_page_are_restored_as_nan(name: str) -> None:
    kernels, pages = BACKENDS[name], make(5)
    first = kernels.pack_rows(rows(0), count(13), pages)
    assert first.tolist() == [0, 1, 2, 3, NONE, NONE] and not pages.overflowed
    second = kernels.pack_rows(rows(1), count(8), pages)
    assert second.tolist() == [NO_ROOM, NO_ROOM, NONE, NONE, NONE, NONE] and pages.overflowed
    assert kernels.unpack_rows(second, ROWS, pages)[:8].isnan().all()
    third = kernels.pack_rows(rows(2), count(4), pages)
    for table in (second, first):
        kernels.free_pages(table, pages)
    fourth = kernels.pack_rows(rows(3), count(16), pages)
    EXACT.check(kernels.unpack_rows(third, ROWS, pages)[:4], rows(2)[:4], "the page that was left")
    EXACT.check(kernels.unpack_rows(fourth, ROWS, pages)[:16], rows(3)[:16], "pages of a refused table are not freed")


@pytest.mark.parametrize("name", BACKENDS)
def test_zero_rows_allocate_no_page(name: str) -> None:
    """Covers a rank whose experts receive no token."""
    kernels, pages = BACKENDS[name], make(5)
    table = kernels.pack_rows(rows(0)[:0], count(0), pages)
    assert kernels.unpack_rows(table, 0, pages).shape == (0, WIDTH)
    kernels.free_pages(table, pages)
    assert pages.ends.tolist() == make(5).ends.tolist() and not pages.overflowed


@pytest.mark.parametrize("name", BACKENDS)
def test_host_pages_are_used_while_no_device_page_is_free(name: str) -> None:
    kernels, pages = BACKENDS[name], make(3, 4)
    first = kernels.pack_rows(rows(0), count(8), pages)
    second = kernels.pack_rows(rows(1), count(12), pages)
    assert first.tolist()[:2] == [0, 1] and second.tolist()[:3] == [2, 3, 4] and not pages.overflowed
    EXACT.check(pages.host_QLW[:2].flatten(0, 1), rows(1)[PAGE : 3 * PAGE], "contents of the host pages")
    kernels.free_pages(first, pages)
    third = kernels.pack_rows(rows(2), count(16), pages)
    assert third.tolist()[:4] == [0, 1, 5, 6], "device pages first"
    fourth = kernels.pack_rows(rows(3), count(4), pages)
    assert fourth[0] == NO_ROOM and pages.overflowed
    for table, seed, used in ((second, 1, 12), (third, 2, 16)):
        EXACT.check(kernels.unpack_rows(table, ROWS, pages)[:used], rows(seed)[:used], f"rows {seed}")


@pytest.mark.parametrize("num_host", [0, 4, 9])
def test_triton_page_tables_match_the_reference(num_host: int) -> None:
    mine, theirs = make(9 - num_host, num_host), make(9 - num_host, num_host)
    tables: list[tuple[Tensor, Tensor]] = []
    for number, used in enumerate((5, 0, 22, 16, 1, 9)):
        view = torch.cat([rows(number), rows(9)], dim=1)[:, :WIDTH]  # rows with gaps between them
        both = ((triton_kernels, mine), (reference, theirs))
        tables.append(tuple(kernels.pack_rows(view, count(used), pages) for kernels, pages in both))
        EXACT.check(*tables[-1], f"table {number}")
        if number in (1, 3, 4):
            for (kernels, pages), table in zip(both, tables.pop(0), strict=True):
                kernels.free_pages(table, pages)
        EXACT.check(mine.ends, theirs.ends, f"ends {number}")
        EXACT.check(mine.free_P[:9], theirs.free_P[:9], f"free pages {number}")
        EXACT.check(mine.overflowed, theirs.overflowed, f"overflow {number}")
