"""An OpenAI-compatible server on loopback for tests: scripted answers, scripted faults, a ledger.

`Stub(answer, fault)` runs in a thread. `answer(text)` makes the reply to the joined messages, a
text or the whole message;
`fault(text, attempt)` names what this attempt meets ("" = a good answer). The ledger holds, for
each content, its attempts, deliveries and until when it was told to wait.
"""

import asyncio
import collections
import email.utils
import json
import math
import threading
import time

from aiohttp import web
from waiting import HANG_S

Fault = str


class Stub:
    """Use as a context manager; `url` is the base URL."""

    def __init__(self, answer=lambda text: f"echo {text}", fault=lambda text, attempt: "",
                 latency_s=0.0, retry_after_s=1.0, hang_s=HANG_S, finish="stop",
                 hold=0):  # fmt: skip
        self.answer, self.fault, self.finish, self.hold = answer, fault, finish, hold
        self.latency_s, self.retry_after_s, self.hang_s = latency_s, retry_after_s, hang_s
        self.attempts = collections.Counter()
        self.delivered = collections.Counter()
        self.told_until = collections.defaultdict(float)
        self.early, self.early_all, self.in_flight, self.most_in_flight = 0, 0, 0, 0
        self.headers, self.bodies = [], []
        self.more_headers = {}

    @property
    def requests(self) -> int:
        return sum(self.attempts.values())

    def __enter__(self):
        self.loop, started = asyncio.new_event_loop(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self.thread.start()
        started.wait(HANG_S)
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(HANG_S)

    def _run(self, started):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._start())
        started.set()
        self.loop.run_forever()
        self.loop.run_until_complete(self.runner.cleanup())
        self.loop.close()

    async def _start(self):
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._chat)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"

    async def _chat(self, request):
        now, body = time.time(), await request.json()
        content = json.dumps(body, sort_keys=True)
        text = "\n".join(message.get("content") or "" for message in body["messages"])
        attempt = self.attempts[content]
        self.attempts[content] += 1
        self.headers.append(dict(request.headers))
        self.bodies.append(body)
        self.early += now < self.told_until[content] - 0.02
        self.early_all += now < max(self.told_until.values()) - 0.02
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        while self.most_in_flight < self.hold:
            await asyncio.sleep(0.001)
        try:
            await asyncio.sleep(self.latency_s)
            return await self._perform(self.fault(text, attempt), request, content, text)
        finally:
            self.in_flight -= 1

    async def _perform(self, fault, request, content, text):
        if fault[:3].isdigit():
            return self._refusal(fault, content)
        payload = self._payload(text)
        if fault == "hang":
            await asyncio.sleep(self.hang_s)
        elif fault == "garbage":
            return web.Response(body=payload[: len(payload) // 2], content_type="application/json")
        elif fault == "no-choices":
            return web.json_response({"object": "error"})
        elif fault == "reset":
            response = web.StreamResponse(headers={"Content-Length": str(len(payload))})
            await response.prepare(request)
            await response.write(payload[: len(payload) // 2])
            request.transport.abort()
            return response
        self.delivered[content] += 1
        headers = self.more_headers
        return web.Response(body=payload, content_type="application/json", headers=headers)

    def _refusal(self, fault, content):
        """429-seconds, 429-date, 429-ms, or a bare status."""
        status, _, form = fault.partition("-")
        headers, until = {}, 0.0
        if form == "seconds":
            wait = math.ceil(self.retry_after_s)
            headers, until = {"Retry-After": str(wait)}, time.time() + wait
        elif form == "date":
            until = math.ceil(time.time() + self.retry_after_s)
            headers = {"Retry-After": email.utils.formatdate(until, usegmt=True)}
        elif form == "ms":
            headers = {"retry-after-ms": str(round(self.retry_after_s * 1000))}
            until = time.time() + self.retry_after_s
        self.told_until[content] = max(self.told_until[content], until)
        body = {"error": {"message": f"planned\n {fault}", "type": "stub"}}
        return web.json_response(body, status=int(status), headers=headers)

    def _payload(self, text):
        answer = self.answer(text)
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        words = len((message["content"] or "").split())
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": words}
        finish = self.finish(text) if callable(self.finish) else self.finish
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return json.dumps({"model": "stub-1", "choices": [choice], "usage": usage}).encode()
