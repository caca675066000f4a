"""Sessions that follow that of a server make its steps and draw its samples."""

import asyncio
import queue
import random
import threading
from contextlib import suppress

import aiohttp
import pytest
from served import NAME, Client, in_thread, little_engine

from sabia.core.generate.session import Session
from sabia.core.serve.followers import follow, packed, served_session
from sabia.core.serve.http_server import Server
from sabia.core.serve.response_format import ResponseFormats

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
    formats = ResponseFormats(other.tokenizer, other.spec.vocab_size)
    follower = threading.Thread(target=follow, args=(session, sent.get, formats))

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

    def share(changes: object) -> None:
        sent.put(packed(changes))

    follower.start()
    with in_thread(lambda: Server(engine, NAME, 128, 8, 1000, share=share)) as url:
        asyncio.run(call(url))
    follower.join(60)
    assert not follower.is_alive()
    theirs = ended.pop(session)
    (ours,) = ended.values()
    assert ours == theirs and len(ours) > 30 and not session.waiting and not session.slots.active
