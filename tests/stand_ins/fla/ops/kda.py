"""Stand-in of `fla.ops.kda`."""

from torch import Tensor

from fla.ops._recurrence import recurrence


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    assert g.shape == (*v.shape[:3], k.shape[-1]) and beta.shape == v.shape[:3]
    return recurrence(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, cu_seqlens), None
