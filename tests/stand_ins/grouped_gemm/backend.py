"""Stand-in of grouped-gemm's GEMM: batch sizes are int64 on the host; with trans_a, the result of an empty batch is
undefined."""

import torch
from torch import Tensor


def gmm(
    a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False, c: Tensor | None = None
) -> Tensor:
    assert not (trans_a and trans_b) and batch_sizes.device.type == "cpu" and batch_sizes.dtype is torch.int64
    assert a.dtype is torch.bfloat16 and a.is_contiguous() and int(batch_sizes.sum()) == len(a) > 0
    if trans_a:
        out = a.new_full((len(batch_sizes), a.shape[1], b.shape[1]), float("nan"))
        for i, (x, y) in enumerate(zip(a.split(batch_sizes.tolist()), b.split(batch_sizes.tolist()), strict=True)):
            if len(x):
                out[i] = (x.float().T @ y.float()).to(a.dtype)
        return out
    parts = [
        (x.float() @ (w.T if trans_b else w).float()).to(a.dtype)
        for x, w in zip(a.split(batch_sizes.tolist()), b, strict=True)
    ]
    return torch.cat(parts)
