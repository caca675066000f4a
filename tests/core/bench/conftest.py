"""A tiny random Llama with a trained tokenizer, written as a model directory once a session."""

from pathlib import Path

import pytest

TEXTS = [
    "Pergunta: quantos são dois mais três? Resposta: cinco.",
    "A soma de 12 e 30 é 42; a diferença é 18.",
    "Não há ação sem reação, e a maçã caiu do galho.",
    "The cat sat on the mat, and the dog ran 10 miles.",
] * 8


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a 2-layer Llama, fp32, with weights large enough to prefer some tokens."""
    from sabia.core.model.storage import hub
    from sabia.core.spec import from_config, new_config
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    root = tmp_path_factory.mktemp("model")
    tokenizer = train_bpe(TEXTS, 400)
    tokenizer.save(root / "tokenizer")
    config = new_config(
        hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=tokenizer.vocab_size, tied=False
    )
    spec = from_config(config | {"max_position_embeddings": 256})
    fresh = hub.init_params(spec, 0)
    params = {n: a if a.ndim == 1 else a * (0.08 / a.std()) for n, a in fresh.items()}
    hub.save_model(root / "tiny", spec, params, tokenizer_from=root / "tokenizer")
    return root / "tiny"
