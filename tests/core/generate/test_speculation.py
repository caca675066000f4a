"""Speculative decoding: samples are distributed as without it, and greedy ones are the same."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from sabia.core.errors import UsageError
from sabia.core.generate.draft import ngram
from sabia.core.generate.draft.draft import Draft
from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Completion, Request
from sabia.core.generate.thinking import ThinkingBudget
from sabia.core.grammar.guide import Guide, Vocabulary
from sabia.core.grammar.regular import regular
from sabia.core.model import forward
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

from ..model.conftest import CONFIGS, perturbed
from ..model.test_decoding_backends import VOCABULARY, Words, by_name, plain_logprobs

OTHERS = ["llama-bias", "qwen3-window", "gemma2", "gemma3", "gpt-oss", "minicpm3", "deepseek-v3",
          "qwen3-next", "qwen3.5-moe"]  # fmt: skip
CASES = [
    ("llama", "torch"), ("mistral", "torch"), ("qwen3.5", "torch"),
    *(pytest.param(name, "torch", marks=pytest.mark.slow) for name in OTHERS),
    *(pytest.param(name, "jax", marks=pytest.mark.slow)
      for name in ("llama", "mistral", "qwen3.5", "gpt-oss", "minicpm3", "qwen3-next")),
]  # fmt: skip


@pytest.fixture
def one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposes after one equal token, so that random texts have many proposals."""
    monkeypatch.setattr(ngram, "NGRAM", 1)


def engine_of(name: str, backend: str, noise: float = 0.0, **options: Any) -> Engine:
    """The model of a family; noise: its weights differ by so much of their size."""
    spec, draw = from_config(CONFIGS[name]), np.random.default_rng(5)
    params = {
        key: (x * (1 + noise * draw.standard_normal(x.shape))).astype(x.dtype)
        for key, x in perturbed(spec).items()
    }
    return Engine(spec, params, Words(), ops=load_ops(backend), **options)


def repetitive(count: int = 5, new: int = 16) -> list[Request]:
    """Greedy and sampled continuations, long enough for rings, of prompts that repeat."""
    draw, made = np.random.default_rng(3), list[Request]()
    for number in range(count):
        base = draw.integers(0, VOCABULARY, int(draw.integers(2, 9))).tolist()
        made.append(Request((base * 8)[: 25 + number], new, float(number % 2), seed=number,
                            top_p=1 - 0.1 * (number % 3), n=1 + number % 2, id=f"r{number}",
                            top_logprobs=number % 3))  # fmt: skip
    return made


def are_of_plain_passes(engine: Engine, asked: list[Request], made: list[Completion]) -> None:
    samples, plain = by_name(made), Engine(engine.spec, engine.params, Words())
    for request in asked:
        for number in request.samples:
            one = samples[request.name, number]
            expected = plain_logprobs(plain, request.prompt, one.tokens)
            assert np.abs(expected - one.raw_logprobs).max() <= 1e-5


@pytest.mark.usefixtures("one_token")
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_ngrams_change_no_token_and_a_draft_model_no_greedy_one(name: str, backend: str) -> None:
    asked, plain = repetitive(), engine_of(name, backend, slots=5)
    expected = by_name(plain.generate(asked))
    sharing = engine_of(name, backend, slots=5, shares_prefixes=True, draft=Draft(3))
    made = by_name(sharing.generate(asked))
    assert {key: one.tokens for key, one in made.items()} == {
        key: one.tokens for key, one in expected.items()
    }
    counts = sharing.counts
    assert counts.accepted < counts.proposed
    assert counts.drawn == sum(len(one.tokens) for one in made.values())
    drafted = engine_of(name, backend, slots=5)
    drafted.draft = Draft(4, engine_of(name, backend, noise=0.1))
    samples = drafted.generate(asked)
    assert 0 < drafted.counts.accepted < drafted.counts.proposed
    greedy = {request.name for request in asked if not request.temperature}
    for key, one in by_name(samples).items():
        assert key[0] not in greedy or one.tokens == expected[key].tokens
    if backend == "torch":
        are_of_plain_passes(plain, asked, samples)


def draws(engine: Engine, prompt: list[int], count: int, **options: Any) -> np.ndarray:
    """[count, 4]: four tokens of each sample."""
    request = Request(prompt, 4, n=count, id="x", stop_ids=(), **options)
    return np.array([one.tokens for one in engine.generate([request])])


def exact(engine: Engine, prompt: list[int], top: int, temperature: float) -> dict[Any, float]:
    """The probability of each four tokens when the `top` likeliest are drawn."""
    ops, known = load_ops("torch"), {(): 1.0}
    for _ in range(4):
        ids = torch.tensor([[*prompt, *text] for text in known])
        with torch.no_grad():
            hidden = forward.hidden(engine.spec, engine.params, ids, ops)[:, -1:]
            scores = forward.logits(engine.spec, engine.params, hidden, ops)[:, 0].double()
        best, tokens = (scores / temperature).topk(top)
        shares = best.softmax(-1).tolist()
        known = {
            (*text, tokens[row, i].item()): p * shares[row][i]
            for (row, (text, p)), i in product(enumerate(known.items()), range(top))
        }
    return known


def p_value(made: np.ndarray, expected: dict[Any, float]) -> float:
    """Pearson's chi-square test; texts of few expected samples are one cell."""
    count, found = len(made), dict.fromkeys(expected, 0)
    for text in made.tolist():
        found[tuple(text)] += 1
    cells = [(found[text], p * count) for text, p in expected.items() if p * count >= 5]
    seen, share = (sum(column) for column in zip(*cells, strict=True))
    if count - share > 1:
        cells.append((count - seen, count - share))
    observed, awaited = zip(*cells, strict=True)
    return float(scipy.stats.chisquare(observed, np.array(awaited) * count / sum(awaited)).pvalue)


@pytest.mark.usefixtures("one_token")
@pytest.mark.parametrize(
    ("count", "backend"),
    [(1500, "torch"), pytest.param(50_000, "torch", marks=pytest.mark.slow),
     pytest.param(50_000, "jax", marks=pytest.mark.slow)],
)  # fmt: skip
def test_samples_are_distributed_as_without_proposals(count: int, backend: str) -> None:
    prompt, options = [5, 9, 5, 9, 5], {"top_k": 4, "temperature": 1.3, "seed": 4}
    engine = engine_of("llama", backend)
    expected = exact(engine_of("llama", "torch"), prompt, 4, 1.3)
    plain = draws(engine, prompt, count, **options)
    assert p_value(plain, expected) > 0.001
    for draft in (Draft(2), Draft(3, engine_of("llama", backend, noise=0.05))):
        engine = engine_of("llama", backend, draft=draft)
        made = draws(engine, prompt, count, **options)
        assert p_value(made, expected) > 0.001
        assert 0 < engine.counts.accepted < engine.counts.proposed
        assert (made == plain).all() == (draft.model is None)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe(['the quick brown fox jumps over the lazy dog 0123 {}[]",:'] * 10, 300)


@pytest.fixture(scope="module")
def texts(tokenizer: Any) -> Engine:
    config = new_config(hidden=32, layers=1, vocab=tokenizer.vocab_size, heads=2, kv_heads=1,
                        context=128)  # fmt: skip
    spec = from_config(config)
    return Engine(spec, perturbed(spec), tokenizer)


def same_or_greedy(engine: Engine, request: Request, draft: Draft) -> None:
    drafted = Engine(engine.spec, engine.params, engine.tokenizer, draft=draft)
    for one, other in zip(engine.generate([request]), drafted.generate([request]), strict=True):
        assert (one.tokens, one.text, one.finish_reason, one.forced) == (
            other.tokens, other.text, other.finish_reason, other.forced
        )  # fmt: skip


@pytest.mark.usefixtures("one_token")
def test_ends_of_samples_are_those_of_plain_decoding(texts: Engine, tokenizer: Any) -> None:
    prompt = tokenizer.encode("the quick the quick the quick")
    free = texts.generate([Request(prompt, 30, n=4, seed=2, stop_ids=())])
    token, text = free[0].tokens[9], free[1].text[12:15]
    thinking = ThinkingBudget(8, "", "fox", tuple(tokenizer.encode("fox")))
    cases: list[dict[str, Any]] = [
        {"stop_ids": (token,)}, {"stop_ids": (), "stop": (text,)},
        {"stop_ids": (), "thinking": thinking},
        {"stop_ids": (), "thinking": ThinkingBudget(8, "", "fox", ())},
    ]  # fmt: skip
    exactly = Draft(5, texts)  # all of its tokens are kept
    for case in cases:
        same_or_greedy(texts, Request(prompt, 30, n=4, seed=2, **case), Draft(5))
        same_or_greedy(texts, Request(prompt, 30, temperature=0, **case), exactly)


@pytest.mark.usefixtures("one_token")
def test_rows_whose_logits_are_changed_are_decoded_plainly(texts: Engine, tokenizer: Any) -> None:
    prompt = tokenizer.encode("the quick the quick the quick")
    words = [tokenizer.decode([number]).encode() for number in range(tokenizer.vocab_size)]
    guide = Guide(regular("(the|quick|fox| ){3,9}"), Vocabulary(words), "regex")
    cases: list[dict[str, Any]] = [
        {"frequency_penalty": 1.5, "presence_penalty": 0.5}, {"logit_bias": ((7, 3.0),)},
        {"guide": guide},
    ]  # fmt: skip
    asked = [Request(prompt, 20, seed=n, id=f"p{n}", stop_ids=(), **case)
             for n, case in enumerate(cases)]  # fmt: skip
    asked.append(Request(prompt, 20, seed=9, n=8, id="free", stop_ids=()))
    drafted = Engine(texts.spec, texts.params, tokenizer, draft=Draft(4))
    for one, other in zip(texts.generate(asked), drafted.generate(asked), strict=True):
        assert one.tokens == other.tokens
    assert drafted.counts.proposed
    before = drafted.counts.proposed
    drafted.generate(asked[:3])
    assert drafted.counts.proposed == before


def test_drafts_that_do_not_fit_are_refused(texts: Engine, tokenizer: Any) -> None:
    config = new_config(hidden=32, layers=1, vocab=tokenizer.vocab_size, heads=2, kv_heads=1,
                        context=64)  # fmt: skip
    short, larger = from_config(config), from_config({**config, "vocab_size": 320})
    other = train_bpe(["um dois três quatro cinco seis sete oito nove"] * 10, 300)
    for spec, words, message in (
        (larger, tokenizer, f"a vocabulary of 320 .expected {tokenizer.vocab_size}"),
        (texts.spec, other, "another tokenizer than the model's"),
        (short, tokenizer, "a context of 64 tokens .expected at least 128"),
    ):
        with pytest.raises(UsageError, match=message):
            Draft(4, Engine(spec, perturbed(spec), words)).check(texts)
    Draft(4, texts).check(texts)
    Draft(4).check(texts)
