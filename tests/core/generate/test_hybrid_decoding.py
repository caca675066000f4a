"""Models with gated delta nets are decoded with their state in slots."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid_models import CONFIGS, hybrid

from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Completion, Request
from sabia.core.model import forward
from sabia.core.model.storage import hub
from sabia.core.parallel.build_ops import load_ops


class Words:
    """A tokenizer of a model whose texts nobody reads."""

    stop_ids = (7,)

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@pytest.fixture(scope="module", params=CONFIGS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(*hybrid(request.param), Words())


def requests(count: int) -> list[Request]:
    """Prompts of one token to more than a chunk, of which the shortest end first."""
    draw = np.random.default_rng(5)
    made = []
    for number in range(count):
        length = int(draw.choice([1, 2, 3, 4, 63, 64, 65, 130]))
        prompt = draw.integers(0, 211, length).tolist()
        settings = {"temperature": float(draw.choice([0, 1])), "n": int(draw.integers(1, 4))}
        made.append(Request(prompt, int(draw.integers(1, 20)), seed=number, id=f"r{number}",
                            **settings))  # fmt: skip
    return made


def plain_logprobs(engine: Engine, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Log-probabilities of the tokens by one pass without a cache."""
    ops, ids = load_ops("torch"), torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        hidden = forward.hidden(engine.spec, engine.params, ids, ops)
        logits = forward.logits(engine.spec, engine.params, hidden, ops)
    rows = torch.log_softmax(logits[0, len(prompt) - 1 : -1], -1)
    return rows.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def test_samples_are_those_of_whole_passes_in_any_company(engine: Engine) -> None:
    asked = requests(14)
    whole = {(c.request_id, c.sample): c for c in engine.generate(asked)}
    for request in asked:
        for number in request.samples:
            made = whole[request.name, number]
            expected = plain_logprobs(engine, list(request.prompt), made.tokens)
            # the norm per head enlarges what is rounded
            assert np.abs(expected - made.raw_logprobs).max() <= 5e-5

    def tokens(completions: list[Completion]) -> dict[tuple[str, int], list[int]]:
        return {(c.request_id, c.sample): c.tokens for c in completions}

    cramped = Engine(engine.spec, engine.params, Words(), slots=4)
    assert tokens(cramped.generate(asked[::-1])) == {k: c.tokens for k, c in whole.items()}
    for request in asked[:3]:
        alone = tokens(engine.generate([request]))
        assert alone == {k: whole[k].tokens for k in alone}


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_of_matrices_of_usual_size(name: str) -> None:
    """Within 1e-5 of a whole pass; with the matrices of the other tests half a unit in the last
    place of every weight changes more than that."""
    spec, params = hybrid(name)
    params = {name: x * (0.5 if x.ndim > 1 else 1) for name, x in params.items()}
    engine = Engine(spec, params, Words())
    for request in requests(14):
        for made in engine.generate([request]):
            expected = plain_logprobs(engine, list(request.prompt), made.tokens)
            assert np.abs(expected - made.raw_logprobs).max() <= 1e-5


def test_a_session_continues_after_samples_are_cancelled(engine: Engine) -> None:
    asked = [Request(r.prompt, 12, seed=1, id=r.id, stop_ids=()) for r in requests(6)]
    alone = {r.name: engine.generate([r])[0].tokens for r in asked}
    session, made = engine.session(4, 160, 12), {}
    tickets = [session.add(request) for request in asked[:3]]
    with torch.inference_mode():
        for step in range(100):
            if step == 4:
                session.cancel(tickets[1])
                tickets += [session.add(request) for request in asked[3:]]
            made |= {one.ticket: one.completion for one in session.step()}
            if not session.busy:
                break
    assert sorted(made) == [ticket for ticket in tickets if ticket != tickets[1]]
    assert all(one.tokens == alone[one.request_id] for one in made.values())


def test_greedy_is_transformers_generate(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the judge of greedy decoding")
    for name in CONFIGS:
        spec, params = hybrid(name)
        hub.save_model(tmp_path / name, spec, params)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.float32
        )
        engine, draw = Engine(spec, params, Words()), np.random.default_rng(2)
        for length in (1, 5, 66):
            prompt = draw.integers(0, 211, length).tolist()
            (made,) = engine.generate([Request(prompt, 10, 0.0, stop_ids=())])
            ids = torch.tensor([prompt])
            wanted = theirs.generate(
                ids, max_new_tokens=10, min_new_tokens=10, do_sample=False,
                attention_mask=torch.ones_like(ids),
            )  # fmt: skip
            assert made.tokens == wanted[0, length:].tolist()


def test_what_prompts_begin_with_is_run_once(engine: Engine) -> None:
    draw = np.random.default_rng(4)
    common, more = (draw.integers(0, 211, length).tolist() for length in (70, 20))
    asked = [
        Request(common + more * (n % 2) + draw.integers(0, 211, 1 + n).tolist(), 8, seed=n, n=2)
        for n in range(8)
    ]
    sharing = Engine(engine.spec, engine.params, Words(), shares_prefixes=True)
    tokens, hidden = list[int](), forward.hidden_and_stats

    def counted(spec, params, ids, ops, **options):
        tokens.append(ids.numel())
        return hidden(spec, params, ids, ops, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "hidden_and_stats", counted)
        made = sharing.generate(asked)
    for ours, theirs in zip(made, engine.generate(asked), strict=True):
        assert ours.tokens == theirs.tokens
        assert np.allclose(ours.raw_logprobs, theirs.raw_logprobs, atol=5e-5)
    assert sum(tokens) < 100 + 8 * 60
