"""Variable-length samples: each sample is one document (`--use-varlen-dataset`)."""

from pathlib import Path

import numpy as np

from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.data.cache import digest_of, load_or_build
from megatron_moe.data.samples import Documents, SampleRequest


class WholeDocuments:
    """Documents of one split of one data set, shuffled anew in every epoch.

    A document of n tokens has n - 1 positions, each with the next token as its label. As in Megatron, documents with
    more than `seq_length` positions are cut, and an end-of-document token is appended to them. Documents with less than
    two tokens are left out. Raises `DataProblem` if no document is left.
    """

    def __init__(self, source: Documents, name: str, request: SampleRequest, eod: int, cache_dir: Path | None) -> None:
        self.source = source
        self.name = name
        self.seq_length = request.seq_length
        self._eod = eod
        span = request.documents
        usable = np.flatnonzero(np.asarray(source.sequence_lengths[span.start : span.stop]) > 1) + span.start
        if not len(usable):
            raise DataProblem(
                f"the {request.split} split of {name} has no document of two or more tokens; use more data or another "
                f"--split"
            )
        epochs = -(-(request.num_samples or 1) // len(usable))
        # The number of epochs is excluded, because a longer run starts with the same epochs.
        identity = {
            "class": "WholeDocuments",
            "dataset": name,
            "data": source.identity,
            "documents": [span.start, span.stop],
            "index_split": request.split,
            "sequence_length": request.seq_length,
            "random_seed": request.seed,
        }
        self.inputs = {**identity, "epochs": epochs}
        self._fingerprint = digest_of(identity)

        def build_index() -> dict[str, np.ndarray]:
            rng = np.random.RandomState(request.seed)
            index = np.concatenate([rng.permutation(usable) for _ in range(epochs)])
            return {"document_index": index.astype(np.int32 if span.stop <= np.iinfo(np.int32).max else np.int64)}

        self.document_index = load_or_build(cache_dir, f"WholeDocuments-{request.split}", self.inputs, build_index)[
            "document_index"
        ]

    def __len__(self) -> int:
        return len(self.document_index)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Number of positions of the samples `indices`, int64, without reading their tokens."""
        documents = self.document_index[indices]
        return np.minimum(np.asarray(self.source.sequence_lengths)[documents].astype(np.int64) - 1, self.seq_length)

    def tokens(self, index: int) -> np.ndarray:
        """Token ids of sample `index`, int64 [positions + 1]."""
        document = int(self.document_index[index])
        if int(self.source.sequence_lengths[document]) <= self.seq_length + 1:
            return self.source.get(document)
        return np.append(self.source.get(document, 0, self.seq_length), self._eod)

    def locate(self, index: int, position: int) -> str:
        """File, document and offset of token `position` of sample `index`, as text for messages."""
        return f"{self.name}, document {int(self.document_index[index])}, token {position}"
