"""Weights that are replaced while requests are decoded."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import waiting
from served import NAME, RowByRowEngine, little_engine, serving

from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Ended, Request
from sabia.core.model.storage import hub

PLAIN = "/v1/completions"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Engine]]:
    """(a folder with the models w1 and w2, engines of the versions 0 to 2)."""
    folder, first = tmp_path_factory.mktemp("weights"), little_engine()
    engines, draw = [first], np.random.default_rng(1)
    for number in (1, 2):
        params = {
            name: value.numpy() + draw.standard_normal(value.shape).astype(np.float32) * 0.1
            for name, value in first.params.items()
        }
        hub.save_model(folder / f"w{number}", first.spec, params)
        engines.append(RowByRowEngine(first.spec, params, first.tokenizer))
    return folder, engines


def fresh(engine: Engine) -> Engine:
    """An engine of the same weights, which a server may replace."""
    return RowByRowEngine(engine.spec, engine.params, engine.tokenizer)


def body(number: int) -> dict[str, Any]:
    return {"prompt": [3 + number % 50, 7], "max_tokens": 40, "seed": number, "n": 2,
            "return_token_ids": True, "ignore_eos": True, "logprobs": 0}  # fmt: skip


def test_each_token_has_the_version_of_its_weights(engines: tuple[Path, list[Engine]]) -> None:
    folder, versions = engines

    async def call() -> None:
        async with serving(fresh(versions[0]), updates=folder) as (_, client):
            replies = [await client.post(PLAIN, body(0))]  # all of it drawn by version 0
            tasks = [asyncio.create_task(client.post(PLAIN, body(n))) for n in range(1, 12)]
            for number in (1, 2):
                await asyncio.wait(tasks[: 4 * number], return_when=asyncio.ALL_COMPLETED)
                update = {"path": f"w{number}", "version": number, "model": None}
                assert await client.post("/update_weights", update) == (200, {"version": number})
            replies += [await task for task in tasks]
            check([*replies, await client.post(PLAIN, body(12))])  # the last by version 2
            # a stream has them as well
            pieces = await client.stream(PLAIN, body(3))
            lists = [choice["weight_versions"] for one in pieces for choice in one["choices"]]
            assert list(itertools.chain(*lists)) == [2] * 80

    def check(replies: list[tuple[int, Any]]) -> None:
        seen = set()
        for number, (status, reply) in enumerate(replies):
            assert status == 200
            for sample, choice in enumerate(reply["choices"]):
                drawn, tokens = choice["weight_versions"], choice["token_ids"]
                assert len(drawn) == len(tokens) == 40 and drawn == sorted(drawn)
                seen.add(tuple(sorted(set(drawn))))
                request = Request(body(number)["prompt"], 40, seed=number, n=2, stop_ids=())
                made = versions[drawn[0]].generate([request])[sample]
                same = drawn.count(drawn[0])  # of them, those before the first update
                assert made.tokens[:same] == tokens[:same]
                logprobs = choice["logprobs"]["token_logprobs"][:same]
                assert np.abs(np.array(made.raw_logprobs[:same]) - logprobs).max() < 1e-6
        assert {(0,), (2,)} <= seen

    asyncio.run(call())


def test_a_sample_in_flight_goes_on_with_the_new_weights(
    engines: tuple[Path, list[Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, versions = engines

    async def call() -> None:
        async with serving(fresh(versions[0]), updates=folder) as (server, client):
            session, inbox = server.thread._session, server.thread._inbox
            step, steps, reached = session.step, itertools.count(), asyncio.Event()
            loop = asyncio.get_running_loop()

            def waits_for_the_update() -> list[Ended]:
                if next(steps) == 10:
                    loop.call_soon_threadsafe(reached.set)
                    waiting.until(lambda: not inbox.empty())
                return step()

            monkeypatch.setattr(session, "step", waits_for_the_update)
            task = asyncio.create_task(client.post(PLAIN, body(1)))
            await reached.wait()
            await client.post("/update_weights", {"path": "w1", "version": 7, "model": None})
            for choice in (await task)[1]["choices"]:
                assert choice["weight_versions"] == [0] * 11 + [7] * 29

    asyncio.run(call())


def test_a_paused_server_draws_nothing_and_ends_when_asked_to(
    engines: tuple[Path, list[Engine]],
) -> None:
    folder, versions = engines

    async def call() -> None:
        async with serving(fresh(versions[0]), updates=folder) as (server, client):
            assert await client.post("/pause", {}) == (200, {"paused": True, "version": 0})
            task = asyncio.create_task(client.post(PLAIN, body(1)))
            while not server.thread.queued:
                await asyncio.sleep(0.01)
            assert (await client.post("/update_weights", {"path": "w1", "model": None}))[0] == 200
            assert server.thread.load.drawn_tokens == 0 and not task.done()
            assert await client.post("/resume", {}) == (200, {"paused": False, "version": 1})
            reply = (await task)[1]
            made = versions[1].generate([Request(body(1)["prompt"], 40, seed=1, n=2, stop_ids=())])
            assert [choice["token_ids"] for choice in reply["choices"]] == [m.tokens for m in made]

    asyncio.run(call())


def test_updates_that_cannot_be_made_leave_the_weights(
    engines: tuple[Path, list[Engine]], tmp_path: Path
) -> None:
    folder, versions = engines
    other = folder / "other"
    other.mkdir()
    config = json.loads((folder / "w1" / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    torn = folder / "torn"
    torn.mkdir()
    (torn / "config.json").write_text(json.dumps(config))
    weights = (folder / "w1" / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (other / "model.safetensors").write_bytes(weights)

    async def call() -> None:
        async with serving(fresh(versions[0]), updates=folder) as (_, client):
            for update, status, word in (
                ({}, 400, "missing"), ({"path": "../w1"}, 403, "not within"),
                ({"path": "w9"}, 400, "cannot be read"), ({"path": "torn"}, 400, "cannot be read"),
                ({"path": "other"}, 400, "rope_theta is 5.0"), ({"path": 3}, 400, "a string"),
                ({"path": "w1", "version": 0}, 400, "more than 0"),
                ({"path": "w1", "colour": 1}, 400, "unknown parameter"),
            ):  # fmt: skip
                given, reply = await client.post("/update_weights", {**update, "model": None})
                assert given == status and word in reply["error"]["message"], reply
            async with client.session.post(client.url + "/pause", data="{}") as reply:
                assert reply.status == 415
            assert set((await client.post(PLAIN, body(0)))[1]["choices"][0]["weight_versions"]) == {
                0
            }
        async with serving(fresh(versions[0])) as (_, client):
            assert (await client.post("/update_weights", {"path": "w1"}))[0] == 404
            assert NAME in await client.text("/v1/models")

    asyncio.run(call())


@pytest.mark.slow
def test_no_request_is_lost_while_weights_are_replaced(engines: tuple[Path, list[Engine]]) -> None:
    folder, versions = engines
    seen: set[int] = set()

    async def call() -> None:
        async with serving(fresh(versions[0]), samples=64, updates=folder) as (server, client):
            together, answered = asyncio.Semaphore(64), itertools.count(1)

            async def one(number: int) -> None:
                async with together:
                    status, reply = await client.post(PLAIN, body(number))
                assert status == 200
                check(number, reply)
                if not next(answered) % 60:
                    assert (await client.post("/update_weights", {
                        "path": f"w{1 + number % 2}", "model": None,
                    }))[0] == 200  # fmt: skip

            await asyncio.gather(*map(one, range(1000)))
            assert next(answered) == 1001 and not server.thread._jobs

    def check(number: int, reply: Any) -> None:
        for sample, choice in enumerate(reply["choices"]):
            drawn, tokens = choice["weight_versions"], choice["token_ids"]
            assert len(drawn) == len(tokens) == 40 and drawn == sorted(drawn)
            seen.update(drawn)
            if drawn[0] == 0:
                request = Request(body(number)["prompt"], 40, seed=number, n=2, stop_ids=())
                made = versions[0].generate([request])[sample]
                same = drawn.count(0)
                assert made.tokens[:same] == tokens[:same]

    asyncio.run(call())
    assert seen == set(range(17))
