"""Scores by a language model: prompts, readings, both doors, outages, caches, distillation."""

import contextlib
import importlib.util
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sabia.core.bench.loglikelihood import Scorer, encode_options
from sabia.core.errors import SabiaError, UsageError
from sabia.core.generate.chat import render
from sabia.core.model.storage import hub
from sabia.core.options.classify import AskOptions
from sabia.core.options.classify_train import ClassifyTrainOptions
from sabia.core.recipes.classifier import distill
from sabia.core.recipes.classifier.lm_prompt import Prompt, load_prompt
from sabia.core.recipes.classifier.lm_scorer import LmScorer
from sabia.core.shards.job import Job
from sabia.core.text.tokenize.tokenizer import load_tokenizer

from .classifiers import DECODER, ENCODER, WORDS, documents, model, texts

STUB = Path(__file__).parents[2] / "openai_stub.py"
_spec = importlib.util.spec_from_file_location("openai_stub", STUB)
assert _spec is not None and _spec.loader is not None
openai_stub = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(openai_stub)

SCALE = Prompt("worth", "How good is it?", ("0", "1", "2", "3", "4", "5"), True)
LABELS = Prompt("kind", "What is it?", ("good", "bad"), False, (("buy now", "bad"),))


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        *(("4", 4), ("Score: 4/5", 4), ("I say 3 out of 5.", 3), ("first 2, so\n\n5\n", 5)),
        *(("4.5", None), ("-3", None), ("3 or 4", None), ("", None), ("40", None), ("four", None)),
    ],
)
def test_replies_are_read_or_unknown(reply: str, answer: int | None) -> None:
    assert SCALE.parse(reply) == answer


def test_labels_are_whole_words() -> None:
    assert LABELS.parse("**Good**") == 0 and LABELS.parse("badly") is None
    assert LABELS.parse("good, not bad") is None


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "ask.toml"
    path.write_text(
        'name = "worth"\ninstruction = "How good?"\nscale = [1, 3]\nmax_chars = 4\n'
        '[[examples]]\ntext = "abc"\nanswer = 2\n'
    )
    prompt = load_prompt(path)
    assert prompt.answers == ("1", "2", "3") and prompt.examples == (("abc", "2"),)
    assert [turn["content"] for turn in prompt.messages("abcdef")][1:] == ["abc", "2", "abcd"]
    assert prompt.plain("x").endswith("Text: x\n\nAnswer: ")
    for bad in ("scale = [3, 1]", 'labels = ["a"]', 'labels = ["a", "b"]\nscale = [0, 1]', "x = 1"):
        path.write_text(f'name = "worth"\ninstruction = "How?"\n{bad}\n')
        with pytest.raises(UsageError, match="--ask"):
            load_prompt(path)


JOB = Job("classify score")


def asking(**values: object) -> AskOptions:
    return AskOptions(ask="ask.toml", **values)


def judgement(text: str) -> str:
    """What the stub says: by the words of the document, which is the last turn."""
    last = text.rsplit("\n", 1)[-1]
    return "good" if any(word in last for word in WORDS["good"]) else "bad"


def test_an_endpoint_is_asked_once_and_never_guessed_for(tmp_path: Path) -> None:
    many = [*texts(20, 2)[0], "refuse me", "mumble"]
    fault = lambda text, attempt: "400" if "refuse me" in text else ""  # noqa: E731
    answer = lambda text: "who knows" if "mumble" in text else judgement(text)  # noqa: E731
    with openai_stub.Stub(answer, fault) as stub, contextlib.ExitStack() as ask:
        options = asking(lm="stub", url=(stub.url,), cache=str(tmp_path / "calls"))
        scorer = pickle.loads(pickle.dumps(LmScorer(LABELS, options, JOB)))
        ask.enter_context(scorer)
        assert scorer.names == ("kind_good", "kind_bad")
        found = scorer.score(many)
        np.testing.assert_array_equal(np.isnan(found["kind_good"]), [False] * 20 + [True] * 2)
        expected = [judgement(text) == "good" for text in many[:20]]
        np.testing.assert_array_equal(found["kind_good"][:20], np.array(expected, np.float32))
        assert (scorer.asked, scorer.unknown) == (22, 2)
        paid = sum(stub.delivered.values())
        again = ask.enter_context(LmScorer(LABELS, options, JOB))
        np.testing.assert_array_equal(again.score(many)["kind_bad"], found["kind_bad"])
        # a reply that cannot be read is not kept: it is requested twice in each run
        assert sum(stub.delivered.values()) == paid + 2
        assert "20 from the cache" in again.summary()
    other = LmScorer(replace(LABELS, instruction="Else?"), options, JOB)
    with other as gone, pytest.raises(SabiaError):
        # an outage ends the run: it is no score
        gone.backend.client._max_tries, gone.backend.client._outage_s = 1, 0.1  # type: ignore[attr-defined]
        gone.score(["anything"])


def test_a_local_model_says_how_likely(tmp_path: Path) -> None:
    place = model(tmp_path / "lm", DECODER | {"max_position_embeddings": 256})
    options = asking(lm=str(place), cache=str(tmp_path / "calls"))
    scorer = LmScorer(SCALE, options, JOB)
    many = [*texts(4, 1)[0], "word " * 3000, " "]
    found = scorer.score(many)["worth"]
    assert np.isfinite(found[:4]).all() and np.isnan(found[4:]).all()
    spec, params = hub.load_model(place)
    judge, tokenizer = Scorer(spec, params), load_tokenizer(place)
    chat = render(SCALE.messages(many[1]), tokenizer, add_generation_prompt=True)
    rows = encode_options(tokenizer, chat, SCALE.answers, special=True)
    logprobs = judge.score([rows])[0]
    shares = np.exp(logprobs - logprobs.max())
    assert found[1] == pytest.approx(shares @ np.arange(6) / shares.sum(), rel=1e-5)
    again = LmScorer(SCALE, options, JOB)
    np.testing.assert_array_equal(again.score(many)["worth"], found)
    assert "4 cached" in again.summary()


@pytest.mark.parametrize("numeric", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_student_learns_what_the_model_says(tmp_path: Path, numeric: bool) -> None:
    source = documents(tmp_path / "docs.parquet", 500)
    base = model(tmp_path / "base", ENCODER)
    prompt = SCALE if numeric else LABELS
    told = {"good": "5", "bad": "0"} if numeric else {"good": "good", "bad": "bad"}
    answer = lambda text: told[judgement(text)]  # noqa: E731

    with openai_stub.Stub(answer) as stub, contextlib.ExitStack() as ask:
        job = Job("classify train", (str(source),), str(tmp_path / "student"))
        options = ClassifyTrainOptions(
            ask="ask.toml", lm="stub", url=(stub.url,), cache=str(tmp_path / "calls"), sample=400,
            label="grade" if numeric else "kind", model=str(base), out=job.out, lr=3e-3, epochs=4,
            batch=16, warmup="2%", length=32,
        )  # fmt: skip
        distill.run(job, options, ask.enter_context(LmScorer(prompt, options, job)))
        assert sum(stub.delivered.values()) <= 400  # equal documents are one call
    said = json.loads((tmp_path / "student.distilled.json").read_text())
    assert said["labelled"] == 400 and said["unknown"] == 0 and said["held_out"] > 20
    figure = "pearson" if numeric else "macro_f1"
    for pair in ("student_and_lm", "student_and_people", "lm_and_people"):
        assert said[pair][figure] > 0.9, pair
