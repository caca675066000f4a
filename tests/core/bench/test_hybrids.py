"""Hybrids are scored as in transformers, and what options share is run once."""

from pathlib import Path

import numpy as np
import pytest
from hybrid_models import CONFIGS, hybrid

from sabia.core.bench import loglikelihood as ll
from sabia.core.model.storage import hub


@pytest.fixture(scope="module", params=CONFIGS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec, params = hybrid(request.param)
    path = tmp_path_factory.mktemp("hybrids") / request.param
    hub.save_model(path, spec, params)
    return path


def theirs(directory: Path, rows: list[ll.Row]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="transformers is the judge")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    sums = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row.ids])
            logs = model(ids[:, :-1]).logits[0].log_softmax(-1)
            sums.append(float(logs.gather(1, ids[0, 1:, None])[-row.scored :].sum()))
    return np.array(sums)


def questions(seed: int = 0) -> list[tuple[ll.Row, ...]]:
    """Prefixes of 1 to 150 tokens, below and above a chunk, before options of 1 to 9 tokens."""
    draw = np.random.default_rng(seed)
    made = []
    for length in (1, 2, 3, 5, 63, 64, 65, 66, 130, 150):
        before = draw.integers(0, 211, length).tolist()
        rows = []
        for _ in range(int(draw.integers(2, 5))):
            tail = draw.integers(0, 211, int(draw.integers(1, 10))).tolist()
            rows.append(ll.Row((*before, *tail), len(tail)))
        made.append(tuple(rows))
    return made


@pytest.mark.parametrize(("backend", "batch_tokens"), [
    ("torch", 4096), ("torch", 100),
    # programs of many shapes are compiled
    *(pytest.param("jax", tokens, marks=pytest.mark.slow) for tokens in (100, 4096)),
])  # fmt: skip
def test_options_score_as_in_transformers(directory: Path, backend: str, batch_tokens: int) -> None:
    pytest.importorskip(backend)
    asked = questions()
    scorer = ll.Scorer(*hub.load_model(directory), backend, batch_tokens=batch_tokens)
    ours = np.concatenate(scorer.score(asked))
    expected = theirs(directory, [row for rows in asked for row in rows])
    assert np.abs(ours - expected).max() <= 1e-4 and np.ptp(ours) > 5


def test_what_options_share_is_run_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = questions()[-1]
    scorer = ll.Scorer(*hub.load_model(directory))
    tokens: list[int] = []
    hidden = scorer._hidden
    monkeypatch.setattr(
        scorer, "_hidden", lambda ids, *rest: tokens.append(ids.size) or hidden(ids, *rest)
    )
    scorer.score([rows])
    assert sum(tokens) < 150 + 10 * len(rows)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_documents_score_as_in_transformers(directory: Path, backend: str) -> None:
    pytest.importorskip(backend)
    ids = np.random.default_rng(1).integers(0, 211, 700).tolist()
    rows = ll.document_rows(ids, 3, 300)
    scorer = ll.Scorer(*hub.load_model(directory), backend)
    ours = sum(float(nats[0]) for nats in scorer.score([[row] for row in rows]))
    assert ours == pytest.approx(theirs(directory, rows).sum(), rel=1e-6)
