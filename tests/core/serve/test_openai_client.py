"""The client of OpenAI (package openai) against the server, with an engine of each backend."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from served import NAME, RowByRowEngine, in_thread, little_engine

from sabia.core.generate.engine import Engine
from sabia.core.parallel.build_ops import load_ops
from sabia.core.serve.http_server import Server

openai = pytest.importorskip("openai", reason="pip install openai")
ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick"}]
TOOL = {"type": "function", "function": {
    "name": "add", "description": "a sum", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
    }}}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
          "additionalProperties": False}  # fmt: skip


def engine_of(backend: str) -> Engine:
    made = little_engine(512)
    if backend == "torch":
        return RowByRowEngine(made.spec, made.params, made.tokenizer)
    params = {name: value.numpy() for name, value in made.params.items()}
    return Engine(made.spec, params, made.tokenizer, ops=load_ops("jax"))


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    engine = engine_of(request.param)
    with (
        in_thread(lambda: Server(engine, NAME, 512, 8, 100, token="secret")) as url,
        openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as made,
    ):
        yield made


def test_models_are_listed_and_found(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME) == client.models.list().data[0]
    for name in ("other", "some/other", "a b"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_chat_samples_have_log_probabilities_and_repeat_by_seed(client: Any) -> None:
    options = {"model": NAME, "messages": ASKED, "max_completion_tokens": 9, "seed": 7, "n": 3,
               "temperature": 0.9, "logprobs": True, "top_logprobs": 4}  # fmt: skip
    made, again = (client.chat.completions.create(**options) for _ in range(2))
    texts = [choice.message.content for choice in made.choices]
    assert texts == [choice.message.content for choice in again.choices] and len({*texts}) == 3
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    other = client.chat.completions.create(**options | {"seed": 8})
    assert texts != [choice.message.content for choice in other.choices]
    drawn = 0
    for choice in made.choices:
        assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant"
        drawn += len(choice.logprobs.content)
        for token in choice.logprobs.content:
            assert token.logprob <= 0 and len(token.top_logprobs) == 4
            likeliest = [one.logprob for one in token.top_logprobs]
            assert likeliest == sorted(likeliest, reverse=True)
            assert token.logprob <= likeliest[0] + 1e-6  # sampled from sums in fp64
            written = bytes(token.bytes).decode(errors="replace")
            assert token.token == written or token.token.startswith("bytes:\\x")
    assert made.usage.completion_tokens == drawn
    assert made.usage.total_tokens == drawn + made.usage.prompt_tokens


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_adds_up_to_the_reply(client: Any, chat: bool) -> None:
    create = client.chat.completions.create if chat else client.completions.create
    options = {"model": NAME, "max_tokens": 24, "seed": 3, "temperature": 1.0, "n": 2}
    options |= {"messages": ASKED} if chat else {"prompt": "olá"}
    whole, texts, ends = create(**options), ["", ""], ["", ""]
    usage = None
    for piece in create(**options, stream=True, stream_options={"include_usage": True}):
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] += (choice.delta.content if chat else choice.text) or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [c.message.content if chat else c.text for c in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_completions_of_texts_and_of_ids(client: Any) -> None:
    options = {"model": NAME, "max_tokens": 5, "temperature": 0, "logprobs": 2}
    made = client.completions.create(**options, prompt=["the quick", "olá"])
    assert [choice.index for choice in made.choices] == [0, 1]
    for choice in made.choices:
        logs = choice.logprobs
        assert len(logs.tokens) == len(logs.token_logprobs) == len(logs.text_offset) <= 5
        assert logs.text_offset[0] == 0 and choice.text
        for best, p in zip(logs.top_logprobs, logs.token_logprobs, strict=True):
            assert max(best.values()) == pytest.approx(p, abs=1e-6)
    again = client.completions.create(**options, prompt=[[5, 9], [7]], echo=True)
    assert [choice.logprobs.token_logprobs[0] for choice in again.choices] == [None, None]
    stopped = client.completions.create(model=NAME, prompt="the", max_tokens=60, stop=["e", "o"],
                                        seed=1)  # fmt: skip
    assert not {"e", "o"} & {*stopped.choices[0].text}


def test_replies_fit_their_schema(client: Any) -> None:
    jsonschema, pydantic = pytest.importorskip("jsonschema"), pytest.importorskip("pydantic")
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    options: dict[str, Any] = {"model": NAME, "messages": ASKED, "seed": 1, "max_tokens": 60}
    made = client.chat.completions.create(**options, n=4, response_format=form)
    for choice in made.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    made = client.chat.completions.create(**options, response_format={"type": "json_object"})
    assert isinstance(json.loads(made.choices[0].message.content), dict)

    class Verdict(pydantic.BaseModel):
        grade: int
        fits: bool
        words: list[str]
        other: str | None

    options["max_tokens"] = 400
    parsed = client.chat.completions.parse(**options, response_format=Verdict)
    assert isinstance(parsed.choices[0].message.parsed, Verdict)


def test_conversations_with_tools(client: Any) -> None:
    call = {"id": "call_1", "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1}'}}  # fmt: skip
    talk = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "1"}]  # fmt: skip
    options = {"model": NAME, "messages": talk, "max_tokens": 4, "seed": 1}
    made = client.chat.completions.create(**options, tools=[TOOL], tool_choice="auto")
    longer = made.usage.prompt_tokens
    plain = client.chat.completions.create(**options, tools=[TOOL], tool_choice="none")
    assert longer > plain.usage.prompt_tokens  # the tool is in the prompt
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.chat.completions.create(**options, tools=[TOOL], tool_choice=choice)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "other"}, "NotFoundError", "model"),
    ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
    ({"max_tokens": 600}, "BadRequestError", ""),
    ({"messages": [{"role": "user", "content": "the " * 2000}]}, "BadRequestError", "messages"),
    ({"messages": []}, "BadRequestError", "messages"),
    ({"temperature": -1}, "BadRequestError", ""),
    ({"n": 9}, "BadRequestError", "n"),
    ({"top_logprobs": 3}, "BadRequestError", "top_logprobs"),
    ({"response_format": {"type": "xml"}}, "BadRequestError", "response_format"),
    ({"extra_body": {"min_tokens": 3}}, "BadRequestError", "min_tokens"),
]


@pytest.mark.parametrize(("change", "kind", "parameter"), WRONG)
def test_errors_are_those_of_the_client(
    client: Any, change: dict[str, Any], kind: str, parameter: str
) -> None:
    options = {"model": NAME, "messages": ASKED, "max_tokens": 4}
    with pytest.raises(getattr(openai, kind)) as caught:
        client.chat.completions.create(**options | change)
    assert (caught.value.param or "") == parameter
    assert caught.value.type == "invalid_request_error" and caught.value.body["message"]


def test_a_wrong_key_and_a_full_queue(client: Any) -> None:
    wrong = openai.OpenAI(base_url=client.base_url, api_key="other", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    engine = engine_of("torch")
    options = {"model": NAME, "prompt": ["a"], "max_tokens": 60, "n": 2}
    with in_thread(lambda: Server(engine, NAME, 512, 2, 1)) as url:
        patient = openai.OpenAI(base_url=url, api_key="any", max_retries=20)
        hasty = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
        with patient, hasty:
            outcomes = together(lambda: hasty.completions.create(**options), 12)
            limited = [one for one in outcomes if isinstance(one, openai.RateLimitError)]
            assert limited and len(limited) < 12
            assert all(int(one.response.headers["Retry-After"]) >= 1 for one in limited)
            done = together(lambda: patient.completions.create(**options), 6)
            assert [len(one.choices) for one in done] == [2] * 6


def together(call: Callable[[], Any], count: int) -> list[Any]:
    """The results or errors of calls at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(call) for _ in range(count)]
        return [future.exception() or future.result() for future in futures]
