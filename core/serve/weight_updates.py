"""What a trainer asks of a server: to pause, to go on, and to take other weights meanwhile.

Clients name a model directory within one folder that the server was started with. The weights are
read while requests are decoded, and replaced between two steps: no request is lost, and each token
has the version of the weights that drew it. Samples in flight go on with the keys and values that
the former weights have computed (as with vLLM's pause mode "keep").
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from sabia.core.errors import SabiaError
from sabia.core.generate.engine import Engine
from sabia.core.model.storage.stored_weights import load_stored
from sabia.core.serve.protocol import Body, Rejected
from sabia.core.serve.worker import EngineThread

# keys of config.json that no computation depends on
COSMETIC = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype",
                      "transformers_version", "use_cache"})  # fmt: skip
Read = Callable[[web.Request], Awaitable[bytes]]
LAST_VERSION = 2**31 - 1


class WeightUpdates:
    """The routes /pause, /resume and /update_weights; folder: where new weights may lie. `read`
    gives the body of a request, and refuses what a page of another origin can send."""

    def __init__(self, engine: Engine, thread: EngineThread, folder: Path, read: Read) -> None:
        self._engine, self._thread, self._read_body = engine, thread, read
        self._folder = folder.resolve()
        self._version = 0
        self._lock = asyncio.Lock()

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/update_weights", self._update)

    async def _pause(self, request: web.Request) -> web.Response:
        await self._read_body(request)
        await self._thread.pause()
        return web.json_response({"paused": True, "version": self._version})

    async def _resume(self, request: web.Request) -> web.Response:
        await self._read_body(request)
        self._thread.resume()
        return web.json_response({"paused": False, "version": self._version})

    async def _update(self, request: web.Request) -> web.Response:
        body = Body(await self._read_body(request))
        body.needs("path")
        path = body.take("path", str, "")
        async with self._lock:
            version = body.take("version", int, self._version + 1)
            body.end()
            if not self._version < version <= LAST_VERSION:
                raise Rejected(
                    f"version: {version} (expected more than {self._version}, that of the present "
                    f"weights, and at most {LAST_VERSION})", "version",
                )  # fmt: skip
            directory = self._within(path)
            self._thread.announce(directory)
            params = await asyncio.to_thread(self._read, directory, path)
            if error := await self._thread.replace(params, version):
                raise Rejected(_unreadable(path, error), "path")
            self._version = version
        return web.json_response({"version": version})

    def _within(self, path: str) -> Path:
        """The directory at a path. Raises Rejected."""
        directory = (self._folder / path).resolve()
        if not directory.is_relative_to(self._folder):
            raise Rejected(f"path: {path} is not within the folder of --updates", "path", 403)
        return directory

    def _read(self, directory: Path, path: str) -> dict[str, Any]:
        """The parameters of the directory at a path, on the device. Raises Rejected."""
        try:
            spec, arrays = load_stored(directory)
        except (SabiaError, OSError, ValueError) as error:
            raise Rejected(_unreadable(path, str(error)), "path") from None
        for key, ours in self._engine.spec.config.items():
            theirs = spec.config.get(key)
            if key not in COSMETIC and theirs != ours:
                raise Rejected(
                    f"path: {path} is another model: {key} is {_short(theirs)} (expected "
                    f"{_short(ours)})", "path",
                )  # fmt: skip
        return self._engine.placed(arrays)


def _unreadable(path: str, error: str) -> str:
    return f"path: {path} cannot be read ({' '.join(error.split())[:300]})"


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
