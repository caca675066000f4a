"""Tiny models, tokenizers and labelled documents that classifiers are tried with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core.model.storage import hub
from sabia.core.spec import from_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

WORDS = {
    "good": ("theorem", "proof", "lemma", "integral", "vector", "matrix"),
    "bad": ("click", "buy", "cheap", "offer", "subscribe", "coupon"),
}
SHARED = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "with", "as", "on", "be", "at")
SHAPE = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ENCODER = {
    "architectures": ["ModernBertForMaskedLM"],
    "model_type": "modernbert",
    "local_attention": 12,
    "classifier_pooling": "mean",
    **SHAPE,
}
DECODER = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": 12,
    "tie_word_embeddings": True,
    **SHAPE,
}


def texts(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """(texts of 4 to 40 words, their labels)."""
    random = np.random.default_rng(seed)
    found, labels = [], []
    for _ in range(count):
        label = str(random.choice(list(WORDS)))
        size = int(random.integers(4, 40))
        chosen = random.random(size) < 0.25
        chosen[0] = True
        words = [str(random.choice(WORDS[label] if flag else SHARED)) for flag in chosen]
        found.append(" ".join(words))
        labels.append(label)
    return found, labels


def documents(path: Path, count: int, seed: int = 0, **columns: Any) -> Path:
    """A shard of labelled documents: columns kind, grade (0 to 5) and tags (lists)."""
    found, labels = texts(count, seed)
    grades = [5 * (label == "good") for label in labels]
    table = {
        "id": [f"d{number}" for number in range(count)],
        "text": found,
        "kind": labels,
        "grade": grades,
        "tags": [
            ["long"] * (len(t) > 90) + [label] for t, label in zip(found, labels, strict=True)
        ],
    }
    pq.write_table(pa.table(table | columns), path)
    return path


def model(path: Path, config: dict[str, Any]) -> Path:
    """A fresh model directory with a tokenizer of these words."""
    tokenizer = train_bpe(texts(200, 9)[0], 400)
    spec = from_config(
        config | {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.pad_id}
    )
    params = hub.init_params(spec, 0)
    hub.save_model(path, spec, {k: v * 3 if v.ndim > 1 else v for k, v in params.items()})
    tokenizer.save(path)
    return path


def report(path: Path) -> dict[str, Any]:
    """What a run says of its held-out documents."""
    return json.loads((path / "held_out.json").read_text())
