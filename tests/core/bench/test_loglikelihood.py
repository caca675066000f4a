"""Log-likelihoods of options and documents against transformers, one row at a time."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sabia.core.bench import loglikelihood as ll
from sabia.core.errors import BadData
from sabia.core.model.storage import hub
from sabia.core.text.tokenize.tokenizer import load_tokenizer

QUESTIONS = [
    ("Pergunta: dois mais três?\nResposta:", [" cinco", " quatro mais um", " não há", " A"]),
    ("A soma de 12 e 30 é", [" 42", " 18.", " a maçã que caiu do galho"]),
    ("The cat sat on the ", ["mat", "dog", "galho e ação"]),
    ("x", ["y", "yz"]),
]


def reference(directory: Path, rows: list[ll.Row]) -> list[float]:
    """Summed log-probabilities of the scored tokens by transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="transformers is the judge")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row.ids])
            logs = model(ids[:, :-1]).logits[0].log_softmax(-1)
            picked = logs.gather(1, ids[0, 1:, None])[-row.scored :]
            found.append(float(picked.sum()))
    return found


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("batch_tokens", [8192, 40])
def test_options_score_as_in_transformers(
    tiny_model: Path, backend: str, batch_tokens: int
) -> None:
    pytest.importorskip(backend)
    tokenizer = load_tokenizer(tiny_model)
    questions = [ll.encode_options(tokenizer, c, options, False) for c, options in QUESTIONS]
    scorer = ll.Scorer(*hub.load_model(tiny_model), backend, batch_tokens=batch_tokens)
    ours = np.concatenate(scorer.score(questions))
    theirs = reference(tiny_model, [row for rows in questions for row in rows])
    assert np.abs(ours - np.array(theirs)).max() <= 1e-4
    assert np.ptp(ours) > 5  # the model does prefer something


def test_options_of_one_token_need_only_the_prefix(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(tiny_model)
    rows = ll.encode_options(tokenizer, "Resposta:", ["A", "B", "C"], False)
    assert {row.scored for row in rows} == {1}
    scorer = ll.Scorer(*hub.load_model(tiny_model))
    calls: list[tuple[int, ...]] = []
    hidden = scorer._hidden
    monkeypatch.setattr(
        scorer, "_hidden", lambda ids, *rest: calls.append(ids.shape) or hidden(ids, *rest)
    )
    scorer.score([rows])
    assert calls == [(1, len(rows[0].ids) - 1)]


def test_the_question_is_run_once_for_all_options(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(tiny_model)
    context = " ".join(["Não há ação sem reação."] * 6)
    rows = ll.encode_options(tokenizer, context, [" a maçã", " o galho caiu", " cinco"], False)
    scorer = ll.Scorer(*hub.load_model(tiny_model))
    tokens: list[int] = []
    hidden = scorer._hidden
    monkeypatch.setattr(
        scorer, "_hidden", lambda ids, *rest: tokens.append(ids.size) or hidden(ids, *rest)
    )
    scorer.score([rows])
    whole = sum(len(row.ids) for row in rows)
    assert sum(tokens) < 0.6 * whole


def test_white_space_moves_to_the_continuation_and_nothing_starts_with_eos(
    tiny_model: Path,
) -> None:
    tokenizer = load_tokenizer(tiny_model)
    spaced = ll.encode_options(tokenizer, "a soma é ", ["42"], False)
    joined = ll.encode_options(tokenizer, "a soma é", [" 42"], False)
    assert spaced == joined
    empty = ll.encode_options(tokenizer, "", ["42"], False)[0]
    assert empty.ids[0] == tokenizer.eos_id and empty.scored == len(empty.ids) - 1


def test_long_rows_lose_tokens_on_the_left(tiny_model: Path) -> None:
    scorer = ll.Scorer(*hub.load_model(tiny_model))
    ids = tuple(np.random.default_rng(0).integers(20, 300, 400))
    long, short = ll.Row(ids, 5), ll.Row(ids[-257:], 5)
    np.testing.assert_array_equal(scorer.score([[long]]), scorer.score([[short]]))


def test_document_windows_score_every_token_once() -> None:
    for length in (1, 9, 10, 11, 25, 30):
        ids = list(range(100, 100 + length))
        rows = ll.document_rows(ids, 7, 10)
        scored = [token for row in rows for token in row.ids[len(row.ids) - row.scored :]]
        assert scored == ids
        assert all(len(row.ids) <= 11 for row in rows)
        assert rows[0].ids[0] == 7
    # the last window sees as much as it may
    assert len(ll.document_rows(list(range(25)), 7, 10)[-1].ids) == 11


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_document_scores_as_in_transformers(tiny_model: Path, backend: str) -> None:
    pytest.importorskip(backend)
    tokenizer = load_tokenizer(tiny_model)
    ids = tokenizer.encode("Não há ação sem reação, e a maçã caiu. " * 30)
    rows = ll.document_rows(ids, tokenizer.eos_id, 256)
    assert len(rows) > 1
    scorer = ll.Scorer(*hub.load_model(tiny_model), backend)
    ours = sum(float(v[0]) for v in scorer.score([[row] for row in rows]))
    assert ours == pytest.approx(sum(reference(tiny_model, rows)), rel=1e-5)


def test_ids_beyond_the_vocabulary_are_refused(tiny_model: Path) -> None:
    scorer = ll.Scorer(*hub.load_model(tiny_model))
    with pytest.raises(BadData, match="token id 99999"):
        scorer.score([[ll.Row((1, 99999), 1)]])


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_greedy_rows_are_those_that_greedy_decoding_gives(tiny_model: Path, backend: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip(backend)
    transformers = pytest.importorskip("transformers", reason="transformers is the judge")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = load_tokenizer(tiny_model)
    questions = []
    for context in ("A soma de 12 e 30 é", "Não há ação", "The cat sat on the mat, and"):
        ids = tokenizer.encode(context, bos=True)
        for count in (1, 2, 5):
            given = torch.tensor([ids])
            with torch.no_grad():
                for _ in range(count):
                    best = model(given).logits[0, -1].argmax().reshape(1, 1)
                    given = torch.cat([given, best], 1)
            whole = given[0].tolist()
            other = [*whole[:-1], (whole[-1] + 1) % 300]
            early = [*ids, (whole[len(ids)] + 1) % 300, *whole[len(ids) + 1 :]]
            questions.append([ll.Row(tuple(row), count) for row in (whole, other, early)])
    scorer = ll.Scorer(*hub.load_model(tiny_model), backend, batch_tokens=60)
    for made, plain in zip(
        scorer.score(questions, greedy=True), scorer.score(questions), strict=True
    ):
        assert made[:, 1].tolist() == [1, 0, 0]
        assert np.abs(made[:, 0] - plain).max() <= 1e-5


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_by_length_take_the_length_of_each_text(
    tmp_path: Path, backend: str, kind: str
) -> None:
    """Texts below and above the original length, in one padded batch: as each one alone."""
    from sabia.core.spec import from_config, new_config

    pytest.importorskip(backend)
    config = new_config("llama", vocab=64, hidden=32, layers=2, heads=2, kv_heads=1, context=64)
    scaling: dict = {"rope_type": kind, "factor": 4.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
        scaling["original_max_position_embeddings"] = 16
    else:
        config["max_position_embeddings"] = 16
    spec = from_config(config | {"rope_scaling": scaling})
    if kind == "dynamic":
        spec = replace(spec, max_positions=64)
    draw = np.random.default_rng(0)
    params = {t.name: draw.normal(0, 0.4, t.shape).astype(np.float32) for t in spec.tensors()}
    lengths = (5, 11, 16, 17, 23, 30, 41, 60)
    rows = [ll.Row(tuple(map(int, draw.integers(0, 64, n + 1))), min(n, 6)) for n in lengths]
    scorer = ll.Scorer(spec, params, backend)
    assert not scorer.shares
    together = np.concatenate(scorer.score([[row] for row in rows]))
    ops = ll.ops_as_served("torch", spec)
    there = ops.to_device(params, "float32")
    for row, ours in zip(rows, together, strict=True):
        hidden = ll.forward.hidden(spec, there, np.array([row.ids[:-1]]), ops)
        losses, _ = ll.forward.token_losses(spec, there, hidden, np.array([row.ids[1:]]), ops)
        alone = -ops.to_numpy({"losses": losses})["losses"][0, -row.scored :].sum()
        assert ours == pytest.approx(alone, abs=2e-4), len(row.ids)


def test_rows_of_long_questions_take_a_few_bytes_a_token(tiny_model: Path) -> None:
    """Eight of a tuple's place, not also those of an integer object for each token."""
    tokenizer = load_tokenizer(tiny_model)
    context, options = "Pergunta: onde há galhos? " * 200, ["sim", "não", "talvez", "nunca"]
    encoded = ll.encode_options(tokenizer, context, options, False)
    tracemalloc.start()
    try:
        rows = [ll.encode_options(tokenizer, context, options, False) for _ in range(5)]
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert rows == [encoded] * 5
    assert held <= 12 * 5 * sum(len(row.ids) for row in encoded)
