"""Budgets of reasoning, in the engine and in the server."""

import asyncio
import json
from typing import Any

import pytest
from served import Client, RowByRowEngine, little_engine, serving

from sabia.core.errors import UsageError
from sabia.core.generate.engine import Engine
from sabia.core.generate.reasoning import split_reasoning
from sabia.core.generate.requests import Request
from sabia.core.generate.thinking import ThinkingBudget, Thought, thinking_budget
from sabia.core.text.tokenize.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TEMPLATE = ("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}"
            "{{ start }}{% endif %}{# <think></think> #}")  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    plain = little_engine()
    known = plain.tokenizer
    tokenizer = Tokenizer(known.definition, known.config, TEMPLATE, known.stop_ids)
    return RowByRowEngine(plain.spec, plain.params, tokenizer)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reasoning_is_closed_at_its_budget_by_tokens_that_are_marked(
    engine: Engine, temperature: float
) -> None:
    closing = engine.tokenizer.encode("</think>")
    assert len(closing) > 1
    requests, plain = [], []
    for number, most in enumerate((1, 5, 9, 40)):
        budget = ThinkingBudget(most, "", "</think>", tuple(closing))
        ids = [3 + number, 9]
        requests.append(Request(ids, 30, temperature, seed=number, n=2, stop_ids=(), id=str(number),
                                thinking=budget, top_k=20, frequency_penalty=0.5))  # fmt: skip
        plain.append(Request(ids, 30, temperature, seed=number, n=2, stop_ids=(), id=str(number),
                             top_k=20, frequency_penalty=0.5))  # fmt: skip
    alone = [one for request in requests for one in engine.generate([request])]
    together, without = engine.generate(requests), engine.generate(plain)
    for sample, same, free in zip(together, alone, without, strict=True):
        assert (sample.tokens, sample.forced) == (same.tokens, same.forced)
        most = requests[int(sample.request_id)].thinking.tokens  # type: ignore[union-attr]
        assert sample.finish_reason == "length" and len(sample.tokens) == 30
        if most == 40:
            assert sample.forced == [] and sample.tokens == free.tokens
            continue
        assert sample.forced == list(range(most, most + len(closing)))
        assert [sample.tokens[place] for place in sample.forced] == closing
        assert sample.tokens[:most] == free.tokens[:most] and free.forced == []
        assert all(sample.logprobs[place] == 0 for place in sample.forced)
        # the model's own log-probability of a forced token is that of a prompt that ends before it
        again = Request([*requests[int(sample.request_id)].prompt, *sample.tokens[: most + 1]], 1,
                        echo=True, id="again")  # fmt: skip
        with engine_session(engine) as session:
            session.add(again)
            (ended,) = session.step()
        assert ended.echo.logprobs[-1] == pytest.approx(sample.raw_logprobs[most], abs=1e-4)


class engine_session:
    """A session of an engine, in its context."""

    def __init__(self, engine: Engine) -> None:
        self.session = engine.session(1, 128, 8)
        self.context = self.session.runner.computing()

    def __enter__(self) -> Any:
        self.context.__enter__()
        return self.session

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


def test_a_sample_may_end_at_its_budget_and_only_reasoning_has_one(engine: Engine) -> None:
    ends = ThinkingBudget(6, "", "</think>", ())
    (sample,) = engine.generate([Request([3], 30, seed=1, stop_ids=(), thinking=ends)])
    assert (len(sample.tokens), sample.finish_reason, sample.forced) == (6, "length", [])
    # what does not begin with the opening text has no reasoning
    opens = ThinkingBudget(6, "<think>", "</think>", (5,))
    (sample,) = engine.generate([Request([3], 30, seed=1, stop_ids=(), thinking=opens)])
    assert (len(sample.tokens), sample.forced) == (30, [])
    # what does begin with it has: the first tokens are made likely one after another
    thought, ids = Thought(opens), engine.tokenizer.encode("<think>a b c d e f g")
    for end in range(1, len(ids) + 1):
        thought.take(ids[:end], engine.tokenizer.decode)
        if thought.pending:
            break
    assert thought.pending == [5] and end == 6
    ids = engine.tokenizer.encode("<think></think>a b c d e f g h")
    budget = ThinkingBudget(len(engine.tokenizer.encode("<think></think>")) + 1, "<think>",
                            "</think>", (5,))  # fmt: skip
    closed = Thought(budget)
    for end in range(1, len(ids) + 1):
        closed.take(ids[:end], engine.tokenizer.decode)
    assert not closed.pending and not closed.open
    with pytest.raises(UsageError, match="0 tokens"):
        thinking_budget(0, "<think>\n", engine.tokenizer, True)
    with pytest.raises(UsageError, match="has no reasoning"):
        thinking_budget(4, "a", little_engine().tokenizer, True)


def test_a_request_to_the_server_has_a_budget(engine: Engine) -> None:
    closing = engine.tokenizer.encode("</think>")

    def text_of(choice: dict[str, Any]) -> str:
        return engine.tokenizer.decode(choice["token_ids"])

    async def call(client: Client) -> None:
        body = {"messages": [{"role": "user", "content": "fox"}], "n": 3, "max_tokens": 40,
                "temperature": 1.0, "seed": 1, "return_token_ids": True, "ignore_eos": True,
                "thinking_budget": 7, "chat_template_kwargs": {"start": "<think>\n"}}  # fmt: skip
        status, reply = await client.post(CHAT, body)
        assert status == 200, reply
        for choice in reply["choices"]:
            places = choice["forced_tokens"]
            assert places == list(range(7, 7 + len(closing)))
            assert [choice["token_ids"][place] for place in places] == closing
            answer, reasoning = split_reasoning(text_of(choice), "</think>")
            assert answer and reasoning
        (*_, last) = [c for p in await client.stream(CHAT, {**body, "n": 1}) for c in p["choices"]]
        assert last["forced_tokens"] == reply["choices"][0]["forced_tokens"]
        _, ended = await client.post(CHAT, {**body, "thinking_overflow": "length"})
        assert [(len(c["token_ids"]), c["finish_reason"], c["forced_tokens"])
                for c in ended["choices"]] == [(7, "length", [])] * 3  # fmt: skip
        bound = {**body, "response_format": {"type": "json_object"}, "max_tokens": 60}
        _, reply = await client.post(CHAT, bound)
        answers = [split_reasoning(text_of(c), "</think>")[0] for c in reply["choices"]]
        assert all(isinstance(json.loads(answer or ""), dict) for answer in answers)
        changes: list[dict[str, Any]] = [{"thinking_budget": 0}, {"thinking_overflow": "stop"}]
        changes += [{"thinking_budget": "a"}, {"structured_outputs": {"regex": "a"}}]
        for change in changes:
            assert (await client.post(CHAT, {**body, **change}))[0] == 400, change

    async def whole() -> None:
        async with serving(engine) as (_, client):
            await asyncio.wait_for(call(client), 120)

    asyncio.run(whole())
