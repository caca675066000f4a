"""`grpo --sampler-url`: samples from `sabia serve`, and from servers with faults."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from digit_policy import write_policy
from foreign_servers import Foreign, Routes, Sglang, Vllm
from served import RowByRowEngine, in_thread
from training_cases import ENVIRONMENT

from sabia.core.errors import Failed, Unavailable, UsageError
from sabia.core.generate.engine import Engine
from sabia.core.generate.model_directory import load_engine
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions
from sabia.core.recipes.grpo import policy_run, server_calls
from sabia.core.recipes.grpo.served_policy import mismatch
from sabia.core.serve.http_server import Server
from sabia.core.shards.job import Job
from sabia.core.train.telemetry import metrics_path, read_rows

Change = Callable[[str, Any], Any]  # (path, the reply or request) → what is sent instead


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("served")
    write_policy(place)
    return place


def nothing(_: str, value: Any) -> Any:
    return value


@contextmanager
def serving(
    folder: Path, updates: Path, reply: Change = nothing, ask: Change = nothing,
    other: Callable[[Engine], None] = lambda engine: None,
) -> Iterator[str]:  # fmt: skip
    """The URL of a server of the model in a thread; `ask` changes requests, `reply` replies, and
    `other` its engine."""
    updates.mkdir(exist_ok=True)
    made = load_engine(folder / "model")

    @web.middleware
    async def changed(request: web.Request, handler: Any) -> web.StreamResponse:
        raw = await request.read()
        if raw:
            body = ask(request.path, json.loads(raw))
            request._read_bytes = json.dumps(body).encode()
        answer = await handler(request)
        if answer.status != 200:
            return answer
        value = reply(request.path, json.loads(answer.body))
        return value if isinstance(value, web.Response) else web.json_response(value)

    def make() -> Server:
        engine = RowByRowEngine(made.spec, made.params, made.tokenizer)
        other(engine)
        server = Server(engine, "m", 64, 64, 1000, updates=updates)
        plain = server.application

        def application() -> web.Application:
            app = plain()
            app.middlewares.insert(0, changed)
            return app

        server.application = application  # type: ignore[method-assign]
        return server

    with in_thread(make) as url:
        yield url


VALUES = {"reward": "regex", "steps": 3, "prompts": 2, "group": 8, "max_new_tokens": 3,
          "warmup": "1", "peak_flops": 1e12, "lr": 5e-3}  # fmt: skip


def run(folder: Path, out: Path, **changes: Any) -> list[dict[str, Any]]:
    options = GrpoOptions(model=str(folder / "model"), **(VALUES | changes))
    inputs = (str(folder / "prompts.jsonl"),)
    policy_run.run(Job("grpo", inputs=inputs, out=str(out), to="jsonl"), options)
    return read_rows(metrics_path(out))


def served(folder: Path, out: Path, url: str, **changes: Any) -> list[dict[str, Any]]:
    updates = out.parent / "updates"
    return run(folder, out, sampler_url=url, sampler_folder=str(updates), **changes)


def test_the_run_is_that_of_the_engine_in_the_process(folder: Path, tmp_path: Path) -> None:
    more = {"temperature": 0.8, "validation": str(folder / "prompts.jsonl")}
    expected = run(folder, tmp_path / "own", **more)
    with serving(folder, tmp_path / "updates") as url:
        rows = served(folder, tmp_path / "run", url, **more)
    assert [row.get("reward") for row in rows] == [row.get("reward") for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row.get("validation_reward") == other.get("validation_reward")
        if "loss" in row:
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert row["logprob_gap_max"] <= 1e-4
    one, two = (hub.load_model(tmp_path / name / "final")[1] for name in ("own", "run"))
    assert max(np.abs(one[name] - two[name]).max() for name in one) <= 1e-4
    assert not list((tmp_path / "updates").iterdir())


@contextmanager
def foreign(kind: type[Foreign], folder: Path, updates: Path) -> Iterator[tuple[str, Foreign]]:
    """The URL of a server of another kind, and it."""
    with serving(folder, updates) as behind:
        server = kind(behind, updates)
        with in_thread(lambda: server) as url:
            yield url, server


@pytest.mark.parametrize("kind", [Vllm, Sglang])
def test_other_servers_draw_the_samples(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Foreign]
) -> None:
    monkeypatch.setattr(server_calls, "OUTAGE_S", 5.0)  # the server fails what it does not know
    with foreign(kind, folder, tmp_path / "updates") as (url, server):
        rows = served(folder, tmp_path / "run", url, temperature=0.8)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["logprob_gap_max"] <= 1e-4 for row in rows)
    assert len(set(server.labels.values())) == 4 and not list((tmp_path / "updates").iterdir())
    if kind is Vllm:  # seeds reach it, so that the samples are those of the process
        expected = run(folder, tmp_path / "own", temperature=0.8)
        assert [row["reward"] for row in rows] == [row["reward"] for row in expected]


class PlainVllm(Vllm):
    """Without VLLM_SERVER_DEV_MODE."""

    def routes(self) -> Routes:
        return {"/v1/completions": self.complete}


def nothing_else(server: Foreign) -> None:
    """No fault."""


def started_again(server: Foreign) -> None:
    class Forgetful(dict[int, str]):
        def __getitem__(self, version: int) -> str:
            return "default"

    server.labels = Forgetful()


def aborting(server: Foreign) -> None:
    plain = server.behind

    async def behind(route: str, body: Any) -> Any:
        reply = await plain(route, body)
        for choice in reply.get("choices", ()):
            choice["finish_reason"] = "abort"
        return reply

    server.behind = behind  # type: ignore[method-assign]


@pytest.mark.parametrize(("kind", "change", "said"), [
    (PlainVllm, nothing_else, "404.*VLLM_SERVER_DEV_MODE=1"),
    (Vllm, started_again, "weights of version default"),
    (Sglang, started_again, "weights of version default"),
    (Vllm, aborting, "ended a sample with abort"),
    (Sglang, aborting, "ended a sample with abort"),
])  # fmt: skip
def test_faults_of_other_servers_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Foreign],
    change: Callable[[Foreign], None], said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(server_calls, "OUTAGE_S", 5.0)
    with foreign(kind, folder, tmp_path / "updates") as (url, server):
        change(server)
        with pytest.raises((UsageError, Unavailable), match=said):
            served(folder, tmp_path / "run", url)
    assert not list((tmp_path / "run" / "samples").glob("*"))


def of_choices(change: Callable[[dict[str, Any]], None]) -> Change:
    def reply(path: str, value: Any) -> Any:
        for choice in value.get("choices", ()) if path.endswith("completions") else ():
            change(choice)
        return value

    return reply


def forget(name: str) -> Change:
    return of_choices(lambda choice: choice.pop(name))


def hotter(path: str, body: Any) -> Any:
    return body | {"temperature": 1.5} if path.endswith("completions") else body


@pytest.mark.parametrize(("reply", "ask", "said"), [
    (forget("token_ids"), nothing, "gives no token ids with log-probabilities"),
    (forget("logprobs"), nothing, "gives no token ids with log-probabilities"),
    (forget("weight_versions"), nothing, "weights of version None"),
    (of_choices(lambda choice: choice.update(weight_versions=[7])), nothing, "version 7"),
    (nothing, hotter, r"another temperature, about 1\.5 \(expected --temperature 1\)"),
])  # fmt: skip
def test_servers_of_other_samples_are_refused(
    folder: Path, tmp_path: Path, reply: Change, ask: Change, said: str
) -> None:
    with (
        serving(folder, tmp_path / "updates", reply, ask) as url,
        pytest.raises((UsageError, Failed), match=said),
    ):
        served(folder, tmp_path / "run", url)
    assert not list((tmp_path / "run" / "samples").glob("*"))


def test_other_weights_are_named(folder: Path, tmp_path: Path) -> None:
    """A server that says that it has the weights, and keeps those of the start."""
    calls: list[str] = []

    def ask(path: str, body: Any) -> Any:
        if path.endswith("update_weights"):
            calls.append(path)
            if len(calls) > 1:  # those of the first step again
                spec, params = hub.load_model(folder / "model")
                hub.save_model(tmp_path / "updates" / "old", spec, params)
                return body | {"path": "old"}
        return body

    with (
        serving(folder, tmp_path / "updates", ask=ask) as url,
        pytest.raises(Failed, match="other weights or experts"),
    ):
        served(folder, tmp_path / "run", url, lr=5e-2)
    assert [row["step"] for row in read_rows(metrics_path(tmp_path / "run"))] == [1]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mixture")
    write_policy(place, family="qwen3_moe", layers=2, experts=6, chosen=2, expert_ffn=32)
    spec, params = hub.load_model(place / "model")
    params = {name: x * (3 if x.ndim > 1 else 1) for name, x in params.items()}
    hub.save_model(place / "model", spec, params, tokenizer_from=place / "t")
    return place


def test_the_experts_of_a_server_are_replayed(mixture: Path, tmp_path: Path, capsys: Any) -> None:
    expected = run(mixture, tmp_path / "own", routing_replay=True)
    with serving(mixture, tmp_path / "updates") as url:
        rows = served(mixture, tmp_path / "run", url, routing_replay=True)
    for row, other in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert row["routing_mismatch"] <= 0.002
    assert "--routing-replay" not in capsys.readouterr().err

    def silent(choice: dict[str, Any]) -> None:
        choice.pop("routed_experts")

    with serving(mixture, tmp_path / "updates", of_choices(silent)) as url:
        rows = served(mixture, tmp_path / "silent", url, routing_replay=True)
    assert capsys.readouterr().err.count("gives no routed_experts; each token goes to") == 1
    assert rows[-1]["loss"] == pytest.approx(expected[-1]["loss"], abs=1e-5)
    assert not any("routing_mismatch" in row for row in rows)


def other_top_k(engine: Engine) -> None:
    """One expert for each token, not two; what the configuration says stays as it is."""
    layers = [replace(layer, mlp=replace(layer.mlp, router=replace(layer.mlp.router, top_k=1)))
              for layer in engine.spec.layers]  # fmt: skip
    engine.spec = engine.cached = replace(engine.spec, layers=tuple(layers))


def permuted(engine: Engine) -> None:
    """The matrices of the experts in another order than the router's."""
    plain = engine.placed

    def placed(params: Any) -> Any:
        return {name: x.roll(1, 0) if "mlp.experts" in name else x
                for name, x in plain(params).items()}  # fmt: skip

    engine.placed = placed  # type: ignore[method-assign]


def consistently_permuted(engine: Engine) -> None:
    """The same model with its experts, and the router's scores, in another order: its choices are
    of other experts."""
    plain = engine.placed

    def placed(params: Any) -> Any:
        return {name: x.roll(1, 0) if "mlp.experts" in name or "mlp.router" in name else x
                for name, x in plain(params).items()}  # fmt: skip

    engine.placed = placed  # type: ignore[method-assign]


@pytest.mark.parametrize(("other", "replay", "said"), [
    (other_top_k, False, "samples from other weights or experts"),
    (other_top_k, True, r"samples from other experts: its routed_experts .* 2 experts for each of"),
    (permuted, False, "samples from other weights or experts"),
    (permuted, True, "samples from other weights or experts"),
    (consistently_permuted, True, "samples from other weights or experts"),
])  # fmt: skip
def test_a_sampler_of_other_experts_stops_the_run(
    mixture: Path, tmp_path: Path, other: Callable[[Engine], None], replay: bool, said: str
) -> None:
    with (
        serving(mixture, tmp_path / "updates", other=other) as url,
        pytest.raises(Failed, match=said),
    ):
        served(mixture, tmp_path / "run", url, routing_replay=replay)
    assert not list((tmp_path / "run" / "samples").glob("*"))


def test_the_cause_of_a_mismatch() -> None:
    assert mismatch(lambda t: abs(t - 1.0), 1.0, 1e-3) == ""
    assert "about 0.7" in mismatch(lambda t: abs(t - 0.7), 1.0, 1e-3)
    assert "other weights" in mismatch(lambda t: 0.5 + abs(t - 0.7), 1.0, 1e-3)


def test_an_outage_is_waited_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    failing = iter(range(1000))
    busy = web.Response(status=503, text="later")

    def reply(path: str, value: Any) -> Any:
        return busy_again() if 3 <= next(failing) < 7 else value

    def busy_again() -> web.Response:
        return web.Response(status=busy.status, text="later")

    expected = run(folder, tmp_path / "own")
    with serving(folder, tmp_path / "updates", reply) as url:
        rows = served(folder, tmp_path / "run", url)
    assert [row["reward"] for row in rows] == [row["reward"] for row in expected]
    assert "503" in capsys.readouterr().err
    failing = iter(range(1000))
    down = iter([False] * 5)  # the server answers five times

    def gone(path: str, value: Any) -> Any:
        return value if next(down, True) is False else busy_again()

    with serving(folder, tmp_path / "updates", gone) as url, pytest.raises(Unavailable):
        monkeypatch.setattr(server_calls, "OUTAGE_S", 0.2)
        served(folder, tmp_path / "later", url)
    monkeypatch.undo()
    assert Unavailable.exit_code == 75
    with serving(folder, tmp_path / "updates") as url:
        rows = served(folder, tmp_path / "later", url)
    assert [row["reward"] for row in rows] == [row["reward"] for row in expected]


@pytest.mark.slow
def test_kills_while_weights_are_sent_change_nothing(folder: Path, tmp_path: Path) -> None:
    sending = threading.Event()

    def ask(path: str, body: Any) -> Any:
        if path.endswith("update_weights"):
            sending.set()
            time.sleep(0.05)
        return body

    names = [f"--{k.replace('_', '-')}" for k in VALUES]
    call = [
        sys.executable,
        "-m",
        "sabia.cli.main",
        "grpo",
        str(folder / "prompts.jsonl"),
        "--model",
        str(folder / "model"),
        "--save-every",
        "1",
        "--sampler-folder",
        str(tmp_path / "updates"),
    ]
    for name, value in zip(names, VALUES.values(), strict=True):
        call += [name, str(value)]
    call += ["--steps", "12"]
    with serving(folder, tmp_path / "updates", ask=ask) as url:
        call += ["--sampler-url", url]
        done = subprocess.run([*call, "-o", str(tmp_path / "whole")], env=ENVIRONMENT,
                              stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)  # fmt: skip
        assert done.returncode == 0, done.stderr
        draw, out = np.random.default_rng(3), str(tmp_path / "killed")
        for number in range(6):
            sending.clear()
            run = subprocess.Popen([*call, "-o", out], env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)  # fmt: skip
            for _ in range(1 + number % 2):  # at the first or second sending
                assert sending.wait(60) or run.poll() is not None
                sending.clear()
            time.sleep(draw.uniform(0, 0.1))
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
        done = subprocess.run(
            [*call, "-o", out], env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stderr
    name = "final/model.safetensors"
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "updates").iterdir())
