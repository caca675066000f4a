"""Vectors of texts from a model: transformers' own states, windows, and a run over documents."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage

from sabia.core.recipes.semantic_dedup import ModelEmbedder
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from tests.core.recipes import classifiers

MODELS = {"encoder": classifiers.ENCODER, "decoder": classifiers.DECODER}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp(request.param)
    return str(classifiers.model(path, MODELS[request.param]))


def test_vectors_are_means_of_the_states_that_transformers_computes(model: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    texts = [*classifiers.texts(6)[0], "the", ""]
    judge = transformers.AutoModel.from_pretrained(model).eval()
    tokenizer = load_tokenizer(model)
    found = ModelEmbedder(model).embed(texts)
    assert np.isnan(found[-1]).all()
    for text, vector in zip(texts[:-1], found, strict=False):
        ids = tokenizer.encode_ordinary(text)[:64]
        with torch.no_grad():
            states = judge(torch.tensor([ids])).last_hidden_state[0].numpy()
        if len(tokenizer.encode_ordinary(text)) <= 64:
            assert np.allclose(vector, states.mean(0), atol=2e-5)


def test_backends_agree_and_company_does_not_matter(model: str) -> None:
    texts = classifiers.texts(9, seed=1)[0] + [" ".join(classifiers.texts(9)[0])]  # in windows
    together = ModelEmbedder(model).embed(texts)
    alone = np.concatenate([ModelEmbedder(model).embed([text]) for text in texts])
    assert np.allclose(together, alone, atol=1e-5)
    assert np.allclose(together, ModelEmbedder(model, "jax").embed(texts), atol=1e-4)


def test_documents_of_one_meaning(model: str, tmp_path: Path) -> None:
    texts = classifiers.texts(20, seed=2)[0]
    texts = [*texts, texts[3], "", texts[5]]
    table = pa.table({"id": [f"d{i}" for i in range(len(texts))], "text": texts})
    pq.write_table(table, tmp_path / "in.parquet")
    removed = str(tmp_path / "r.parquet")
    stage("dedup", inputs=[str(tmp_path / "in.parquet")], out=tmp_path / "o", method="semantic",
          model=model, threshold=0.9999, keep="first", removed=removed)  # fmt: skip
    gone = pq.read_table(removed).to_pylist()
    pairs = {(row["id"], row["kept_id"]) for row in gone}
    assert {("d20", "d3"), ("d22", "d5")} <= pairs and len(pairs) < 6
