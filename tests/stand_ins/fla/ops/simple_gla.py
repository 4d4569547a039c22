"""Stand-in of `fla.ops.simple_gla`, which needs equally many heads for q, k and v."""

from torch import Tensor

from fla.ops._recurrence import recurrence


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, None]:
    assert q.shape[:3] == k.shape[:3] == v.shape[:3] == g.shape
    return recurrence(q, k, v, g, None, scale, False, cu_seqlens), None
