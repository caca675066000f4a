"""A server of a small random model in this process, and its client."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from sabia.core.generate import engine, session
from sabia.core.generate.engine import Engine
from sabia.core.generate.pages import Begun, PageTable
from sabia.core.generate.runner.interface import Runner
from sabia.core.generate.runner.runner_torch import TorchRunner
from sabia.core.generate.session import Session
from sabia.core.generate.slots import Waiting
from sabia.core.ops.kv_cache import KVCache
from sabia.core.serve.followers import Others
from sabia.core.serve.http_server import Server
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

TEXT = ["the quick brown fox jumps over the lazy dog 0123456789 + =", "olá mundo, é só um teste"]
NAME = "little"


class RowByRow(TorchRunner):
    """Computes each row apart, so that other rows cannot change its last bits: samples are exactly
    those of the row alone."""

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, adapters: np.ndarray
    ) -> torch.Tensor:
        rows, experts = [], []
        for row in range(len(ids)):
            one = slice(row, row + 1)
            layers = [{name: x[one] for name, x in layer.items()} for layer in cache.layers]
            part = KVCache(layers, rings=cache.rings)
            rows.append(super()._hidden(ids[one], positions[one], part, adapters[one]))
            experts.append(self.experts)
        if self.records:
            self.experts = np.concatenate(experts)
        return torch.cat(rows)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(RowByRow, self)._logits(row[None]) for row in hidden])


class OneByOne(Session):
    """Runs the prompt of one request at a time."""

    def _next_group(self) -> tuple[list[Waiting], list[Begun]] | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "PREFILL_TOKENS", 0)
            return super()._next_group()


class RowByRowEngine(Engine):
    """An engine that computes each row apart."""

    def session(self, *sizes: int, **options: bool) -> Session:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "Session", OneByOne)
            return super().session(*sizes, **options)

    def runner(self, capacity: int, context: int, table: PageTable) -> Runner:
        slots = self._row_slots(context)
        return RowByRow(self, capacity, slots, table.size, slack=self._slack)


def little_engine(context: int = 128) -> Engine:
    """An engine whose samples are texts without a meaning."""
    tokenizer = train_bpe(TEXT * 10, 320)
    config = new_config(hidden=64, layers=2, vocab=tokenizer.vocab_size, heads=4, kv_heads=2,
                        context=context)  # fmt: skip
    spec, draw = from_config(config), np.random.default_rng(0)
    params = {
        t.name: np.ones(t.shape, np.float32)
        if t.init.kind == "ones"
        else (draw.standard_normal(t.shape) * t.init.std * 6).astype(np.float32)
        for t in spec.tensors()
    }
    return RowByRowEngine(spec, params, tokenizer)


class Client:
    """Sends JSON to a server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """(status, the JSON of the reply); the model is named if the body has none."""
        if isinstance(body, dict):
            body = {"model": NAME, **body}
        async with self.session.post(f"{self.url}{path}", json=body, **options) as reply:
            return reply.status, await reply.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The objects of a stream, which must end as it should."""
        body = {"model": NAME, "stream": True, **body}
        async with self.session.post(f"{self.url}{path}", json=body) as reply:
            assert reply.status == 200 and reply.content_type == "text/event-stream"
            lines = [line async for line in reply.content]
        assert all(line.startswith(b"data: ") or line == b"\n" for line in lines)
        *objects, last = (line[6:].strip() for line in lines if line != b"\n")
        assert last == b"[DONE]"
        return [json.loads(one) for one in objects]

    async def text(self, path: str) -> str:
        """The text at a path."""
        async with self.session.get(f"{self.url}{path}") as reply:
            return await reply.text()


@asynccontextmanager
async def serving(
    engine: Engine,
    samples: int = 8,
    queue: int = 1000,
    token: str = "",
    updates: Path | None = None,
    others: Others | None = None,
) -> AsyncIterator[tuple[Server, Client]]:
    """A running server and its client."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    sizes = engine.spec.max_positions, samples, queue
    server = Server(engine, NAME, *sizes, token, updates, others)
    task = asyncio.create_task(server.run("127.0.0.1", 0, ready.set_result))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        try:
            yield server, Client(f"http://127.0.0.1:{ready.result()}", http)
        finally:
            task.cancel()
            await asyncio.wait([task])
            server.thread.join()


@contextmanager
def in_thread(make: Callable[[], Server]) -> Iterator[str]:
    """The URL, up to /v1, of a server that is made and runs in a thread."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []

    def started(port: int) -> None:
        ports.append(port)
        ready.set()

    async def run() -> None:
        await make().run("127.0.0.1", 0, started)

    task = loop.create_task(run())

    def work() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield f"http://127.0.0.1:{ports[0]}/v1"
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
