"""Which windows of the corpus a microbatch has: a function of (seed, step, index), so any head draws the same."""

from __future__ import annotations

import numpy as np

from swarm.config.spec import RunSpec
from swarm.data.corpus import Corpus


class Sampler:
    """Draws microbatches of (sequences, context + 1) token ids, int64."""

    def __init__(self, spec: RunSpec, corpus: Corpus) -> None:
        self.spec = spec
        self.corpus = corpus
        self._window = spec.model.context + 1
        self._rows = spec.batch.microbatch_sequences

    def microbatch(self, step: int, index: int) -> np.ndarray:
        """Microbatch ``index`` of ``step``: windows at uniformly drawn offsets of the training part."""
        # Philox is counter-based and specified to the bit; how numpy makes offsets of its bits is pinned by a test.
        generator = np.random.Generator(np.random.Philox(key=self.spec.seed, counter=[0, 0, index, step]))
        offsets = generator.integers(0, len(self.corpus.train) - self._window + 1, size=self._rows)
        return self._take(self.corpus.train, offsets)

    def validation(self, index: int) -> np.ndarray:
        """Validation microbatch ``index``: windows evenly spread over the held-out part, the same at every step."""
        total = self.spec.evaluation.sequences
        numbers = np.arange(index * self._rows, (index + 1) * self._rows)
        highest = len(self.corpus.validation) - self._window
        return self._take(self.corpus.validation, numbers * highest // max(1, total - 1))

    def _take(self, part: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return np.stack([part[offset : offset + self._window] for offset in offsets]).astype(np.int64)
