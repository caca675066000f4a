"""The HTTP server: an OpenAI-compatible endpoint over the engine of this process.

Bodies must be `application/json`: a page of another origin cannot send that to a server on loopback
without asking first (CORS), and is not answered.
"""

import asyncio
import hmac
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

from aiohttp import web

from sabia.core import notes, stop
from sabia.core.errors import Failed, Interrupted, UsageError
from sabia.core.generate.engine import Engine
from sabia.core.model.routing import Routing
from sabia.core.serve.followers import Others, served_session
from sabia.core.serve.protocol import (
    NO_MODEL,
    Asked,
    Limits,
    Rejected,
    parse_chat,
    parse_completion,
)
from sabia.core.serve.replies import Json, Reply, error_body
from sabia.core.serve.response_format import ResponseFormats
from sabia.core.serve.token_texts import TokenTexts
from sabia.core.serve.weight_updates import WeightUpdates
from sabia.core.serve.worker import Done, EngineThread, Event, Failure, Progress, Work
from sabia.core.text.tokenize.tokenizer import Tokenizer

BODY_BYTES = 8 << 20
POLL_S = 0.05
ENDED = "stopped by a signal; the running requests were finished"
RETRY_S = 1.0  # in Retry-After, before a request has been answered
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Parser = Callable[[bytes, str, Tokenizer, Limits, ResponseFormats], Asked]


class Server:
    """Answers requests for one model. queue: requests that may wait. updates: the folder from
    which clients may load other weights; None forbids it. others: see EngineThread."""

    def __init__(self, engine: Engine, name: str, context: int, samples: int, queue: int,
                 token: str = "", updates: Path | None = None,
                 others: Others | None = None) -> None:  # fmt: skip
        self.engine, self.name, self.token = engine, name, token
        spec = engine.spec
        given = engine.adapters, Routing.of(spec) is not None
        self.limits = Limits(context, samples, queue, spec.vocab_size, *given)
        self.answered: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.started = time.time()
        self._texts = TokenTexts(engine.tokenizer)
        self._formats = ResponseFormats(engine.tokenizer, engine.spec.vocab_size)
        self._ending = asyncio.Event()
        self._open = 0  # calls that have not been answered
        self._seconds = RETRY_S  # of an answer, smoothed
        self._failure = ""
        session = served_session(engine, samples, context)
        self.thread = EngineThread(session, asyncio.get_running_loop(), self._failed, others)
        self._updates: WeightUpdates | None = None
        if updates:
            self._updates = WeightUpdates(engine, self.thread, updates, self._body)

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._guarded])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._one_model)
        app.router.add_post("/v1/chat/completions", partial(self._generate, parse_chat))
        app.router.add_post("/v1/completions", partial(self._generate, parse_completion))
        if self._updates:
            self._updates.add_to(app)
        return app

    async def run(self, host: str, port: int, ready: Callable[[int], None]) -> None:
        """Serve until a stop signal, then finish what runs. ready: gets the port."""
        runner = web.AppRunner(self.application(), handler_cancellation=True, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, host, port, shutdown_timeout=1.0)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise UsageError(f"--port: cannot listen on {host}:{port} ({error.strerror})") from None
        self.thread.start()
        ready(runner.addresses[0][1])
        try:
            while not (stop.requested() or self._failure):
                await asyncio.sleep(POLL_S)
            self._ending.set()
            self.thread.resume()
            self.thread.refuse_waiting()
            while self._open and not self._failure:
                await asyncio.sleep(POLL_S)
        finally:
            self.thread.end()
            await runner.cleanup()
            await asyncio.to_thread(self.thread.join)
        if self._failure:
            raise Failed(self._failure)
        raise Interrupted(ENDED)

    def _failed(self, message: str) -> None:
        self._failure = message

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token, count the answer, and give errors the form of the API."""
        status = 500
        try:
            self._check_token(request)
            response = await handler(request)
            status = response.status
            return response
        except Rejected as error:
            status, headers = error.status, {}
            if isinstance(error, _Busy):
                headers["Retry-After"] = str(max(1, round(self._seconds)))
            body = error_body(str(error), status, error.parameter, error.code)
            return web.json_response(body, status=status, headers=headers)
        except web.HTTPException as error:
            status = error.status
            if status == 413:
                text = f"the body is larger than {BODY_BYTES >> 20} MiB"
            else:
                text = f"{request.method} {request.path}: {error.reason}"
            return web.json_response(error_body(text, status), status=status)
        except Exception as error:  # of any kind, of a template say: the server goes on
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            notes.warn(f"{request.path}: {text}")
            return web.json_response(error_body(text, status), status=status)
        finally:
            resource = request.match_info.route.resource
            self.answered[resource.canonical if resource else "other", status] += 1

    def _check_token(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "")
        expected = f"Bearer {self.token}"
        if self.token and not hmac.compare_digest(given.encode(), expected.encode()):
            message = "the token is missing or wrong (Authorization: Bearer TOKEN)"
            raise Rejected(message, "", 401, "invalid_api_key")

    async def _health(self, _: web.Request) -> web.Response:
        status = 503 if self._ending.is_set() or self._failure else 200
        return web.json_response({"status": "ok" if status == 200 else "ending"}, status=status)

    async def _metrics(self, _: web.Request) -> web.Response:
        """The figures in the text format of Prometheus (exposition format 0.0.4)."""
        load, uptime = self.thread.load, round(time.time() - self.started, 3)
        figures = (
            ("requests_waiting", "Requests that no step has begun.", "gauge", self.thread.queued),
            ("samples_running", "Samples that are being decoded.", "gauge", load.running),
            ("uptime_seconds", "Seconds since the start.", "gauge", uptime),
            ("prompt_tokens_total", "Tokens of prompts.", "counter", load.prompt_tokens),
            ("generated_tokens_total", "Tokens drawn.", "counter", load.drawn_tokens),
            ("proposed_tokens_total", "Tokens that a draft proposed.", "counter",
             load.proposed_tokens),
            ("accepted_tokens_total", "Proposed tokens that were kept.", "counter",
             load.accepted_tokens),
        )  # fmt: skip
        lines = list[str]()
        for name, text, kind, value in figures:
            lines += [*_metric_head(name, text, kind), f"sabia_{name} {value}"]
        lines += _metric_head("requests_total", "Answers by path and HTTP status.", "counter")
        for (path, status), count in sorted(self.answered.items()):
            lines.append(f'sabia_requests_total{{path="{path}",status="{status}"}} {count}')
        page = "\n".join(lines) + "\n"
        return web.Response(text=page, content_type="text/plain", charset="utf-8")

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self._listed()})

    async def _one_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        for model in self._listed():
            if model["id"] == name:
                return web.json_response(model)
        raise Rejected(f"model: {name!r:.80} is not served", "model", 404, NO_MODEL)

    def _listed(self) -> list[Json]:
        """The model and its adapters."""
        model = {"id": self.name, "object": "model", "created": int(self.started),
                 "owned_by": "sabia", "max_model_len": self.limits.context}  # fmt: skip
        adapters = [{**model, "id": name, "parent": self.name} for name in self.limits.adapters]
        return [model, *adapters]

    async def _generate(self, parse: Parser, request: web.Request) -> web.StreamResponse:
        """Answer a call whose body `parse` reads."""
        raw = await self._body(request)
        asked = parse(raw, self.name, self.engine.tokenizer, self.limits, self._formats)
        return await self._answer(request, asked)

    async def _body(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            raise Rejected("Content-Type: expected application/json", "", 415)
        return await request.read()

    async def _answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        """Run what was asked for and send the reply."""
        if self._ending.is_set():
            raise _Busy("the server is shutting down", status=503)
        if self.thread.queued + len(asked.requests) > self.limits.prompts:
            raise _Busy(f"{self.thread.queued} requests wait already", status=429)
        name = asked.requests[0].adapter or self.name
        reply = Reply(asked, name, self.engine.tokenizer, self._texts)
        work = Work(asked.requests, asked.stream and reply.in_pieces)
        begin = time.monotonic()
        self._open += 1
        self.thread.submit(work)
        try:
            if asked.stream:
                return await self._stream(request, asked, reply, work)
            done = [event async for event in _events(work, asked.choices) if type(event) is Done]
            return web.json_response(reply.whole(done))
        finally:
            self.thread.cancel(work)
            self._open -= 1
            self._seconds += 0.1 * (min(time.monotonic() - begin, 60.0) - self._seconds)

    async def _stream(
        self, request: web.Request, asked: Asked, reply: Reply, work: Work
    ) -> web.StreamResponse:
        """Server-sent events, the last of which is [DONE]."""
        response: web.StreamResponse | None = None
        try:
            async for event in _events(work, asked.choices):
                if response is None:  # an error before it has a status of its own
                    response = web.StreamResponse(headers={
                        "Content-Type": "text/event-stream", "Cache-Control": "no-cache",
                    })  # fmt: skip
                    await response.prepare(request)
                piece = reply.piece(event)
                if piece is not None:
                    await _send(response, piece)
            assert response is not None
            if asked.stream_usage:
                await _send(response, reply.chunk((), usage=reply.usage()))
            await response.write(b"data: [DONE]\n\n")
        except Rejected as error:
            if response is None:
                raise
            await _send(response, error_body(str(error), error.status))
        await response.write_eof()
        return response


class _Busy(Rejected):
    """A request that can be sent again later."""


def _metric_head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP sabia_{name} {text}", f"# TYPE sabia_{name} {kind}"]


async def _send(response: web.StreamResponse, value: Json) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


async def _events(work: Work, samples: int) -> AsyncIterator[Progress | Done]:
    """The events of a job until all samples have ended."""
    while samples:
        event: Event = await work.events.get()
        if isinstance(event, Failure):
            if event.refused:
                raise _Busy(event.message, status=503)
            raise Rejected(event.message, "", 500)
        samples -= isinstance(event, Done)
        yield event


def serve(
    engine: Engine, name: str, address: tuple[str, int], context: int, samples: int, queue: int,
    token: str, ready: Callable[[int], None], updates: Path | None = None,
    others: Others | None = None,
) -> None:  # fmt: skip
    """Serve a model until a stop signal. Raises Interrupted after it, Failed after an error of the
    engine, and UsageError for an address that cannot be used."""

    async def run() -> None:
        server = Server(engine, name, context, samples, queue, token, updates, others)
        await server.run(*address, ready)

    with stop.polling("serve"):
        asyncio.run(run())
