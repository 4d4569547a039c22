"""Placement of layers on pipeline stages (`--pipeline-model-parallel-layout` and its defaults)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final

from megatron_moe.config.text import counted


@dataclass(frozen=True)
class StageMap:
    """Round-robin mapping of stages to ranks: chunk c of rank r is stage c * pp + r (arXiv 2104.04473 section 2.2)."""

    pp: int = 1
    vpp: int = 1
    """Model chunks per rank."""

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp

    def stage(self, rank: int, chunk: int) -> int:
        """Index of the stage that is chunk `chunk` of rank `rank`."""
        return chunk * self.pp + rank

    def rank_and_chunk(self, stage: int) -> tuple[int, int]:
        """Returns (rank, chunk) of a stage."""
        return stage % self.pp, stage // self.pp


_REPEATED_GROUP: Final = re.compile(r"\(([^()]*)\)\*(\d+)")
_REPEATED_LETTER: Final = re.compile(r"([EtmL|])\*(\d+)")


class LayoutError(ValueError):
    """Raised if layers cannot be placed on stages as requested."""


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """Contents of one pipeline stage, which is one model chunk of a pipeline rank."""

    layers: tuple[int, ...] = ()
    """Global indices of the decoder layers; may be empty."""
    embedding: bool = False
    final_norm: bool = False
    """True for the stage with the last decoder layer."""
    num_mtp: int = 0
    """Number of MTP layers: 0, or all MTP layers of the model. A stage with MTP layers has a copy of the embedding."""
    loss: bool = False
    """Whether the stage has the output head and the loss."""

    def __str__(self) -> str:
        """Formats the stage in the layout language of `parse_layout`, for example `Ett`."""
        return "E" * self.embedding + _counted("t", len(self.layers)) + _counted("m", self.num_mtp) + "L" * self.loss


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """All pipeline stages in model order, and the number of pipeline ranks."""

    stages: tuple[StageLayout, ...]
    pp: int = 1

    @property
    def vpp(self) -> int:
        """Model chunks per rank."""
        return len(self.stages) // self.pp

    @property
    def stage_map(self) -> StageMap:
        return StageMap(self.pp, self.vpp)

    def chunks(self, rank: int) -> tuple[StageLayout, ...]:
        """Stages of a pipeline rank, by chunk."""
        return self.stages[rank :: self.pp]

    def embedding_ranks(self, *, tied: bool) -> tuple[int, ...]:
        """Pipeline ranks with a copy of the word embedding, in stage order: those of the first stage, of the stage with
        MTP layers and, if `tied`, of the stage with the output head."""
        holds = (stage.embedding or stage.num_mtp or tied and stage.loss for stage in self.stages)
        return tuple(dict.fromkeys(index % self.pp for index, held in enumerate(holds) if held))

    def received_states(self, stage: int, num_streams: int, num_mtp: int) -> int:
        """Number of hidden states [H] per token that a stage receives: all residual streams and, after the final norm,
        the hidden state of the model, those of all depths of multi-token prediction (`num_mtp`), or, before the first
        depth, the residual streams that it reads, if there are several."""
        before = self.stages[:stage]
        if not any(each.final_norm for each in before):
            return num_streams
        if any(each.num_mtp for each in before):
            return 1 + num_mtp
        return 1 + num_streams if num_mtp and num_streams > 1 else 1

    def __str__(self) -> str:
        """Formats the layout in the language of `parse_layout`, with repetitions for equal consecutive stages."""
        texts = []
        for text, run in groupby(str(stage) for stage in self.stages):
            length = len(list(run))
            texts.append(f"({text}|)*{length}" if length > 1 else f"{text}|")
        return "".join(texts)[:-1]

    def table(self) -> str:
        """Table with one line per stage: rank, chunk and contents."""
        lines = [f"{'stage':>5} {'rank':>4} {'chunk':>5}  holds"]
        for index, stage in enumerate(self.stages):
            rank, chunk = self.stage_map.rank_and_chunk(index)
            lines.append(f"{index:>5} {rank:>4} {chunk:>5}  {_describe(stage)}")
        return "\n".join(lines)


def _describe(stage: StageLayout) -> str:
    held = ["embedding"] * stage.embedding
    if stage.layers:
        first, last = stage.layers[0], stage.layers[-1]
        held.append(f"layer {first}" if first == last else f"layers {first}-{last} ({len(stage.layers)})")
    held += ["final norm"] * stage.final_norm
    held += [f"MTP x{stage.num_mtp}"] * (stage.num_mtp > 0)
    return ", ".join(held + ["loss"] * stage.loss) or "nothing"


def _counted(letter: str, count: int) -> str:
    return letter * count if count <= 2 else f"{letter}*{count}"


def parse_layout(text: str, *, pp: int, num_layers: int | None, num_mtp: int | None = 0) -> PipelineLayout:
    """Parses Megatron's layout language, for example `Et*3|(tt|)*29m|L`. Raises LayoutError.

    E is the embedding, t a decoder layer, m an MTP layer, L the loss; `|` ends a stage. `t*N` and `(...)*N` repeat a
    letter or group N times. Commas are ignored. `num_layers`, `num_mtp`: required numbers of t and m; None allows any
    number.
    """
    expanded = _expand(text)
    num_layers = expanded.count("t") if num_layers is None else num_layers
    num_mtp = expanded.count("m") if num_mtp is None else num_mtp
    stages = expanded.split("|")
    _check_letters(text, stages, num_layers, num_mtp)
    if rest := len(stages) % pp:
        below = len(stages) - rest
        near = f"{below} or {below + pp}" if below else str(pp)
        raise LayoutError(
            f"{text} has {counted(len(stages), 'stage')}, which cannot be divided among {pp} pipeline ranks; use {near}"
        )
    mtp_stage = _mtp_stage(text, stages, pp)
    return place_layers([stage.count("t") for stage in stages], pp, num_mtp, mtp_stage)


def _expand(text: str) -> str:
    """Replaces each repetition in a layout text by its letters. Raises LayoutError for unknown letters."""
    text = text.replace(",", "").replace(" ", "")
    expanded = _REPEATED_GROUP.sub(lambda match: match[1] * int(match[2]), text)
    expanded = _REPEATED_LETTER.sub(lambda match: match[1] * int(match[2]), expanded)
    unknown = next((letter for letter in expanded if letter not in "EtmL|"), None)
    if unknown is not None:
        raise LayoutError(
            f"{text} has {unknown!r}; stages are E (embedding), t (layer), m (MTP layer), L (loss), ended by |; "
            f"(...)*N repeats a group, t*N a letter, groups do not nest"
        )
    return expanded


def _check_letters(text: str, stages: Sequence[str], num_layers: int, num_mtp: int) -> None:
    letters = "".join(stages)
    for letter, meaning, expected in (
        ("E", "embeddings", 1),
        ("L", "losses", 1),
        ("t", "decoder layers", num_layers),
        ("m", "layers of multi-token prediction", num_mtp),
    ):
        if letters.count(letter) != expected:
            raise LayoutError(f"{text} has {letters.count(letter)} {meaning} ({letter}); the model has {expected}")
    if not stages[0].startswith("E"):
        raise LayoutError(f"{text} must begin with E, because the first stage has the embedding")
    if not stages[-1].endswith("L"):
        raise LayoutError(f"{text} must end with L, because the last stage has the loss")
    if "t" in letters[letters.find("m") :] and "m" in letters:
        raise LayoutError(f"{text} has a t after an m; multi-token prediction follows the last decoder layer")


def _mtp_stage(text: str, stages: Sequence[str], pp: int) -> int:
    """Stage with the MTP layers (the last if there are none). Raises LayoutError for stages that Megatron forbids."""
    holders = [index for index, stage in enumerate(stages) if "m" in stage] or [len(stages) - 1]
    if len(holders) > 1:
        raise LayoutError(f"{text} has m in stages {holders}; all MTP layers must be in one stage")
    rank, first_allowed = holders[0] % pp, len(stages) - pp + min(1, pp - 1)
    if holders[0] < first_allowed:
        raise LayoutError(
            f"{text} has m in stage {holders[0]}, chunk {holders[0] // pp} of rank {rank}; it must be the last chunk "
            f"of a rank other than 0: stages {first_allowed} to {len(stages) - 1}"
        )
    return holders[0]


def even_layout(
    num_layers: int,
    *,
    pp: int = 1,
    vpp: int = 1,
    num_mtp: int = 0,
    first: int | None = None,
    last: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
) -> PipelineLayout:
    """Layout with the same number of layers on every stage, and all MTP layers on the last. Raises LayoutError.

    `first`, `last`: numbers of layers of the first and last pipeline rank, if they differ; all other ranks get equal
    numbers. `account_for_*`: counts the embedding or loss as one layer of the first or last stage.
    """
    if first is not None or last is not None:
        if account_for_embedding or account_for_loss:
            raise LayoutError(
                "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split cannot be combined "
                "with --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
            )
        ranks = _uneven_ranks(num_layers, pp, first, last)
        for rank, count in enumerate(ranks):
            if count % vpp:
                raise LayoutError(
                    f"{counted(count, 'layer')} of pipeline rank {rank} cannot be divided into {vpp} virtual stages"
                )
        return place_layers([count // vpp for count in ranks] * vpp, pp, num_mtp, pp * vpp - 1)
    extra = account_for_embedding + account_for_loss
    each, rest = divmod(num_layers + extra, pp * vpp)
    if rest:
        total = counted(num_layers, "layer") + (f" and {extra} for embedding and loss" if extra else "")
        stages = f"{counted(pp, 'pipeline rank')} x {counted(vpp, 'virtual stage')}"
        raise LayoutError(f"{total} cannot be divided among {stages}")
    counts = [each] * (pp * vpp)
    counts[0] -= account_for_embedding
    counts[-1] -= account_for_loss
    if min(counts) < 0:
        raise LayoutError(f"--num-layers {num_layers} is too small to count embedding and loss as layers of one stage")
    return place_layers(counts, pp, num_mtp, len(counts) - 1)


def _uneven_ranks(num_layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    """Layers per pipeline rank: `first` and `last` (unless None), and equal numbers for the other ranks."""
    given = [count for count in (first, last) if count is not None]
    rest, middle = num_layers - sum(given), pp - len(given)
    if middle < 0:
        raise LayoutError(f"with {counted(pp, 'pipeline rank')}, the first and the last rank are the same")
    if rest < 0 or (rest % middle if middle else rest):
        raise LayoutError(
            f"{counted(num_layers, 'layer')} less {' and '.join(map(str, given))} leave {rest}, which cannot be "
            f"divided among the other {counted(middle, 'pipeline rank')}"
        )
    between = [rest // middle] * middle if middle else []
    return [*([] if first is None else [first]), *between, *([] if last is None else [last])]


def place_layers(counts: Sequence[int], pp: int, num_mtp: int, mtp_stage: int) -> PipelineLayout:
    """Layout with `counts[s]` consecutive layers on stage s and all MTP layers on `mtp_stage`."""
    ends = list(accumulate(counts))
    last_layer_stage = next(index for index, end in enumerate(ends) if end == ends[-1])
    return PipelineLayout(
        pp=pp,
        stages=tuple(
            StageLayout(
                layers=tuple(range(end - count, end)),
                embedding=index == 0,
                final_norm=index == last_layer_stage,
                num_mtp=num_mtp if index == mtp_stage else 0,
                loss=index == len(counts) - 1,
            )
            for index, (count, end) in enumerate(zip(counts, ends, strict=True))
        ),
    )


def virtual_stages(num_layers: int, *, pp: int, per_virtual_stage: int) -> int:
    """Number of virtual stages per rank if each has `per_virtual_stage` layers. `num_layers` includes the embedding and
    the loss if these count as layers. Raises LayoutError."""
    per_rank, rest = divmod(num_layers, pp)
    if rest or per_rank % per_virtual_stage:
        raise LayoutError(
            f"{counted(num_layers, 'layer')} over {counted(pp, 'pipeline rank')}: {num_layers / pp:g} per rank, which "
            f"cannot be divided into virtual stages of {counted(per_virtual_stage, 'layer')}"
        )
    return per_rank // per_virtual_stage
