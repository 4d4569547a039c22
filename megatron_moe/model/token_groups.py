"""Computes the entries of compressed attention, which are weighted means of the tokens of a group.

A group has `ratio` consecutive tokens of a document; tokens at the end of a document that do not fill a group belong to
none. With gates z and values v of its tokens, an entry is sum_j softmax_j(z_j + ape_j) v_j, for each channel. If groups
overlap, z and v have two parts: the second is used by the token's own group, the first by the group after it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.kernels.ops import internal_dtype


@dataclass(frozen=True)
class TokenGroups:
    """Division of a microbatch's sequences into groups of `ratio` tokens, E groups per sequence."""

    ratio: int
    ends_BE: Tensor
    """Position in the sequence of each group's last token, int64 [B or 1, E]; the length of the sequence if there are
    fewer than E groups."""
    first_BE: Tensor
    """Whether the group is the first of its document, bool [B or 1, E]."""
    segments_BS: Tensor | None
    """Document ids; None if every sequence is one document."""

    @classmethod
    def of(cls, ratio: int, seq: int, segments_BS: Tensor | None, device: torch.device) -> "TokenGroups":
        """Divides sequences of `seq` tokens into groups of `ratio` consecutive tokens that cross no document
        boundary."""
        number, positions_S = seq // ratio, torch.arange(seq, device=device)
        if segments_BS is None:
            ends_1E = positions_S[: number * ratio].view(1, number, ratio)[..., -1]
            return cls(ratio, ends_1E, ends_1E < ratio, None)
        starts = torch.ones_like(segments_BS, dtype=torch.bool)
        starts[:, 1:] = segments_BS[:, 1:] != segments_BS[:, :-1]
        in_document_BS = positions_S - torch.where(starts, positions_S, 0).cummax(dim=1).values
        is_end_BS = in_document_BS % ratio == ratio - 1
        index_BS = torch.where(is_end_BS, is_end_BS.cumsum(dim=1) - 1, number)
        ends_BE = index_BS.new_full((len(segments_BS), number + 1), seq)
        ends_BE = ends_BE.scatter(1, index_BS, positions_S.expand_as(index_BS))[:, :number]
        first_BE = in_document_BS.gather(1, ends_BE.clamp(max=seq - 1)) < ratio
        return cls(ratio, ends_BE, first_BE, segments_BS)

    def visible(self, positions_C: Tensor) -> Tensor:
        """Whether queries at these positions see each entry: bool [B or 1, C, E]. They see entries of their document
        whose last token is at or before the query."""
        seen = self.ends_BE[:, None] <= positions_C[:, None]
        if self.segments_BS is None:
            return seen
        last = self.segments_BS.shape[1] - 1
        of_entries = self.segments_BS.gather(1, self.ends_BE.clamp(max=last))
        return seen & (self.segments_BS[:, positions_C, None] == of_entries[:, None])

    def first_token_values(self, values_BS: Tensor) -> Tensor:
        """Selects the values of each group's first token, [B, E]."""
        tokens_BE = self._tokens(values_BS.shape[1])[..., 0]
        return values_BS.gather(1, tokens_BE.expand(len(values_BS), -1))

    def tokens(self, x_SBC: Tensor) -> Tensor:
        """Gathers the values of each group's tokens, [E, B, ratio, C]."""
        if self.segments_BS is None:
            number = self.ends_BE.shape[1]
            return x_SBC[: number * self.ratio].unflatten(0, (number, self.ratio)).transpose(1, 2)
        return self._gathered(x_SBC, 0)

    def tokens_of_preceding_groups(self, x_SBC: Tensor) -> Tensor:
        """Gathers the values of the tokens of each group's preceding group, [E, B, ratio, C]; undefined for the first
        group of a document."""
        if self.segments_BS is None:
            own = self.tokens(x_SBC)
            return torch.cat([own[:1], own[:-1]])
        return self._gathered(x_SBC, self.ratio)

    def _gathered(self, x_SBC: Tensor, back: int) -> Tensor:
        tokens_EBR = self._tokens(len(x_SBC), back).transpose(0, 1)
        batch_B1 = torch.arange(x_SBC.shape[1], device=x_SBC.device)[:, None]
        return x_SBC[tokens_EBR, batch_B1]

    def _tokens(self, seq: int, back: int = 0) -> Tensor:
        """Positions of each group's tokens minus `back`, [B or 1, E, ratio], within the sequence."""
        offsets_R = torch.arange(1 - self.ratio, 1, device=self.ends_BE.device) - back
        return (self.ends_BE[..., None] + offsets_R).clamp(0, seq - 1)


def entries(values_SBC: Tensor, gates_SBC: Tensor, ape_RC: Tensor, groups: TokenGroups, width: int) -> Tensor:
    """Computes the groups' entries [E, B, width] from the tokens' values and gates, which have `width` channels, or
    twice as many if groups overlap. Computed in the internal dtype."""
    wide = internal_dtype(values_SBC.dtype)
    values, gates = groups.tokens(values_SBC).to(wide), groups.tokens(gates_SBC).to(wide) + ape_RC.to(wide)
    if values_SBC.shape[-1] > width:
        values_before = groups.tokens_of_preceding_groups(values_SBC[..., :width]).to(wide)
        gates_before = groups.tokens_of_preceding_groups(gates_SBC[..., :width]).to(wide) + ape_RC[:, :width].to(wide)
        gates_before = gates_before.masked_fill(groups.first_BE.T[..., None, None], -torch.inf)
        values = torch.cat([values_before, values[..., width:]], dim=2)
        gates = torch.cat([gates_before, gates[..., width:]], dim=2)
    return (values * gates.softmax(dim=2)).sum(dim=2).to(values_SBC.dtype)
