"""Sizes that Triton kernels share with their fakes: rows, tiles and numbers of programs. Does not import Triton."""

from torch import Tensor

HOPPER_MULTIPROCESSORS = 132
"""Multiprocessors of the GPU (H100, H200) whose memory the fakes have."""
WIDEST_HEAD = 256
"""Largest head dim of the attention kernels."""
NORM_TILE, NORM_PROGRAMS = 8192, 2
"""Elements of a norm's largest tile, and programs of its backward per multiprocessor."""
HEADS_TILE, HEADS_PROGRAMS = 2048, 6
"""Elements of a tile of queries or keys, and programs of the backward per multiprocessor that fit at a time."""
EMBEDDING_ROWS = 16
"""Sorted tokens that a program of an embedding's gradient sums."""
ROUTE_TILE, ROUTE_PROGRAMS = 2048, 4
"""Tokens times columns of a tile of the router's forward in fp32, and programs per multiprocessor: few, because the
last program adds the shares of all."""
GATE_TOKENS, GATE_COLUMNS, GATE_PROGRAMS = 64, 128, 1
"""Tokens and hidden channels of a tile of the gate's backward, and programs per multiprocessor: two do not fit."""
GATE_EXPERTS = 128
"""Most experts of the gate's kernels: the backward keeps the sums of all experts in registers; with more experts
torch's products are faster (docs/experiments.md)."""
SORT_BLOCK, SORT_STRETCHES = 128, 32
"""Choices of a block of the sort, and the most stretches of blocks: every program of the second launch reads the counts
of all stretches."""


def rows_of(x: Tensor) -> Tensor:
    """[..., W] as a matrix [rows, W] with contiguous rows; a copy only where no view is one."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(-1) == 1 or matrix.shape[-1] == 1 else matrix.contiguous()


def power_of_two(number: int) -> int:
    """Smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def norm_programs(num_rows: int, width: int, multiprocessors: int) -> int:
    """Programs of a norm's backward, each with its share of the weight's gradient."""
    rows = max(NORM_TILE // 2 // power_of_two(width), 1)
    return max(min(-(-num_rows // rows), NORM_PROGRAMS * multiprocessors), 1)


def heads_programs(num_tokens: int, tiles: int, multiprocessors: int) -> int:
    """Programs of the backward of `query_key_value` for each of the `tiles` of heads."""
    return min(num_tokens, -(-HEADS_PROGRAMS * multiprocessors // tiles))


def heads_tiles(num_heads: int, groups: int, width: int, rotated: int) -> tuple[int, int]:
    """Query heads and key heads of a tile."""
    rest = power_of_two(width - rotated) if rotated < width else 0
    most = max(HEADS_TILE // power_of_two(2 * power_of_two(rotated // 2) + rest), 1)
    return min(power_of_two(num_heads), most), min(power_of_two(groups), most)


def route_programs(num_tokens: int, sets: int, tile_tokens: int, multiprocessors: int) -> int:
    """Programs of the router's forward, equally many for each of the `sets` of tokens."""
    return sets * max(min(-(-num_tokens // sets // tile_tokens), ROUTE_PROGRAMS * multiprocessors // sets), 1)


def gate_stretches(num_tokens: int, column_tiles: int, multiprocessors: int) -> int:
    """Programs of the gate's backward that share the tokens, for each tile of columns."""
    return max(min(GATE_PROGRAMS * multiprocessors // column_tiles, -(-num_tokens // GATE_TOKENS)), 1)


def sort_blocks(num_choices: int) -> tuple[int, int]:
    """(blocks of the sort, blocks of each stretch)"""
    num_blocks = -(-num_choices // SORT_BLOCK)
    return num_blocks, -(-num_blocks // SORT_STRETCHES)
