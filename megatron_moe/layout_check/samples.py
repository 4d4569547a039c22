"""In-memory data sets of random token sequences, identical for every layout."""

from dataclasses import dataclass

import numpy as np

from megatron_moe.config.run import RunPlan
from megatron_moe.data.batch import MaskConfig
from megatron_moe.data.datasets import Datasets
from megatron_moe.data.samples import PADDING


@dataclass(frozen=True)
class RandomSamples:
    """Sequences of uniformly distributed token ids; the highest id is the end-of-document token.

    Every third sequence ends in padding, so that microbatches have unequal numbers of tokens. If `packed` is True, four
    sequences of short documents (four tokens on average) alternate with four sequences of long documents. If `variable`
    is True, sequences have 1 to `seq_length` positions and no padding.
    """

    num_samples: int
    seq_length: int
    vocab_size: int
    packed: bool = False
    variable: bool = False
    seed: int = 0

    def __len__(self) -> int:
        return self.num_samples

    @property
    def fingerprint(self) -> str:
        return repr(self)

    def tokens(self, index: int) -> np.ndarray:
        """Token ids of sequence `index`, int64 [positions + 1]."""
        draw = np.random.default_rng([self.seed, index])
        if self.variable:
            return draw.integers(0, self.vocab_size, size=self.lengths(np.array([index]))[0] + 1)
        tokens = draw.integers(0, self.vocab_size, size=self.seq_length + 1)
        ends = tokens == self.vocab_size - 1
        if self.packed and index % 8 < 4:
            ends |= draw.random(self.seq_length + 1) < 0.25
        self._start_documents(tokens, ends, index)
        if index % 3 == 1:
            start = draw.integers(self.seq_length // 2, self.seq_length)
            tokens[start + int(self.packed and tokens[start - 1] == self.vocab_size - 1) :] = PADDING
        return tokens

    def _start_documents(self, tokens: np.ndarray, ends: np.ndarray, index: int) -> None:
        """Gives the documents of eight neighbouring sequences different first tokens, in place. The first token of a
        document attends only to itself, so equal first tokens would have equal router probabilities, and rounding would
        decide which of them an expert at capacity drops. `ends`: positions at which documents may end, if attention
        does not cross document boundaries."""
        starts, spacing = np.zeros(1, dtype=np.int64), 1
        if self.packed:
            spacing = max(1, (self.vocab_size - 1) // 8)
            ends[0] = False
            ends[1:] &= ~ends[:-1]
            places = np.flatnonzero(ends)[: spacing - 1]
            tokens %= self.vocab_size - 1
            tokens[places] = self.vocab_size - 1
            starts = np.append(starts, places[places < self.seq_length] + 1)
        tokens[starts] = (index * spacing + np.arange(len(starts))) % (self.vocab_size - 1)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Number of positions of the sequences `indices`."""
        if not self.variable:
            return np.full(len(indices), self.seq_length, dtype=np.int64)
        draws = (np.random.default_rng([self.seed, int(index), 1]) for index in indices)
        return np.array([draw.integers(1, self.seq_length + 1) for draw in draws], dtype=np.int64)

    def locate(self, index: int, position: int) -> str:
        return f"random sequence {index}, token {position}"


def random_datasets(plan: RunPlan, *, num_steps: int) -> Datasets:
    """Random training data for `num_steps` steps. Document masks are set as in the plan. The loss excludes
    end-of-document tokens, so that microbatches have unequal numbers of loss tokens. If attention masks or position ids
    are reset at document ends, half of the sequences consist of short documents. With packing, lengths vary."""
    data = plan.data
    packed = data.reset_position_ids or data.reset_attention_mask
    samples = RandomSamples(
        num_steps * plan.batch.global_batch_size, data.seq_length, data.vocab_size, packed, data.packing is not None
    )
    masks = MaskConfig(
        vocab_size=data.vocab_size,
        eod=data.vocab_size - 1,
        pad=-1,
        eod_mask_loss=True,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
    )
    return Datasets(train=samples, valid={}, test=None, masks=masks, notes=())
