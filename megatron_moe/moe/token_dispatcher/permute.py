"""From a routing to rows: which row of the expert-sorted order holds which token, and which expert owns which row."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_moe.kernels.ops import Kernels, RowIndex
from megatron_moe.moe.token_dispatcher.base import Routing


def index_rows(routing: Routing, kernels: Kernels) -> tuple[RowIndex, Tensor]:
    """The rows of a routing, sorted by expert and then by token, and the probability of each [R].

    R is known to the host: T * K (T * E in the dense form), or E * capacity when experts are padded to their capacity.
    """
    if routing.map_TE is not None:
        assert routing.ids_TK is None and routing.probs_TE is not None, "a routing is sparse or dense"
        index = kernels.sort_rows_dense(routing.map_TE, routing.map_TE.numel(), routing.capacity)
        return index, kernels.gather_probs(routing.probs_TE, index)
    assert routing.ids_TK is not None and routing.probs_TK is not None, "a routing is sparse or dense"
    index = kernels.sort_rows(routing.ids_TK, routing.num_experts, routing.capacity)
    return index, kernels.gather_probs(routing.probs_TK, index)


def first_rows(index: RowIndex, num_rows: int) -> RowIndex:
    """The index of the first rows alone; those left out hold nothing."""
    return replace(index, token_R=index.token_R[:num_rows], choice_R=index.choice_R[:num_rows])


def expert_of_rows(offsets_e: Tensor, num_rows: int) -> Tensor:
    """int64 [R]: the expert that owns each row; e for rows past the last offset."""
    rows = torch.arange(num_rows, device=offsets_e.device, dtype=offsets_e.dtype)
    return torch.searchsorted(offsets_e, rows, right=True)
