"""Sampling: the distribution drawn from, its filters, and numbers that depend on names only."""

import random

import numpy as np
import pytest
import torch
from served import little_engine

from sabia.core.errors import UsageError
from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Request
from sabia.core.generate.runner.draw_torch import Columns, draw, filtered
from sabia.core.generate.sampling import RowParams, SamplingParams, stream_keys, uniforms
from sabia.core.model import forward


def columns(rows: list[SamplingParams]) -> Columns:
    return Columns(RowParams.of(rows), torch.device("cpu"))


def test_uniforms_are_uniform_and_named():
    keys = stream_keys(7, "prompt-1", range(1000))
    numbers = np.concatenate([uniforms(keys, np.full(1000, t)) for t in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    chi_squared = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_squared < 90  # 49 degrees of freedom: p < 0.001 above 85
    assert len(np.unique(numbers)) == numbers.size
    again = uniforms(stream_keys(7, "prompt-1", range(3)), np.array([5, 6, 7]))
    assert again[1] == uniforms(keys[1:2], np.array([6]))[0]
    assert uniforms(stream_keys(8, "prompt-1", range(1)), np.array([0])) != numbers[0]
    assert uniforms(stream_keys(7, "prompt-2", range(1)), np.array([0])) != numbers[0]


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5]]).expand(20000, 4).contiguous()
    rows = columns([SamplingParams(temperature=0.7)] * 20000)
    tokens, logprobs, raw = draw(
        logits, rows, uniforms(stream_keys(0, "a", range(20000)), np.zeros(1))
    )
    wanted = torch.softmax(logits[0] / 0.7, -1)
    share = torch.bincount(tokens, minlength=4) / 20000
    assert (share - wanted).abs().max() < 0.015
    assert torch.allclose(logprobs, wanted.log()[tokens], atol=1e-6)
    assert torch.allclose(raw, torch.log_softmax(logits, -1)[0][tokens], atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_log_probabilities_of_large_logits_keep_their_digits(backend):
    logits = np.random.default_rng(0).normal(300, 3, (50, 40)).astype(np.float32)
    rows = RowParams.of([SamplingParams(temperature=0.9)] * 50)
    uniform = uniforms(stream_keys(0, "a", range(50)), np.zeros(1))
    if backend == "torch":
        made = draw(torch.tensor(logits), Columns(rows, torch.device("cpu")), uniform)
        tokens, _, raw = (x.numpy() for x in made)
    else:
        from sabia.core.generate.runner import draw_jax

        with draw_jax.double_precision():
            made = draw_jax.draw(logits, np.arange(50), rows.columns, uniform, None, False, False)
        tokens, _, raw = map(np.asarray, made)
    wide = logits.astype(np.float64) - 300
    exact = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    assert np.abs(raw - exact[np.arange(50), tokens]).max() < 2e-6


def test_a_row_does_not_see_its_neighbours():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    settings = ((0,), (1.3,), (1, 5), (1, 0, 0.5), (1, 0, 1, 0.2), (0.5, 9, 0.9, 0.01))
    kinds = [SamplingParams(*values) for values in settings]
    u = uniforms(stream_keys(3, "x", range(6)), np.arange(6))
    whole = draw(logits, columns(kinds), u)
    for i, kind in enumerate(kinds):
        alone = draw(logits[i : i + 1], columns([kind]), u[i : i + 1])
        for together, single in zip(whole, alone, strict=True):
            assert torch.allclose(together[i], single[0], atol=1e-6)
    assert whole[0][0] == logits[0].argmax()
    assert whole[1][0] == 0


def reference_filter(logits, params):
    """The documented order in plain NumPy, one row."""
    values = logits / params.temperature
    order = np.argsort(-values, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    p = np.exp(values[order] - values[order].max())
    p /= p.sum()
    if params.top_p < 1:
        order = order[: int((np.cumsum(p) - p < params.top_p).sum())]
    top = values.max()
    return {int(t) for t in order if values[t] >= top + np.log(params.min_p or 1e-300)}


@pytest.mark.parametrize("params", [
    SamplingParams(1, 3), SamplingParams(0.8, 0, 0.6), SamplingParams(1, 0, 1, 0.3),
    SamplingParams(1.5, 10, 0.7, 0.1), SamplingParams(1, 1), SamplingParams(1, 0, 1e-9),
])  # fmt: skip
def test_filters_match_the_documented_order(params):
    random = np.random.default_rng(1)
    logits = random.normal(0, 2, (20, 30)).round(1)  # rounded: ties occur
    scaled = torch.tensor(logits / params.temperature)
    kept = filtered(scaled, columns([params] * 20))
    for row in range(20):
        left = set(torch.isfinite(kept[row]).nonzero()[:, 0].tolist())
        assert left == reference_filter(logits[row], params)


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.full((1000, 8), -torch.inf)
    logits[:, 2] = 0.0
    logits[:, 5] = 0.0
    edge = np.concatenate([[0.0, 1 - 2.0**-52], np.linspace(0, 0.999, 998)])
    tokens, logprobs, _ = draw(logits, columns([SamplingParams()] * 1000), edge)
    assert set(tokens.tolist()) == {2, 5}
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("values", [(-1,), (1, -1), (1, 0, 0), (1, 0, 1.5), (1, 0, 1, 1)])
def test_impossible_parameters(values):
    with pytest.raises(UsageError):
        SamplingParams(*values)


def test_penalties_and_biases_change_the_distribution_drawn_from() -> None:
    """Against a plain computation of each step, from logits of the tokens so far."""
    engine = little_engine()
    vocab, prompt = engine.spec.vocab_size, engine.tokenizer.encode("the quick")
    for seed in range(6):
        numbers = random.Random(seed)
        presence, frequency = numbers.uniform(-2, 2), numbers.uniform(-2, 2)
        bias = tuple((numbers.randrange(vocab), numbers.uniform(-5, 5)) for _ in range(seed))
        temperature = numbers.choice([0.0, 0.8, 1.0])
        settings = {"presence_penalty": presence, "frequency_penalty": frequency}
        request = Request(
            prompt, 12, temperature, seed=seed, stop_ids=(), logit_bias=bias, **settings
        )
        plain = Request(prompt, 12, 1.0, seed=seed, stop_ids=(), id="plain")
        made = next(one for one in engine.generate([request, plain]) if one.request_id != "plain")
        for step, token in enumerate(made.tokens):
            before = [*prompt, *made.tokens[:step]]
            (one,) = engine_logprobs(engine, before)
            raw, counts = one.copy(), np.bincount(made.tokens[:step], minlength=vocab)
            one -= frequency * counts + presence * (counts > 0)
            for number, more in bias:
                one[number] += more
            assert made.raw_logprobs[step] == pytest.approx(raw[token], abs=1e-4)
            if temperature == 0:
                assert one[token] == pytest.approx(one.max(), abs=1e-4)
            else:
                one = one / temperature
                expected = one[token] - np.log(np.exp(one - one.max()).sum()) - one.max()
                assert made.logprobs[step] == pytest.approx(expected, abs=1e-4)


def engine_logprobs(engine: Engine, tokens: list[int]) -> np.ndarray:
    """[1, V] log-probabilities of the next token."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        hidden = forward.hidden(engine.spec, engine.params, ids, engine.ops)[:, -1:]
        logits = forward.logits(engine.spec, engine.params, hidden, engine.ops)
    return torch.log_softmax(logits[:, 0], -1).double().numpy()
