"""Stand-in for `deep_ep.HybridEPBuffer` of the branch hybrid-ep: its names, parameters, checks and layout rules.

Differences: any floating dtype, on the CPU, by collectives of the process group; the handle's fields are other tensors.
"""

import torch
import torch.distributed as dist
from torch import Tensor

TOKENS_PER_CHUNK = 64
HANDLE_FIELDS = 11


class HybridEPBuffer:
    """Communication buffer of a group, shared by dispatch and combine."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
    ) -> None:
        assert not use_fp8, "not in this stand-in"
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.fused: list[bool] = []
        """For every call, whether it sorts rows in the kernels that send and receive them."""
        self.settings = {
            "num_sms_dispatch_api": num_sms_dispatch_api,
            "num_sms_combine_api": num_sms_combine_api,
            "num_sms_preprocessing_api": num_sms_preprocessing_api,
            "num_blocks_permute": num_blocks_permute,
            "num_blocks_unpermute": num_blocks_unpermute,
        }

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Tensor, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
    ) -> tuple[Tensor, Tensor | None, None, Tensor, tuple[Tensor, ...]]:
        assert topk_idx is None and not use_fp8 and scaling_factor is None and pad_multiple is None, "not here"
        assert hidden.dim() == 2 and hidden.shape[0] % TOKENS_PER_CHUNK == 0
        self.fused.append(fuse_permute_dispatch)
        assert not non_blocking or num_permuted_tokens is not None, "num_permuted_tokens is required"
        if handle is None:
            assert routing_map is not None and routing_map.dtype is torch.bool and len(routing_map) == len(hidden)
            assert num_of_experts_per_rank is not None
            assert routing_map.shape[1] == num_of_experts_per_rank * self.group_size
            handle = self._layout(routing_map, num_of_experts_per_rank, num_permuted_tokens)
        assert len(handle) == HANDLE_FIELDS, "a handle of dispatch_with_permute"
        tokens_R, experts_R, counts_e, *_ = handle
        num_rows = len(tokens_R) if num_permuted_tokens is None else num_permuted_tokens
        rows = torch.full((num_rows, hidden.shape[1]), torch.nan, dtype=hidden.dtype)
        rows[: len(tokens_R)] = self._gather(hidden)[tokens_R]
        if probs is None:
            return rows, None, None, counts_e, handle
        assert probs.shape == (len(hidden), self.group_size * len(counts_e))
        held = torch.full((num_rows,), torch.nan, dtype=probs.dtype)
        held[: len(tokens_R)] = self._gather(probs)[tokens_R, self.rank * len(counts_e) + experts_R]
        return rows, held, None, counts_e, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Tensor, ...] | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        assert handle is not None and len(handle) == HANDLE_FIELDS, "a handle of dispatch_with_permute"
        self.fused.append(fuse_unpermute_combine)
        tokens_R, experts_R, counts_e, num_tokens, *_ = handle
        total = int(num_tokens) * self.group_size
        sums = torch.zeros(total, hidden.shape[1], dtype=hidden.dtype)
        sums.index_add_(0, tokens_R, hidden[: len(tokens_R)])
        if probs is None:
            return self._sum(sums), None
        assert probs.shape == (len(hidden),)
        dense = torch.zeros(total, self.group_size * len(counts_e), dtype=probs.dtype)
        dense[tokens_R, self.rank * len(counts_e) + experts_R] = probs[: len(tokens_R)]
        return self._sum(sums), self._sum(dense)

    def _layout(self, routing_map: Tensor, num_local: int, bound: int | None) -> tuple[Tensor, ...]:
        """(source token and local expert of each row, rows per local expert, tokens per rank, ..., overflow flag)."""
        mine = self._gather(routing_map)[:, self.rank * num_local :][:, :num_local]
        experts_R, tokens_R = mine.T.nonzero(as_tuple=True)
        overflow = torch.tensor(bound is not None and len(tokens_R) > bound)
        tokens_R, experts_R = tokens_R[:bound], experts_R[:bound]
        counts_e = torch.bincount(experts_R, minlength=num_local)
        unused = (torch.empty(0),) * (HANDLE_FIELDS - 5)
        return tokens_R, experts_R, counts_e, torch.tensor(len(routing_map)), *unused, overflow

    def _gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.group_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts)

    def _sum(self, partial: Tensor) -> Tensor:
        """Sum over ranks of the rows of this rank's tokens."""
        parts = self._gather(partial).view(self.group_size, self.group_size, -1, partial.shape[1])
        return parts[:, self.rank].sum(dim=0)
