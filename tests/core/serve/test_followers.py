"""Sessions that follow that of a server make its steps and draw its samples."""

import asyncio
import queue
import random
import threading
from contextlib import suppress
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from served import NAME, Client, in_thread, little_engine, serving
from waiting import HANG_S

from sabia.core.generate.session import Session
from sabia.core.model.storage import hub
from sabia.core.serve.followers import Message, Others, follow, packed, served_session
from sabia.core.serve.http_server import Server

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def body(number: int) -> dict[str, object]:
    draw = random.Random(number)
    given = {"prompt": f"the quick {number}", "seed": number, "max_tokens": draw.randint(4, 60),
             "n": draw.randint(1, 3), "temperature": draw.choice([0, 1])}  # fmt: skip
    return given | draw.choice([{}, {"stop": "e"}, {"structured_outputs": {"json": SCHEMA}}])


def test_followers_draw_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, other = little_engine(), little_engine()
    ended: dict[Session, list[list[int]]] = {}
    step = Session.step

    def recorded(session: Session) -> list:
        made = step(session)
        ended.setdefault(session, []).extend(one.completion.tokens for one in made)
        return made

    monkeypatch.setattr(Session, "step", recorded)
    sent: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    session = served_session(other, 8, 128)
    follower = threading.Thread(target=follow, args=(other, session, sent.get, str))

    async def call(url: str) -> None:
        async with aiohttp.ClientSession() as http:
            client = Client(url, http)
            calls = [asyncio.create_task(client.post("/completions", body(n))) for n in range(40)]
            await asyncio.sleep(0.3)
            for task in calls[::5]:  # those in flight are cancelled
                task.cancel()
            for task in calls:
                with suppress(asyncio.CancelledError):
                    status, reply = await task
                    assert status == 200, reply

    others = Others(lambda message: sent.put(packed(message)), str)
    follower.start()
    with in_thread(lambda: Server(engine, NAME, 128, 8, 1000, others=others)) as url:
        asyncio.run(call(url))
    follower.join(HANG_S)
    assert not follower.is_alive()
    theirs = ended.pop(session)
    (ours,) = ended.values()
    assert ours == theirs and len(ours) > 30 and not session.waiting and not session.slots.active


@pytest.mark.parametrize("spoilt", [False, True])
def test_followers_have_the_new_weights_before_they_are_used(
    spoilt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = little_engine(), little_engine()
    new = {name: x.numpy() + np.float32(0.5) for name, x in engine.params.items()}
    hub.save_model(tmp_path / "w", engine.spec, new)
    sent: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    errors, met = [""] * 2, threading.Barrier(2, timeout=HANG_S)

    def agree(rank: int, error: str) -> str:
        errors[rank] = error
        met.wait()
        return next(filter(None, errors), "")

    def fails(params: object) -> dict:
        raise ValueError("no memory")

    session = served_session(other, 8, 128)
    words = other, session, sent.get, lambda error: agree(1, error)
    follower = threading.Thread(target=follow, args=words)

    def send(message: Message) -> None:
        sent.put(packed(message))

    async def call() -> None:
        others = Others(send, lambda error: agree(0, error))
        async with serving(engine, updates=tmp_path, others=others) as (_, client):
            given = {**body(1), "return_token_ids": True}
            assert (await client.post("/v1/completions", given))[0] == 200
            status, reply = await client.post("/update_weights", {"path": "w", "model": None})
            if spoilt:
                assert status == 400 and "w cannot be read (no memory)" in reply["error"]["message"]
            else:
                assert (status, reply) == (200, {"version": 1})
            status, reply = await client.post("/v1/completions", given)
            versions = reply["choices"][0]["weight_versions"]
            assert status == 200 and set(versions) == {0 if spoilt else 1}

    if spoilt:
        monkeypatch.setattr(other, "placed", fails)
    follower.start()
    asyncio.run(call())
    follower.join(HANG_S)
    assert not follower.is_alive()
    for name, x in other.params.items():
        assert (np.abs(x.numpy() - new[name]).max() == 0) != spoilt, name
