"""Servers with the routes of vLLM 0.33 and of SGLang 0.5.23, which have `sabia serve` draw."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

Json = dict[str, Any]
Routes = dict[str, Callable[[web.Request], Awaitable[web.Response]]]
# fields of their requests, of which ours may be any
COMPLETION = {
    "model", "prompt", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "repetition_penalty", "request_id", "logprobs", "return_token_ids", "return_weight_versions",
    "thinking_token_budget",
}  # fmt: skip
RPC = {"method", "args", "kwargs", "timeout"}
UPDATE = {"model_path", "weight_version", "flush_cache", "abort_all_requests", "load_format"}
GENERATE = {"input_ids", "sampling_params", "return_logprob", "rid"}
SAMPLING = {"n", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
            "sampling_seed", "stop_token_ids"}  # fmt: skip


class Foreign(ABC):
    """What both kinds share: the server behind them, and the labels of its weights."""

    owner = ""

    def __init__(self, url: str, updates: Path) -> None:
        self.url, self.updates = url.removesuffix("/v1"), updates
        self.labels = {0: "default"}  # of the versions of the server behind
        self.calls: list[str] = []

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._counted])
        app.router.add_get("/v1/models", self._models)
        for route, handler in self.routes().items():
            app.router.add_post(route, handler)
        return app

    async def run(self, host: str, port: int, started: Callable[[int], None]) -> None:
        """Serve until it is cancelled."""
        runner = web.AppRunner(self.application())
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        started(runner.addresses[0][1])
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    @abstractmethod
    def routes(self) -> Routes:
        """The handlers by path."""

    @web.middleware
    async def _counted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        listed = {"id": "m", "object": "model", "owned_by": self.owner}
        return web.json_response({"object": "list", "data": [listed]})

    async def behind(self, route: str, body: Json) -> Json:
        async with aiohttp.ClientSession() as http, http.post(self.url + route, json=body) as made:
            assert made.status == 200, await made.text()
            return await made.json()

    async def load(self, path: str) -> int:
        """The version behind of the weights at a path."""
        folder = Path(path)
        assert folder.is_absolute() and (folder / "model.safetensors").exists(), path
        name = str(folder.relative_to(self.updates.resolve()))
        return (await self.behind("/update_weights", {"path": name}))["version"]

    def spans(self, choice: Json) -> list[Json]:
        (version,) = set(choice["weight_versions"])
        label = self.labels[version]
        return [{"version": label, "start": 0, "end": len(choice["token_ids"])}]


class Vllm(Foreign):
    """With VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs."""

    owner = "vllm"
    paused = stale = False
    loaded = 0

    def routes(self) -> Routes:
        return {
            "/pause": self.pause, "/resume": self.resume, "/collective_rpc": self.rpc,
            "/reset_prefix_cache": self.reset, "/update_weight_version": self.label,
            "/v1/completions": self.complete,
        }  # fmt: skip

    async def pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] in ("abort", "wait", "keep")
        self.paused = True
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert self.paused and body["method"] == "reload_weights" and set(body) <= RPC
        self.loaded = await self.load(body["kwargs"]["weights_path"])
        self.stale = True
        return web.json_response({"results": [None]})

    async def reset(self, request: web.Request) -> web.Response:
        self.stale = False
        return web.json_response({"success": True})

    async def label(self, request: web.Request) -> web.Response:
        version = (await request.json())["new_version"]
        assert isinstance(version, str)
        self.labels[self.loaded] = version
        return web.json_response({"success": True, "new_version": version})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert set(body) <= COMPLETION, set(body) - COMPLETION
        assert not self.stale
        if self.paused:
            return web.json_response({"error": {"message": "paused"}}, status=503)
        told = body.pop("return_weight_versions", False)
        reply = await self.behind("/v1/completions", body)
        for choice in reply["choices"]:
            spans = self.spans(choice)
            drawn = choice.pop("drawn_logprobs", None)
            choice["logprobs"]["token_logprobs"] = drawn or choice["logprobs"]["token_logprobs"]
            choice |= {"weight_versions": spans if told else None, "routed_experts": None}
        return web.json_response(reply)


class Sglang(Foreign):
    """Started without options."""

    owner = "sglang"
    seed = 0

    def routes(self) -> Routes:
        return {"/update_weights_from_disk": self.update, "/generate": self.generate}

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert set(body) <= UPDATE and body.get("flush_cache", True)
        version = await self.load(body["model_path"])
        self.labels[version] = body["weight_version"]
        done = {"success": True, "message": "Succeeded.", "num_paused_requests": 0}
        return web.json_response(done)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = body["sampling_params"]
        assert set(body) <= GENERATE and set(sampling) <= SAMPLING and body["return_logprob"]
        self.seed += 1
        asked = {
            "model": "m", "prompt": body["input_ids"], "n": sampling["n"], "seed": self.seed,
            "max_tokens": sampling["max_new_tokens"], "temperature": sampling["temperature"],
            "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
        reply = await self.behind("/v1/completions", asked)
        outputs = [self._output(choice) for choice in reply["choices"]]
        return web.json_response(outputs if len(outputs) > 1 else outputs[0])

    def _output(self, choice: Json) -> Json:
        drawn = choice.get("drawn_logprobs") or choice["logprobs"]["token_logprobs"]
        spans = self.spans(choice)
        about = {
            "finish_reason": {"type": choice["finish_reason"]},
            "weight_version": spans[-1]["version"], "weight_versions": spans,
            "output_token_logprobs": [
                [logprob, token, None]
                for logprob, token in zip(drawn, choice["token_ids"], strict=True)
            ],
        }  # fmt: skip
        return {"text": choice["text"], "output_ids": choice["token_ids"], "meta_info": about}
