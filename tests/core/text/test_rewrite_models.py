"""Rewriting by a model: what passes as faithful, pieces of long texts, provenance, local engine."""

from dataclasses import replace

import numpy as np
import pytest

from sabia.core.generate.calls import ChatResponse
from sabia.core.text.rewrite.faithfulness import strip_answer, unfaithful
from sabia.core.text.rewrite.model_engine import answer_tokens, pieces_of
from sabia.core.text.rewrite.rewrite_recipe import load_recipe
from sabia.core.text.rewrite.stage import join_pieces

BUILT_IN = load_recipe("reason-first")

SOURCE = (
    "How much is 37 + 58? The answer is 95. First add the units: 7 + 8 = 15, write 5 and carry 1. "
    "Then add the tens: 3 + 5 + 1 = 9, so that the whole sum is found step by step."
)
GOOD = (
    "How much is 37 + 58? First add the units: 7 + 8 = 15, write 5 and carry 1. Then add the "
    "tens: 3 + 5 + 1 = 9, so that the whole sum is found step by step. The answer is 95."
)
TRANSLATED = (
    "Quanto é 37 + 58? Primeiro some as unidades: 7 + 8 = 15, escreva 5 e leve 1. Depois some as "
    "dezenas: 3 + 5 + 1 = 9, de modo que a soma toda se acha passo a passo. A resposta é 95."
)


def test_a_faithful_rewriting_passes():
    assert unfaithful(SOURCE, GOOD, "stop", BUILT_IN.checks) == ""


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        (GOOD, "length", "cut short (finish reason length)"),
        ("  ", "stop", "empty"),
        ("I'm sorry, but " + GOOD, "stop", "refusal"),
        ("Claro! " + GOOD, "stop", "refusal"),
        (GOOD[:60], "stop", "length ratio"),
        (GOOD * 2, "stop", "length ratio"),
        (GOOD.replace("95", "96"), "stop", "number missing: 95"),
        (GOOD + " Also 101 and 102 and 103 and 104.", "stop", "new numbers: 101"),
        (" 37 58 7 8 15 5 1 3 9 95 " + "quite other things " * 8, "stop", "only "),
    ],
)
def test_what_a_model_may_not_do(text, finish, reason):
    assert unfaithful(SOURCE, text, finish, BUILT_IN.checks).startswith(reason)


def test_other_languages_and_repetition_are_seen():
    from sabia.core.text.rewrite import faithfulness

    assert faithfulness._language(SOURCE, TRANSLATED, BUILT_IN.checks) == "language pt (source: en)"
    assert faithfulness._language(SOURCE, GOOD, BUILT_IN.checks) == ""
    looped = GOOD + " carry the one and write it" * 12
    assert faithfulness._repetition(SOURCE, looped, BUILT_IN.checks).startswith("repeats itself")


def test_reasoning_blocks_and_fences_are_taken_off():
    assert strip_answer("<think>hm\n</think>\n\nText.") == "Text."
    assert strip_answer("```text\na\n\nb\n```") == "a\n\nb"
    assert strip_answer(" a ```b``` c ") == "a ```b``` c"


def test_pieces_join_to_the_text_and_are_bounded():
    text = "\n\n".join("word " * n for n in (10, 300, 5, 2_000, 1, 900, 900)) + "\n \n"
    parts = pieces_of(text, replace(BUILT_IN.pieces, most_chars=2_000))
    assert "".join(parts) == text and len(parts) % 2 == 1
    assert all(not gap.strip() for gap in parts[1::2])
    paragraphs = [p for p in parts[::2] if "\n\n" in p]
    assert paragraphs and all(len(p) <= 2_000 for p in paragraphs)
    assert pieces_of("short", BUILT_IN.pieces) == ["short"]
    assert answer_tokens("x" * 1000, BUILT_IN.pieces) > 500


def test_a_failing_piece_keeps_its_original_and_decides_the_verdict():
    parts = [SOURCE + "\n", "\n\n", "  " + SOURCE]
    whole = {
        0: ChatResponse("", GOOD, "stop", model="m"),
        2: ChatResponse("", GOOD, "stop", model="m"),
    }
    done = join_pieces(parts, whole, BUILT_IN.checks)
    assert done.text == GOOD + "\n\n\n  " + GOOD and done.verdict == "rewritten"
    assert (done.before, done.after) == ((0.0, 0.0), (1.0, 1.0))
    half = join_pieces(
        parts,
        whole | {2: ChatResponse("", model="m", error="given up after 6 tries")},
        BUILT_IN.checks,
    )
    assert half.text == GOOD + "\n\n\n  " + SOURCE
    assert half.verdict == "given up after 6 tries"
    same = join_pieces([SOURCE], {0: ChatResponse("", SOURCE, "stop", model="m")}, BUILT_IN.checks)
    assert (same.text, same.verdict) == (SOURCE, "unchanged")


class Scripted:
    """Stands in for an engine: answers by reversing nothing, counts what it is asked."""

    class spec:
        max_positions = 2_000

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, 0

    def generate(self, requests):
        from sabia.core.generate.requests import Completion

        self.asked += len(requests)
        assert all(len(r.prompt) + r.max_new_tokens <= 2_000 for r in requests)
        return [Completion(r.id, 0, [], f"done {len(r.prompt)}", [], [], "stop") for r in requests]


def test_local_writer_generates_once_and_keeps_answers(tmp_path):
    from sabia.core.generate.cache import CallCache
    from sabia.core.text.rewrite.model_engine import LocalAnswers, Writer
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    engine = Scripted(train_bpe([SOURCE, GOOD] * 3, 400))

    def submit(*texts):
        local = LocalAnswers(engine, "name", "f" * 32, CallCache(tmp_path))
        return Writer(local, BUILT_IN, 0.0, 0).submit(texts)()

    answers = submit(SOURCE, GOOD, SOURCE, "x" * 9_000)
    assert [a.text is None for a in answers] == [False, False, False, True]
    assert answers[0] == answers[2] and "does not fit" in answers[3].error
    assert engine.asked == 2
    assert submit(GOOD, SOURCE) == [answers[1], answers[0]]
    assert engine.asked == 2


def tiny_model(folder):
    """A model directory of random weights."""
    from sabia.core.model.init import init_params
    from sabia.core.model.storage import hub
    from sabia.core.spec import from_config
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    tokenizer = train_bpe([SOURCE, GOOD] * 3, 400)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": tokenizer.vocab_size, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024, "rope_theta": 10_000.0, "tie_word_embeddings": True,
        "hidden_act": "silu",
    }  # fmt: skip
    spec = from_config(config)
    params = {name: np.asarray(value) for name, value in init_params(spec, 0).items()}
    hub.save_model(folder, spec, params)
    tokenizer.save(folder)


def test_a_real_local_model_answers(tmp_path):
    """A tiny random model: its words mean nothing, so every document keeps its text."""
    pytest.importorskip("torch", reason="the local engine runs on torch")
    from sabia.core.generate.model_directory import load_engine, model_fingerprint

    tiny_model(tmp_path)
    assert model_fingerprint(tmp_path) == model_fingerprint(tmp_path)
    from sabia.core.generate.cache import CallCache
    from sabia.core.text.rewrite.model_engine import LocalAnswers, Writer

    local = LocalAnswers(
        load_engine(tmp_path), "tiny", model_fingerprint(tmp_path), CallCache(tmp_path / "calls")
    )
    writer = Writer(local, BUILT_IN, 0.0, 0)
    (answer,) = writer.submit(["Is 1 + 1 = 2?"])()
    assert answer.text is not None and answer.finish_reason in ("stop", "length")
    assert (
        join_pieces(
            [SOURCE], {0: ChatResponse("", answer.text, answer.finish_reason)}, BUILT_IN.checks
        ).text
        == SOURCE
    )


def test_samples_of_a_local_model_do_not_depend_on_what_is_cached(tmp_path):
    """Requests that differ in their vote alone are samples of one prompt, each drawn once."""
    pytest.importorskip("torch", reason="the local engine runs on torch")
    from sabia.core.generate.cache import CallCache
    from sabia.core.generate.calls import ChatRequest
    from sabia.core.generate.model_directory import load_engine
    from sabia.core.text.rewrite.model_engine import LocalAnswers

    tiny_model(tmp_path)
    engine, asked = load_engine(tmp_path), []
    generate = engine.generate
    engine.generate = lambda requests: asked.extend(requests) or generate(requests)

    def samples(folder, *votes):
        local = LocalAnswers(engine, "tiny", "f" * 32, CallCache(tmp_path / folder))
        turn = [{"role": "user", "content": "Is 1 + 1 = 2?"}]
        return local.submit([
            ChatRequest(turn, max_tokens=8, temperature=1.0, seed=3, vote=vote) for vote in votes
        ])()  # fmt: skip

    whole = samples("a", *range(5))
    assert len(asked) == 1 and len({one.text for one in whole}) > 1
    assert all(one.model == "tiny" and one.message["role"] == "assistant" for one in whole)
    samples("b", 3, 1)
    assert samples("b", *range(5)) == whole and samples("b", 2) == whole[2:3]
    assert [list(one.samples) for one in asked] == [[0, 1, 2, 3, 4], [1, 3], [0, 2, 4]]


def test_best_of_samples_in_the_process(tmp_path):
    pytest.importorskip("torch", reason="the local engine runs on torch")
    import json

    import pyarrow.parquet as pq
    from rewrite_cases import sabia, written

    tiny_model(tmp_path / "model")
    recipe = tmp_path / "own.toml"
    recipe.write_text('base = "best-of"\n[samples]\ncount = 3\nkeep = 3\nmin-score = 0\n'
                      'max-tokens = 12\n')  # fmt: skip
    given = written(tmp_path / "in.parquet", [
        {"id": f"p{n}", "messages": [{"role": "user", "content": f"Is {n} + 1 = 2?"}],
         "answer": "2", "shelf": n} for n in range(12)
    ])  # fmt: skip
    words = ("rewrite", given, "-o", tmp_path / "o.parquet", "--recipe", recipe, "--engine",
             "local", "--model", tmp_path / "model", "--cache", tmp_path / "cache")  # fmt: skip
    sabia(*words)
    made = pq.read_table(tmp_path / "o.parquet").to_pylist()
    rejects = pq.read_table(tmp_path / "o.rejects.parquet").to_pylist()
    assert len({row["best_of_id"] for row in made}) + len(rejects) == 12 and made
    for row in made:
        assert row["shelf"] == int(row["best_of_id"][1:]) and len(row["best_of_scores"]) == 3
        assert row["rewrite_finish_reason"] == "stop"
        assert row["rewrite_model"] == str(tmp_path / "model")
    assert all("cut short" in row["reason"] or "empty" in row["reason"] for row in rejects)
    assert all(json.loads(row["record"])["shelf"] >= 0 for row in rejects)
    plan = sabia(*words, "--dry-run").stdout.decode()
    assert f"generate with {tmp_path / 'model'}: 0 answers (36 more are in the cache)" in plan
