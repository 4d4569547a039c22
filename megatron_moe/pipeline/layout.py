"""Which layers each pipeline stage holds (`--pipeline-model-parallel-layout` and its defaults)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final

from megatron_moe.config.exit_codes import counted


@dataclass(frozen=True)
class StageMap:
    """Stages go round the ranks: chunk c of rank r is stage c * pp + r (arXiv 2104.04473 section 2.2)."""

    pp: int = 1
    vpp: int = 1
    """Model chunks of a rank."""

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp

    def stage(self, rank: int, chunk: int) -> int:
        """Position in the model of a chunk of a rank."""
        return chunk * self.pp + rank

    def place(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a stage."""
        return stage % self.pp, stage // self.pp


_REPEATED_GROUP: Final = re.compile(r"\(([^()]*)\)\*(\d+)")
_REPEATED_LETTER: Final = re.compile(r"([EtmL|])\*(\d+)")
_LETTERS: Final = "EtmL"


class LayoutError(ValueError):
    """No placement of these layers on these stages."""


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """What one model chunk of one pipeline rank holds."""

    layers: tuple[int, ...] = ()
    """Global indices of its decoder layers; may be empty."""
    embedding: bool = False
    final_norm: bool = False
    """It holds the last decoder layer, so the norm behind it."""
    num_mtp: int = 0
    """Layers of multi-token prediction: all or none. They need a copy of the embedding."""
    loss: bool = False
    """Head and loss."""

    def __str__(self) -> str:
        """As in the layout language."""
        return "E" * self.embedding + _counted("t", len(self.layers)) + _counted("m", self.num_mtp) + "L" * self.loss


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """All stages, in the order in which a microbatch passes them."""

    stages: tuple[StageLayout, ...]
    pp: int = 1

    @property
    def vpp(self) -> int:
        """Model chunks of a rank."""
        return len(self.stages) // self.pp

    @property
    def map(self) -> StageMap:
        return StageMap(self.pp, self.vpp)

    def chunks(self, rank: int) -> tuple[StageLayout, ...]:
        """What a pipeline rank holds, by chunk."""
        return self.stages[rank :: self.pp]

    def embedding_ranks(self, *, tied: bool) -> tuple[int, ...]:
        """Pipeline ranks that hold the word embedding, the first one first: for the tokens, for multi-token
        prediction, and when it is `tied` for the head."""
        holders = [
            index % self.pp
            for index, stage in enumerate(self.stages)
            if stage.embedding or stage.num_mtp or (tied and stage.loss)
        ]
        return tuple(dict.fromkeys(holders))

    def __str__(self) -> str:
        """In the layout language, with runs of equal stages multiplied."""
        texts = []
        for text, run in groupby(str(stage) for stage in self.stages):
            length = len(list(run))
            texts.append(f"({text}|)*{length}" if length > 1 else f"{text}|")
        return "".join(texts)[:-1]

    def table(self) -> str:
        """One line per stage: where it stands and what it holds."""
        lines = [f"{'stage':>5} {'rank':>4} {'chunk':>5}  holds"]
        for index, stage in enumerate(self.stages):
            rank, chunk = self.map.place(index)
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
    """The layout that Megatron reads in a text such as `Et*3|(tt|)*29m|L`.

    E embedding, t decoder layer, m layer of multi-token prediction, L loss; `|` ends a stage; commas mean nothing.
    `(...)*N` repeats a group, `t*N` one letter. Numbers that are None are those of the text. Raises LayoutError.
    """
    expanded = _expand(text)
    num_layers = expanded.count("t") if num_layers is None else num_layers
    num_mtp = expanded.count("m") if num_mtp is None else num_mtp
    stages = expanded.split("|")
    _check_letters(text, stages, num_layers, num_mtp)
    if len(stages) % pp:
        below = len(stages) - len(stages) % pp
        near = f"{below} or {below + pp}" if below else str(pp)
        raise LayoutError(
            f"{text} has {counted(len(stages), 'stage')}, which cannot be divided among {pp} pipeline ranks; "
            f"{near} would"
        )
    _check_mtp_stage(text, stages, pp)
    return place_layers([stage.count("t") for stage in stages], pp, num_mtp, _index(stages, "m"))


def _expand(text: str) -> str:
    """The text with every repetition written out."""
    text = text.replace(",", "").replace(" ", "")
    expanded = _REPEATED_GROUP.sub(lambda match: match[1] * int(match[2]), text)
    expanded = _REPEATED_LETTER.sub(lambda match: match[1] * int(match[2]), expanded)
    strange = next((letter for letter in expanded if letter not in _LETTERS + "|"), None)
    if strange is not None:
        raise LayoutError(
            f"{text} has {strange!r} where none is understood: stages are E (embedding), t (layer), m (MTP layer), L "
            f"(loss), ended by |; (...)*N repeats a group, t*N a letter, groups do not nest"
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
        raise LayoutError(f"{text} must begin with E: the first stage has the embedding")
    if not stages[-1].endswith("L"):
        raise LayoutError(f"{text} must end with L: the last stage has the loss")
    if "t" in letters[letters.find("m") :] and "m" in letters:
        raise LayoutError(f"{text} has a t behind an m; multi-token prediction follows the last decoder layer")


def _check_mtp_stage(text: str, stages: Sequence[str], pp: int) -> None:
    holders = [index for index, stage in enumerate(stages) if "m" in stage]
    if not holders:
        return
    if len(holders) > 1:
        raise LayoutError(f"{text} has m in stages {holders}; all layers of multi-token prediction belong to one stage")
    rank, first_allowed = holders[0] % pp, len(stages) - pp + min(1, pp - 1)
    if holders[0] < first_allowed:
        raise LayoutError(
            f"{text} has m in stage {holders[0]}, chunk {holders[0] // pp} of rank {rank}; it must be the last chunk "
            f"of a rank other than 0: stages {first_allowed} to {len(stages) - 1}"
        )


def _index(stages: Sequence[str], letter: str) -> int:
    return next((index for index, stage in enumerate(stages) if letter in stage), len(stages) - 1)


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
    """The same number of layers on every stage, but for what is asked of the first and the last pipeline rank.

    `first` and `last` are the layers of these ranks. Accounting for the embedding or the loss counts it as a layer of
    the first or last stage. Multi-token prediction stands on the last stage. Raises LayoutError.
    """
    if first is not None or last is not None:
        if account_for_embedding or account_for_loss:
            raise LayoutError(
                "accounting for embedding or loss and a number of layers of the first or last rank exclude each other"
            )
        ranks = _uneven_ranks(num_layers, pp, first, last)
        for rank, count in enumerate(ranks):
            if count % vpp:
                raise LayoutError(
                    f"{counted(count, 'layer')} of pipeline rank {rank} cannot be divided into {vpp} virtual stages"
                )
        counts = [count // vpp for count in ranks] * vpp
        return place_layers(counts, pp, num_mtp, len(counts) - 1)
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
    """Layers per pipeline rank: what is given at the ends, equal shares between."""
    given = [count for count in (first, last) if count is not None]
    rest, middle = num_layers - sum(given), pp - len(given)
    if middle < 0:
        raise LayoutError(f"{pp} pipeline rank has no first and last rank apart")
    if rest < 0 or (rest % middle if middle else rest):
        raise LayoutError(
            f"{counted(num_layers, 'layer')} less {' and '.join(map(str, given))} leave {rest}, which cannot be "
            f"divided among the other {counted(middle, 'pipeline rank')}"
        )
    between = [rest // middle] * middle if middle else []
    return ([] if first is None else [first]) + between + ([] if last is None else [last])


def place_layers(counts: Sequence[int], pp: int, num_mtp: int, mtp_stage: int) -> PipelineLayout:
    """The layout of layers in order, `counts` of them per stage."""
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
    """Virtual stages per rank when each has `per_virtual_stage` layers, embedding and loss counted where accounted for.

    Raises LayoutError.
    """
    per_rank, rest = divmod(num_layers, pp)
    if rest or per_rank % per_virtual_stage:
        raise LayoutError(
            f"{counted(num_layers, 'layer')} over {counted(pp, 'pipeline rank')}: {num_layers / pp:g} per rank, which "
            f"cannot be divided into virtual stages of {counted(per_virtual_stage, 'layer')}"
        )
    return per_rank // per_virtual_stage
