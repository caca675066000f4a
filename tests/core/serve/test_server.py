"""The server's answers are those of the engine, whole and as streams, in any company."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import aiohttp
import jsonschema
import numpy as np
import pytest
import torch
from served import NAME, Client, RowByRowEngine, little_engine, serving

from sabia.core.errors import Failed
from sabia.core.generate.chat import render
from sabia.core.generate.engine import Engine
from sabia.core.generate.reasoning import split_reasoning
from sabia.core.generate.requests import Completion, Request
from sabia.core.ops.row_adapters import RowAdapters
from sabia.core.parallel.build_ops import ops_as_served
from sabia.core.serve.http_server import Server
from sabia.core.text.tokenize.tokenizer import Tokenizer

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WORDS = ["the", "quick", "fox", "olá", "mundo", "é só", "0123", "+ =", "dog"]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return little_engine()


def run(
    engine: Engine, call: Callable[[Server, Client], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Call with a running server and its client."""

    async def whole() -> None:
        async with serving(engine, **options) as (server, client):
            await asyncio.wait_for(call(server, client), 120)

    asyncio.run(whole())


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return [*itertools.chain.from_iterable(parts)]


def asked(draw: random.Random) -> dict[str, Any]:
    """Parameters that a client may send."""
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 12), "seed": draw.randrange(1 << 40)}
    body |= {"temperature": draw.choice([0, 0.7, 1, 1.5]), "n": draw.choice([1, 1, 2, 3])}
    body |= draw.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": -1}])
    body |= draw.choice([{}, {"stop": "e"}, {"stop": ["do", "th", " "]}, {"ignore_eos": True}])
    body |= draw.choice([{}, {"presence_penalty": 1.5}, {"frequency_penalty": -0.5}])
    body |= draw.choice([{}, {"logit_bias": {"65": 4, "100": -100}}])
    return body | draw.choice([{}, {"stop_token_ids": [7, 70]}])


def expected(engine: Engine, body: dict[str, Any], prompt: list[int]) -> list[Completion]:
    """The samples that the engine gives for a body."""
    stop = body.get("stop", ())
    ends = () if body.get("ignore_eos") else engine.tokenizer.stop_ids
    return engine.generate([Request(
        prompt, body["max_tokens"], body["temperature"], max(body.get("top_k", 0), 0),
        body.get("top_p", 1.0), body.get("min_p", 0.0), body["seed"],
        (stop,) if isinstance(stop, str) else tuple(stop),
        (*ends, *body.get("stop_token_ids", ())), body["n"],
        presence_penalty=body.get("presence_penalty", 0.0),
        frequency_penalty=body.get("frequency_penalty", 0.0),
        logit_bias=tuple((int(k), v) for k, v in body.get("logit_bias", {}).items()),
    )])  # fmt: skip


def test_samples_are_those_of_the_engine(engine: Engine) -> None:
    draw = random.Random(0)
    bodies = [asked(draw) for _ in range(60)]
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 8))) for _ in bodies]

    async def call(server: Server, client: Client) -> None:
        calls = []
        for number, (body, text) in enumerate(zip(bodies, texts, strict=True)):
            given = {**body, "return_token_ids": True}
            if number % 2:
                chat = {"messages": [{"role": "user", "content": text}], "logprobs": True}
                calls.append(client.post(CHAT, {**given, **chat}))
            else:
                calls.append(client.post(PLAIN, {**given, "prompt": text, "logprobs": 2}))
        replies = await asyncio.gather(*calls)
        for number, (status, reply) in enumerate(replies):
            assert status == 200, reply
            messages = [{"role": "user", "content": texts[number]}]
            text = render(messages, engine.tokenizer, True) if number % 2 else texts[number]
            ids = engine.tokenizer.encode(text)
            ours = expected(engine, bodies[number], ids)
            assert [c["index"] for c in reply["choices"]] == list(range(len(ours)))
            for choice, sample in zip(reply["choices"], ours, strict=True):
                assert choice["token_ids"] == sample.tokens
                assert choice["finish_reason"] == sample.finish_reason
                if number % 2:
                    logs = [one["logprob"] for one in choice["logprobs"]["content"]]
                    assert choice["message"]["content"].strip() in sample.text
                else:
                    assert choice["text"] == sample.text
                    logs = choice["logprobs"]["token_logprobs"]
                    assert len(choice["logprobs"]["top_logprobs"]) == len(logs)
                assert np.allclose(logs, sample.raw_logprobs, atol=1e-4)
            drawn = sum(len(sample.tokens) for sample in ours)
            assert reply["usage"] == {"prompt_tokens": len(ids), "completion_tokens": drawn,
                                      "total_tokens": len(ids) + drawn}  # fmt: skip

    run(engine, call)


def test_streams_add_up_to_whole_replies(engine: Engine) -> None:
    draw = random.Random(1)
    bodies = [{**asked(draw), "max_tokens": 30} for _ in range(24)]

    async def call(server: Server, client: Client) -> None:
        seen = np.zeros(2)  # pieces and choices
        for number, body in enumerate(bodies):
            text = " ".join(draw.choices(WORDS, k=4))
            if number % 2:
                path, given = CHAT, {"messages": [{"role": "user", "content": text}],
                                     "logprobs": True, "top_logprobs": 1}  # fmt: skip
            else:
                path, given = PLAIN, {"prompt": [text, text + " dog"], "logprobs": 1}
            given = {**body, **given, "return_token_ids": True}
            usage = {"stream_options": {"include_usage": True}}
            (_, whole), pieces = await asyncio.gather(
                client.post(path, given), client.stream(path, {**given, **usage})
            )
            *pieces, last = pieces
            assert last["usage"] == whole["usage"] and last["choices"] == []
            assert {one["usage"] for one in pieces} == {None}
            seen += np.array([len(pieces), len(whole["choices"])])
            for choice in whole["choices"]:
                mine = [p["choices"][0] for p in pieces]
                mine = [one for one in mine if one["index"] == choice["index"]]
                assert joined(one["token_ids"] for one in mine) == choice["token_ids"]
                assert [one["finish_reason"] for one in mine][:-1] == [None] * (len(mine) - 1)
                assert mine[-1]["finish_reason"] == choice["finish_reason"]
                if path == PLAIN:
                    assert "".join(one["text"] for one in mine) == choice["text"]
                    for name, values in choice["logprobs"].items():
                        parts = joined(one["logprobs"][name] for one in mine)
                        if name == "top_logprobs":
                            assert len(parts) == len(values)
                        elif name == "token_logprobs":
                            assert np.allclose(parts, values, atol=1e-4)
                        else:
                            assert parts == values
                else:
                    assert mine[0]["delta"]["role"] == "assistant"
                    said = "".join(one["delta"]["content"] for one in mine)
                    assert said.strip() == choice["message"]["content"].strip()
                    parts = joined(one["logprobs"]["content"] for one in mine)
                    assert len(parts) == len(choice["logprobs"]["content"])
        assert seen[0] > 3 * seen[1]

    run(engine, call)


def test_an_echo_gives_the_log_probabilities_of_the_prompt(engine: Engine) -> None:
    texts = ["the quick brown fox", "olá mundo, é só um teste", "0"]

    async def call(server: Server, client: Client) -> None:
        body = {"prompt": texts, "echo": True, "logprobs": 3, "max_tokens": 0, "temperature": 0}
        status, reply = await client.post(PLAIN, body)
        assert status == 200 and reply["usage"]["completion_tokens"] == 0
        for text, choice in zip(texts, reply["choices"], strict=True):
            ids, spans = engine.tokenizer.encode_with_offsets(text)
            logs = choice["logprobs"]
            assert choice["text"] == text and logs["text_offset"] == [start for start, _ in spans]
            assert logs["token_logprobs"][0] is None and logs["top_logprobs"][0] is None
            for end in range(1, len(ids)):
                (sample,) = engine.generate([Request(ids[:end], 1, 0.0)])
                likeliest = max(logs["top_logprobs"][end].values())
                assert likeliest == pytest.approx(sample.raw_logprobs[0], abs=1e-4)
                if sample.tokens[0] == ids[end]:
                    assert logs["token_logprobs"][end] == pytest.approx(likeliest, abs=1e-4)
                assert logs["token_logprobs"][end] <= likeliest + 1e-4
        _, one = await client.post(PLAIN, {**body, "prompt": texts[0], "max_tokens": 2})
        assert one["choices"][0]["text"].startswith(texts[0])
        logs = one["choices"][0]["logprobs"]["token_logprobs"]
        before = reply["choices"][0]["logprobs"]["token_logprobs"]
        assert np.allclose(logs[1:-2], before[1:], atol=1e-4) and len(logs) == len(before) + 2

    run(engine, call)


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (PLAIN, {"model": "other", "prompt": "a"}, 404, "model"),
    (PLAIN, {}, 400, "prompt"),
    (PLAIN, {"prompt": []}, 400, "prompt"),
    (PLAIN, {"prompt": [1, "a"]}, 400, "prompt"),
    (PLAIN, {"prompt": [999_999]}, 400, ""),
    (PLAIN, {"prompt": ""}, 400, ""),
    (PLAIN, {"prompt": "\ud800"}, 400, "prompt"),
    (PLAIN, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (PLAIN, {"prompt": "a", "max_tokens": 4096}, 400, ""),
    (PLAIN, {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
    (PLAIN, {"prompt": "a", "n": 9}, 400, "n"),
    (PLAIN, {"prompt": "a", "n": True}, 400, "n"),
    (PLAIN, {"prompt": "a", "temperature": -1}, 400, ""),
    (PLAIN, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    (PLAIN, {"prompt": "a", "top_p": 0}, 400, ""),
    (PLAIN, {"prompt": "a", "stop": [1]}, 400, "stop"),
    (PLAIN, {"prompt": "a", "stop": [""]}, 400, ""),
    (PLAIN, {"prompt": "a", "logprobs": 21}, 400, ""),
    (PLAIN, {"prompt": "a", "return_routed_experts": True}, 400, "return_routed_experts"),
    (PLAIN, {"prompt": "a", "best_of": 4}, 400, "best_of"),
    (PLAIN, {"prompt": "a", "presence_penalty": 2.5}, 400, ""),
    (PLAIN, {"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias"),
    (PLAIN, {"prompt": "a", "logit_bias": {"999": 1}}, 400, ""),
    (PLAIN, {"prompt": "a", "repetition_penalty": 1.1}, 400, "repetition_penalty"),
    (PLAIN, {"prompt": "a", "colour": "red"}, 400, "colour"),
    (PLAIN, {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"content": "a"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 200}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400,
     "top_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2,
            "max_completion_tokens": 2}, 400, "max_tokens"),
    *[(CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}, 400, "tools")
      for tool in ("a", {"type": "function"}, {"type": "function", "function": {"name": 1}},
                   {"function": {"name": "a"}},
                   {"type": "function", "function": {"name": "a", "parameters": "b"}})],
    *[(CHAT, {"messages": [{"role": "user", "content": "a"}], "response_format": form}, 400,
       "response_format") for form in (
        {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
        {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 70_000]}}})],
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "response_format":
            {"type": "json_object"}}, 400, ""),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "response_format":
            {"type": "json_object"}}, 400, "response_format"),
    (PLAIN, {"prompt": "a", "structured_outputs": {"regex": "(a"}}, 400, "structured_outputs"),
    (PLAIN, {"prompt": "a", "structured_outputs": {"choice": []}}, 400, "structured_outputs"),
    (PLAIN, {"prompt": "a", "structured_outputs": {"regex": "a", "json": {}}}, 400,
     "structured_outputs"),
]  # fmt: skip


def test_what_cannot_be_honoured_is_refused_by_name(engine: Engine) -> None:
    async def call(server: Server, client: Client) -> None:
        for path, body, status, parameter in REFUSED:
            given, reply = await client.post(path, body)
            error = reply["error"]
            assert (given, error["param"] or "") == (status, parameter), (body, error)
            assert "\n" not in error["message"] and error["message"]
        for raw in (b"{", b"[1]", b"[" * 100_000, b"\xff", b'{"temperature": NaN}'):
            headers = {"Content-Type": "application/json"}
            async with client.session.post(client.url + PLAIN, data=raw, headers=headers) as reply:
                assert reply.status == 400 and "JSON" in (await reply.json())["error"]["message"]
        data = f'{{"model": "{NAME}", "prompt": "a", "temperature": 1e999}}'
        async with client.session.post(client.url + PLAIN, data=data, headers=headers) as reply:
            assert (await reply.json())["error"]["param"] == "temperature"
        for path, max_tokens, code in ((PLAIN, 4096, "context_length_exceeded"), ("/x", 1, None)):
            _, reply = await client.post(path, {"prompt": "a", "max_tokens": max_tokens})
            assert reply["error"]["code"] == code
        async with client.session.post(client.url + PLAIN, data=b"{}") as reply:
            assert reply.status == 415
        large = {"prompt": "a" * (9 << 20)}
        status, reply = await client.post(PLAIN, large)
        assert status == 413 and "8 MiB" in reply["error"]["message"]
        neutral = {"repetition_penalty": 1, "logit_bias": {}, "user": "me", "suffix": None}
        assert (await client.post(PLAIN, {"prompt": "a", **neutral}))[0] == 200
        assert (await client.post("/v1/embeddings", {}))[0] == 404

    run(engine, call)


SCHEMA = {"type": "object", "required": ["n", "names"], "properties": {
    "n": {"type": "integer", "minimum": 0},
    "names": {"type": "array", "items": {"enum": ["a", "é"]}}, "more": {"type": "string"},
}}  # fmt: skip


def test_samples_are_bound_to_schemas_patterns_and_choices(engine: Engine) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    turn = {"messages": [{"role": "user", "content": "fox"}], "response_format": form, "n": 3}

    async def call(server: Server, client: Client) -> None:
        for most in (18, 19, 30, 70):
            body = {**turn, "max_tokens": most, "seed": most, "temperature": 1.5}
            status, reply = await client.post(CHAT, body)
            assert status == 200, reply
            for choice in reply["choices"]:
                jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
            assert reply["usage"]["completion_tokens"] <= 3 * most
        asked = {"prompt": "the", "temperature": 1.5, "n": 3, "max_tokens": 20}
        for outputs, pattern in (({"regex": r"\d{3,}\."}, r"\d{3,}\."),
                                 ({"choice": ["olá", "fox"]}, "olá|fox"),
                                 ({"json": {"type": "integer"}}, r"-?\d+")):  # fmt: skip
            reply = (await client.post(PLAIN, {**asked, "structured_outputs": outputs}))[1]
            assert all(re.fullmatch(pattern, one["text"]) for one in reply["choices"]), reply

    run(engine, call)


def test_reasoning_may_come_before_what_is_bound(engine: Engine) -> None:
    template = ("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}"
                "{{ start }}{% endif %}{# <think></think> #}")  # fmt: skip
    known = engine.tokenizer
    for start in ("<think>\n", ""):
        tokenizer = Tokenizer(known.definition, known.config, template, known.stop_ids)
        thinking = RowByRowEngine(engine.spec, engine.params, tokenizer)
        body = {"messages": [{"role": "user", "content": "fox"}], "n": 8, "max_tokens": 60,
                "temperature": 1.5, "response_format": {"type": "json_object"},
                "return_token_ids": True, "logit_bias": {known.token_id("<"): 10},
                "chat_template_kwargs": {"start": start}, "seed": 1}  # fmt: skip

        async def call(server: Server, client: Client, body: dict[str, Any] = body) -> None:
            status, reply = await client.post(CHAT, body)
            assert status == 200, reply
            start = body["chat_template_kwargs"]["start"]
            reasoned = list[bool]()
            for choice in reply["choices"]:
                text = known.decode(choice["token_ids"])
                answer, reasoning = split_reasoning(text, "</think>" if start else "")
                assert answer and isinstance(json.loads(answer), dict)
                reasoned.append(bool(reasoning))
            assert all(reasoned) if start else 0 < sum(reasoned) < len(reasoned), (start, reasoned)

        run(thinking, call)


def test_a_token_is_needed_where_there_is_one(engine: Engine) -> None:
    async def call(server: Server, client: Client) -> None:
        body = {"prompt": "a", "max_tokens": 1}
        for value, status in ((None, 401), ("Bearer other", 401), ("Bearer sécret", 200)):
            headers = {"Authorization": value} if value else {}
            assert (await client.post(PLAIN, body, headers=headers))[0] == status

    run(engine, call, token="sécret")


def test_requests_past_the_queue_are_sent_away(engine: Engine) -> None:
    async def call(server: Server, client: Client) -> None:
        body = {"prompt": "the quick", "max_tokens": 100, "ignore_eos": True, "n": 2}
        calls = [asyncio.create_task(client.post(PLAIN, body)) for _ in range(12)]
        statuses = [(await one)[0] for one in calls]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 4
        assert (await client.post(PLAIN, {**body, "prompt": ["a"] * 5}))[0] == 400
        page = await client.text("/metrics")
        assert f'status="429"}} {statuses.count(429)}\n' in page
        assert "sabia_requests_waiting 0\n" in page and "sabia_samples_running 0\n" in page
        drawn = 200 * statuses.count(200)
        assert f"sabia_generated_tokens_total {drawn}\n" in page

    run(engine, call, samples=2, queue=4)


def test_a_request_names_its_adapter_as_the_model(engine: Engine) -> None:
    draw = np.random.default_rng(2)
    shapes = {t.name: t.shape for t in engine.spec.tensors() if t.name.endswith("attn.v")}
    pairs = {name: (torch.from_numpy(draw.standard_normal((2, wide)).astype(np.float32)),
                    torch.from_numpy(draw.standard_normal((high, 2)).astype(np.float32)))
             for name, (high, wide) in shapes.items()}  # fmt: skip
    ops = ops_as_served("torch", engine.spec, RowAdapters({"tutor": pairs}))
    adapted = RowByRowEngine(engine.spec, engine.params, engine.tokenizer, ops=ops)
    params = {name: p + pairs[name][1] @ pairs[name][0] if name in pairs else p
              for name, p in engine.params.items()}  # fmt: skip
    whole = RowByRowEngine(engine.spec, params, engine.tokenizer)

    async def call(server: Server, client: Client) -> None:
        listed = json.loads(await client.text("/v1/models"))["data"]
        assert [(one["id"], one.get("parent")) for one in listed] == [
            (NAME, None), ("tutor", NAME)
        ]  # fmt: skip
        body = {"prompt": "the quick", "max_tokens": 12, "temperature": 1, "seed": 5, "n": 2}
        names = [NAME, "tutor", "tutor", NAME]
        calls = [client.post(PLAIN, {**body, "model": name, "return_token_ids": True})
                 for name in names]  # fmt: skip
        for name, (status, reply) in zip(names, await asyncio.gather(*calls), strict=True):
            assert status == 200 and reply["model"] == name
            ids = engine.tokenizer.encode(body["prompt"])
            ours = expected(engine if name == NAME else whole, body, ids)
            assert [c["token_ids"] for c in reply["choices"]] == [s.tokens for s in ours]
        status, reply = await client.post(PLAIN, {**body, "model": "other"})
        assert status == 404 and "little or tutor" in reply["error"]["message"]

    run(adapted, call)


def test_aborted_requests_leave_the_others_alone(engine: Engine) -> None:
    draw = random.Random(3)
    body = {"max_tokens": 40, "ignore_eos": True, "temperature": 1, "n": 2}

    async def call(server: Server, client: Client) -> None:
        async def one(number: int) -> None:
            given = {**body, "prompt": f"the {number}", "seed": number, "return_token_ids": True}
            if number % 5 == 0:
                wait = aiohttp.ClientTimeout(total=draw.uniform(0.001, 0.1))
                with pytest.raises(asyncio.TimeoutError):
                    await client.post(PLAIN, {**given, "max_tokens": 100}, timeout=wait)
                return
            _, reply = await client.post(PLAIN, given)
            ids = engine.tokenizer.encode(given["prompt"])
            ours = expected(engine, given, ids)
            assert [c["token_ids"] for c in reply["choices"]] == [s.tokens for s in ours]

        await asyncio.gather(*map(one, range(30)))
        while server.thread.load.running or server.thread.queued:
            await asyncio.sleep(0.01)
        assert not server.thread._jobs and not server.thread._session.busy

    run(engine, call)


def test_an_error_of_the_engine_ends_the_server(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def whole() -> None:
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server = Server(engine, "little", 128, 4, 10)
        monkeypatch.setattr(server.thread._session, "_decode", lambda: 1 / 0)
        task = asyncio.create_task(server.run("127.0.0.1", 0, ready.set_result))
        async with aiohttp.ClientSession() as session:
            client = Client(f"http://127.0.0.1:{await ready}", session)
            body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
            replies = await asyncio.gather(*(client.post(PLAIN, body) for _ in range(8)))
            assert [status for status, _ in replies] == [500] * 8
            assert "ZeroDivisionError" in replies[0][1]["error"]["message"]
            with pytest.raises(Failed, match="ZeroDivisionError"):
                await task

    asyncio.run(whole())


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_thousand_requests_of_which_some_are_aborted_and_malformed(engine: Engine) -> None:
    draw = random.Random(7)
    counts = {"right": 0, "aborted": 0, "malformed": 0}

    async def call(server: Server, client: Client) -> None:
        together = asyncio.Semaphore(64)

        async def one(number: int) -> None:
            body = {**asked(draw), "max_tokens": draw.randint(1, 40), "return_token_ids": True}
            body["prompt"] = " ".join(draw.choices(WORDS, k=draw.randint(1, 20)))
            kind = draw.random()
            async with together:
                if kind < 0.05:
                    wait = aiohttp.ClientTimeout(total=draw.uniform(0.001, 0.05))
                    body |= {"max_tokens": 60, "ignore_eos": True, "stop": []}
                    with contextlib.suppress(asyncio.TimeoutError):
                        await client.post(PLAIN, body, timeout=wait)
                    counts["aborted"] += 1
                elif kind < 0.06:
                    status, _ = await client.post(PLAIN, {**body, "temperature": "hot"})
                    assert status == 400
                    counts["malformed"] += 1
                else:
                    status, reply = await client.post(PLAIN, body)
                    assert status == 200, reply
                    ours = await asyncio.to_thread(
                        expected, engine, body, engine.tokenizer.encode(body["prompt"])
                    )
                    given = [choice["token_ids"] for choice in reply["choices"]]
                    assert given == [sample.tokens for sample in ours]
                    counts["right"] += 1

        await asyncio.gather(*map(one, range(300)))  # what is allocated once
        before = resident_bytes()
        await asyncio.gather(*map(one, range(1000)))
        while server.thread.load.running or server.thread.queued:
            await asyncio.sleep(0.01)
        assert resident_bytes() < 1.05 * before
        assert not server.thread._jobs and not server.thread._open

    async def whole() -> None:
        async with serving(engine, samples=64) as (server, client):
            await call(server, client)

    asyncio.run(whole())
    assert counts["right"] > 1100 and counts["aborted"] > 30 and counts["malformed"] > 3
