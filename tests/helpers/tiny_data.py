"""Small token files and data configs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_moe.config.data import DataConfig, TokenizerConfig
from megatron_moe.config.training import BatchConfig, LoopConfig
from megatron_moe.data.indexed import IndexedWriter

VOCAB = 100
EOD = VOCAB - 1


def random_documents(seed: int, lengths: Sequence[int]) -> list[np.ndarray]:
    """Documents of ids 1 to 97, each ended by the end-of-document id."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, EOD - 1, size=length) for length in lengths]
    for document in documents:
        document[-1:] = EOD
    return documents


def write_tokens(prefix: Path, documents: Sequence[np.ndarray | list[int]], dtype: type = np.uint16) -> str:
    """Writes `.bin/.idx` files with one sequence per document; returns the prefix."""
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_sequence(document)
            writer.end_document()
    return str(prefix)


def corpus(folder: Path, *, name: str = "corpus", num_documents: int = 40, seed: int = 0) -> str:
    """Writes files with documents of 1 to 39 tokens; returns the prefix."""
    lengths = np.random.default_rng(seed).integers(1, 40, size=num_documents).tolist()
    return write_tokens(folder / name, random_documents(seed + 1, lengths))


def data_config(**changes) -> DataConfig:
    values = {
        "seq_length": 8,
        "tokenizer": TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB),
        "vocab_size": VOCAB,
        "split": "8,1,1",
    }
    return DataConfig(**{**values, **changes})


def batch_config(**changes) -> BatchConfig:
    return BatchConfig(**{"micro_batch_size": 2, "global_batch_size": 4, **changes})


def loop_config(**changes) -> LoopConfig:
    return LoopConfig(**{"train_iters": 10, "eval_iters": 1, **changes})
