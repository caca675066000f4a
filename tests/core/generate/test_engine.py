"""The engine against transformers and against the plain forward pass."""

import time

import numpy as np
import pytest
import torch

from sabia.core.errors import UsageError
from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Request
from sabia.core.model import forward
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

TEXT = ["the quick brown fox jumps over the lazy dog 0123456789 + =", "olá mundo, é só um teste"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXT * 10, 320)


def random_params(spec, seed, scale=6.0):
    """Parameters large enough that the model is sure of nothing by accident."""
    random = np.random.default_rng(seed)
    return {
        t.name: np.ones(t.shape, np.float32)
        if t.init.kind == "ones"
        else (random.standard_normal(t.shape) * t.init.std * scale).astype(np.float32)
        for t in spec.tensors()
    }


@pytest.fixture(scope="module")
def model(tokenizer):
    config = new_config(hidden=64, layers=2, vocab=tokenizer.vocab_size, heads=4, kv_heads=2,
                        context=128)  # fmt: skip
    spec = from_config(config)
    return spec, random_params(spec, 0)


@pytest.fixture(scope="module")
def engine(model, tokenizer):
    return Engine(*model, tokenizer)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    texts = ["the", "the quick brown", "0123 + 4 =", "olá", "lazy dog over the fox", "1"]
    return [tokenizer.encode(text) for text in texts]


def plain_logprobs(model, prompt, tokens, temperature=1.0):
    """Log-probabilities of the tokens after the prompt by one forward pass without a cache."""
    spec, params = model
    ops = load_ops("torch")
    on_device = ops.to_device(params)
    ids = torch.tensor([list(prompt) + list(tokens)])
    with torch.no_grad():
        hidden = forward.hidden(spec, on_device, ids, ops)
        scores = torch.log_softmax(
            forward.logits(spec, on_device, hidden, ops)[0] / temperature, -1
        )
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return scores[at, ids[0, len(prompt) :]].numpy()


def test_greedy_is_transformers_generate(model, tokenizer, prompts):
    transformers = pytest.importorskip("transformers", reason="the judge of greedy decoding")
    spec, params = model
    config = transformers.LlamaConfig(**{**spec.config, "eos_token_id": None})
    theirs = transformers.LlamaForCausalLM(config).eval()
    state = {t.hf: torch.tensor(params[t.name]) for t in spec.tensors()}
    theirs.load_state_dict(state, strict=False)
    theirs.tie_weights()
    engine = Engine(spec, params, tokenizer)
    requests = [Request(p, 12, temperature=0, stop_ids=()) for p in prompts]
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        ids = torch.tensor([request.prompt])
        wanted = theirs.generate(ids, max_new_tokens=12, do_sample=False, use_cache=True,
                                 attention_mask=torch.ones_like(ids))  # fmt: skip
        assert completion.tokens == wanted[0, ids.shape[1] :].tolist()
        assert completion.finish_reason == "length"
        assert completion.logprobs == [0.0] * 12


def test_logprobs_are_those_of_a_plain_forward(engine, model, prompts):
    requests = [Request(p, 10, n=3, seed=5, stop_ids=(), temperature=t)
                for p, t in zip(prompts, (1.0, 0.7, 1.3, 1.0, 0.5, 2.0), strict=True)]  # fmt: skip
    for completion in engine.generate(requests):
        request = next(r for r in requests if r.name == completion.request_id)
        raw = plain_logprobs(model, request.prompt, completion.tokens)
        tempered = plain_logprobs(model, request.prompt, completion.tokens, request.temperature)
        assert np.abs(np.array(completion.raw_logprobs) - raw).max() <= 1e-4
        assert np.abs(np.array(completion.logprobs) - tempered).max() <= 1e-4


def test_tokens_do_not_depend_on_company_slots_or_order(model, tokenizer, engine, prompts):
    requests = [Request(p, 9, n=4, seed=1, top_p=0.9, stop_ids=()) for p in prompts]
    whole = engine.generate(requests)
    tokens = {(c.request_id, c.sample): c.tokens for c in whole}
    assert [c.sample for c in whole] == [0, 1, 2, 3] * len(prompts)
    assert len({tuple(t) for t in tokens.values()}) > len(prompts)
    cramped = Engine(*model, tokenizer, slots=5)
    for completion in cramped.generate(requests[::-1]):
        assert completion.tokens == tokens[completion.request_id, completion.sample]
    alone = [engine.generate([request])[2] for request in requests]
    assert [c.tokens for c in alone] == [tokens[c.request_id, 2] for c in alone]
    only = [
        Request(r.prompt, 9, n=4, seed=1, top_p=0.9, stop_ids=(), only=(3, 1)) for r in requests
    ]
    some = [(c.request_id, c.sample, c.tokens) for c in engine.generate(only)]
    assert some == [(r.name, s, tokens[r.name, s]) for r in requests for s in (3, 1)]
    fewer = Request(prompts[0], 9, n=2, seed=1, top_p=0.9, stop_ids=())
    assert [c.tokens for c in engine.generate([fewer])] == [c.tokens for c in whole[:2]]
    other = engine.generate([Request(prompts[0], 9, n=4, seed=2, top_p=0.9, stop_ids=())])
    assert [c.tokens for c in other] != [c.tokens for c in whole[:4]]


def test_stop_ids_end_a_sample_and_stay_in_its_tokens(engine, prompts):
    free = engine.generate([Request(prompts[1], 12, n=8, seed=3, stop_ids=())])
    stop = free[0].tokens[4]
    stopped = engine.generate([Request(prompts[1], 12, n=8, seed=3, stop_ids=(stop,))])
    for before, after in zip(free, stopped, strict=True):
        if stop in before.tokens:
            end = before.tokens.index(stop) + 1
            assert (after.tokens, after.finish_reason) == (before.tokens[:end], "stop")
            assert after.logprobs == pytest.approx(before.logprobs[:end], abs=1e-5)
        else:
            assert (after.tokens, after.finish_reason) == (before.tokens, "length")
    assert stopped[0].text == engine.tokenizer.decode(free[0].tokens[:4])


def test_stop_strings_across_token_borders(engine, prompts):
    free = engine.generate([Request(prompts[2], 24, n=6, seed=9, stop_ids=())])
    for completion in free:
        pieces = [engine.tokenizer.decode([t]) for t in completion.tokens]
        at = next(i for i in range(8, 20) if "\ufffd" not in "".join(pieces[i : i + 2]))
        stop = pieces[at][-1] + pieces[at + 1][0]
        request = Request(prompts[2], 24, n=6, seed=9, stop=(stop, "never"), stop_ids=())
        cut = engine.generate([request])[completion.sample]
        assert cut.finish_reason == "stop"
        assert cut.text == completion.text[: completion.text.index(stop)]
        assert stop in engine.tokenizer.decode(cut.tokens)
        assert stop not in engine.tokenizer.decode(cut.tokens[:-1])
        assert cut.tokens == completion.tokens[: len(cut.tokens)]


def test_ragged_limits_and_many_admissions(model, tokenizer, prompts):
    requests = [Request(p, 1 + 3 * i, n=2, seed=i, stop_ids=(), id=f"r{i}-{j}")
                for j in range(4) for i, p in enumerate(prompts)]  # fmt: skip
    roomy, tight = Engine(*model, tokenizer), Engine(*model, tokenizer, slots=3)
    for a, b in zip(roomy.generate(requests), tight.generate(requests), strict=True):
        assert (a.request_id, a.sample, a.tokens) == (b.request_id, b.sample, b.tokens)
    lengths = [len(c.tokens) for c in roomy.generate(requests)]
    assert lengths == [1 + 3 * i for _ in range(4) for i in range(6) for _ in range(2)]


def test_params_can_be_replaced(engine, model, tokenizer, prompts):
    own = Engine(*model, tokenizer)
    request = Request(prompts[0], 8, temperature=0, stop_ids=())
    before = own.generate([request])[0].tokens
    own.params = load_ops("torch").to_device(random_params(model[0], 1))
    after = own.generate([request])[0]
    assert after.tokens != before
    wanted = plain_logprobs((model[0], random_params(model[0], 1)), prompts[0], after.tokens)
    assert np.abs(np.array(after.raw_logprobs) - wanted).max() <= 1e-4


@pytest.mark.parametrize("values", [
    {"prompt": []}, {"prompt": [99999]}, {"prompt": [-1]}, {"max_new_tokens": 0}, {"n": 0},
    {"max_new_tokens": 200}, {"temperature": -1.0}, {"stop": ("",)},
])  # fmt: skip
def test_impossible_requests(engine, values):
    with pytest.raises(UsageError):
        engine.generate([Request(**{"prompt": [20, 21], "max_new_tokens": 4, **values})])


def test_on_step_can_end_a_call(model, tokenizer, prompts):
    steps = []

    def stop():
        steps.append(1)
        if len(steps) == 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Engine(*model, tokenizer, on_step=stop).generate([Request(prompts[0], 50, stop_ids=())])
    assert len(steps) == 5


def test_two_requests_of_one_name_are_refused(engine):
    with pytest.raises(UsageError, match="give them ids"):
        engine.generate([Request([20], 2), Request([20], 2)])
    assert engine.generate([]) == []


def test_thousands_of_short_samples_cost_seconds(tokenizer):
    """2,000 samples of 5 tokens from a model of about a million parameters, by CPU time."""
    config = new_config(hidden=128, layers=4, vocab=512, heads=4, ffn=384, context=64)
    spec = from_config(config)
    engine = Engine(spec, random_params(spec, 0, 1.0), tokenizer)
    requests = [Request([20 + i % 9] * 12, 5, n=16, seed=i, stop_ids=(), id=str(i))
                for i in range(125)]  # fmt: skip
    start = time.process_time()
    completions = engine.generate(requests)
    assert len(completions) == 2000
    assert time.process_time() - start < 6


def test_latent_attention_and_experts_are_generated_as_the_whole_pass_would(tokenizer, prompts):
    config = new_config("deepseek_v3", hidden=64, layers=2, vocab=tokenizer.vocab_size, heads=4,
                        context=128, experts=4)  # fmt: skip
    spec = from_config(config)
    model = spec, random_params(spec, 1)
    engine = Engine(*model, tokenizer, slots=3)  # absorbed steps, rows that come and go
    requests = [Request(p, 8, temperature=0, stop_ids=()) for p in prompts]
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        plain = plain_logprobs(model, request.prompt, completion.tokens)
        np.testing.assert_allclose(completion.raw_logprobs, plain, atol=2e-4)


def test_prompts_reach_the_device_in_one_copy(engine, tokenizer, monkeypatch):
    """The number of tensors made of lists does not grow with the requests: each is a copy."""
    made = []
    original = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: made.append(a) or original(*a, **k))
    counts = []
    for number in (1, 2, 40):  # the first copies constants
        made.clear()
        requests = [Request([5 + i % 7] * (1 + i % 5), 1, id=str(i)) for i in range(number)]
        assert len(engine.generate(requests)) == number
        counts.append(len(made))
    assert counts[1] == counts[2]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_what_prompts_begin_with_is_run_once_and_changes_no_token(family, tokenizer, monkeypatch):
    more = {"experts": 4} if family != "llama" else {"kv_heads": 2}
    config = new_config(family, hidden=64, layers=2, vocab=tokenizer.vocab_size, heads=4,
                        context=256, **more)  # fmt: skip
    spec = from_config(config)
    model = spec, random_params(spec, 3, scale=3.0)
    draw = np.random.default_rng(5)
    common = draw.integers(0, 300, 33).tolist()
    sets = [[*common, *draw.integers(0, 300, n).tolist()] for n in (60, 41)]
    prompts = [[*sets[i % 2], *draw.integers(0, 300, 1 + i % 7).tolist()] for i in range(18)]
    prompts += [sets[0], [7], common]  # nothing after a prefix, and nothing in common
    requests = [
        Request(p, 9, temperature=0, stop_ids=(), n=1 + (i % 3 > 0), id=str(i))
        for i, p in enumerate(prompts)
    ]
    plain = Engine(*model, tokenizer).generate(requests)
    run, hidden = [], forward.hidden_and_stats
    monkeypatch.setattr(
        forward, "hidden_and_stats", lambda *a, **k: run.append(a[2].shape) or hidden(*a, **k)
    )
    size = 3 * Engine(*model, tokenizer).row_bytes(256) // 4 * 5
    for slots, cache_bytes in ((64, 1 << 30), (3, size)):
        shared = Engine(*model, tokenizer, slots=slots, cache_bytes=cache_bytes,
                        shares_prefixes=True)  # fmt: skip
        run.clear()
        made = shared.generate(requests)
        assert [c.tokens for c in made] == [c.tokens for c in plain]
        for one, other in zip(made, plain, strict=True):
            np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=2e-4)
        prefilled = sum(rows * width for rows, width in run if width > 1)
        assert prefilled < 700


def test_prompts_run_together_are_limited_and_give_the_same_tokens(model, tokenizer, monkeypatch):
    draw = np.random.default_rng(8)
    lengths = draw.integers(2, 60, 23)
    requests = [
        Request(draw.integers(0, 300, n).tolist(), 5, temperature=0, stop_ids=(), id=str(i))
        for i, n in enumerate(lengths.tolist())
    ]
    plain = Engine(*model, tokenizer).generate(requests)
    run, hidden = [], forward.hidden_and_stats
    monkeypatch.setattr(
        forward, "hidden_and_stats", lambda *a, **k: run.append(a[2].shape) or hidden(*a, **k)
    )
    made = Engine(*model, tokenizer, prefill_positions=130).generate(requests)
    assert [c.tokens for c in made] == [c.tokens for c in plain]
    prompts = [rows * width for rows, width in run if width > 1]
    assert max(prompts) <= 130 and sum(lengths) <= sum(prompts)
    Engine(*model, tokenizer, prefill_positions=1).generate(requests[:3])  # one at a time
