"""Replies and figures of a server whose engine checks proposed tokens."""

import asyncio

from served import Client, little_engine, serving

from sabia.core.generate.draft.draft import Draft
from sabia.core.generate.engine import Engine
from sabia.core.serve.http_server import Server

PLAIN = "/v1/completions"


def test_proposals_change_no_reply_and_are_counted() -> None:
    engine = little_engine()
    body = {"prompt": "the quick brown the quick brown the quick", "max_tokens": 40, "n": 3,
            "ignore_eos": True, "temperature": 0, "logprobs": 2}  # fmt: skip
    texts = list[list[str]]()

    async def call(server: Server, client: Client) -> None:
        status, reply = await client.post(PLAIN, body)
        assert status == 200
        texts.append([choice["text"] for choice in reply["choices"]])
        pieces = await client.stream(PLAIN, {**body, "n": 1})
        assert "".join(one["choices"][0]["text"] for one in pieces) == texts[0][0]
        page = await client.text("/metrics")
        figures = dict(line.split() for line in page.splitlines() if line.count(" ") == 1)
        proposed, accepted = (int(figures[f"sabia_{name}_tokens_total"])
                              for name in ("proposed", "accepted"))  # fmt: skip
        assert (0 < accepted <= proposed) == (engine.draft is not None)
        assert figures["sabia_generated_tokens_total"] == "160"

    async def whole() -> None:
        async with serving(engine) as (server, client):
            await asyncio.wait_for(call(server, client), 120)

    asyncio.run(whole())
    engine.draft = Draft(3, Engine(engine.spec, engine.params, engine.tokenizer))
    asyncio.run(whole())
    assert texts[0] == texts[1]
