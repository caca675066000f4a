"""`dedup --method semantic` with vectors from a model: the mean of its last hidden states.

A long text is read in windows; its vector is the mean of the final normed hidden states over its
tokens, computed by the model core in either backend. Any model directory can be used; one trained
for sentence similarity works best.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from sabia.core.generate.model_directory import model_fingerprint
from sabia.core.model.forward import hidden
from sabia.core.model.storage import hub
from sabia.core.ops.base import Params
from sabia.core.ops.product import Array
from sabia.core.options.dedup import DedupOptions
from sabia.core.recipes.classifier.token_windows import TextReader, means_by_text
from sabia.core.recipes.pooled_model import PooledModel
from sabia.core.shards.job import Job
from sabia.core.spec.families import load_spec
from sabia.core.text.dedup import semantic_method
from sabia.core.text.tokenize.tokenizer import load_tokenizer

WINDOW = 512  # tokens of a row at most


def run(job: Job, options: DedupOptions) -> None:
    """Deduplicate the job's inputs by a column of vectors, or by those of a model."""
    embedder = ModelEmbedder(options.model, options.backend) if options.model else None
    semantic_method.run(job, options, embedder)


class MeanStates(PooledModel):
    """Mean-pooled last hidden states of a model directory."""

    def __init__(self, path: str, backend: str) -> None:
        spec, params = hub.load_model(path)
        super().__init__(spec, params, "mean", backend, "fp32")

    def forward(self, params: Params, ids: Array, segments: Array, pool: Array) -> Any:
        """float32[B, D]; see PooledModel."""
        x = hidden(self.spec, params, ids, self.ops, segments=segments)
        return (self.ops.cast(x, "float32") * pool[:, :, None]).sum(1)


class ModelEmbedder:
    """core.text.dedup.semantic_method.Embedder of a model directory."""

    def __init__(self, path: str, backend: str = "torch") -> None:
        self.path, self.backend = path, backend
        self.fingerprint = f"{model_fingerprint(path)} mean {WINDOW}"
        length = min(WINDOW, load_spec(path).max_positions)
        self.reader = TextReader(load_tokenizer(path), length, "windows")

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32[n, D]; NaN for a text without tokens."""
        rows, owner = self.reader.read(texts)
        model = _opened(self.path, self.backend)
        states = model.vectors(rows, model.spec.hidden_size)
        return means_by_text(states, rows, owner, len(texts))


_opened = functools.lru_cache(maxsize=1)(MeanStates)
