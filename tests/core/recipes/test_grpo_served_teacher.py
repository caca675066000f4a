"""`grpo --teacher URL`: the log-probabilities of a server, equal to those of the model here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from digit_policy import write_policy
from served import RowByRowEngine, in_thread

from sabia.core.errors import Unavailable, UsageError
from sabia.core.generate.model_directory import load_engine
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions
from sabia.core.recipes.grpo import policy_run, server_calls
from sabia.core.serve.http_server import Server
from sabia.core.shards.job import Job
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train.telemetry import metrics_path, read_rows

VALUES = {"reward": "none", "steps": 3, "prompts": 2, "group": 8, "max_new_tokens": 6,
          "warmup": "1", "peak_flops": 1e12, "lr": 5e-3}  # fmt: skip
FIGURES = ("teacher_kl", "loss", "grad_norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a teacher with other weights, and `foreign`, with another tokenizer."""
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("teachers")
    write_policy(place, longest=3)
    spec, _ = hub.load_model(place / "model")
    hub.save_model(place / "teacher", spec, hub.init_params(spec, 7), tokenizer_from=place / "t")
    train_bpe(["another text of other words, with which it was made"] * 9, 300).save(place / "o")
    tokens = from_config(new_config(hidden=32, layers=1, heads=2, vocab=300, context=64))
    hub.save_model(
        place / "foreign", tokens, hub.init_params(tokens, 0), tokenizer_from=place / "o"
    )
    return place


class Faults:
    """What a server does to its replies: `lost` entries are removed; after `answers` it is out."""

    def __init__(self, lost: str = "", answers: int = 10**9) -> None:
        self.lost, self.answers = lost, answers
        self.asked: list[Any] = []


@contextmanager
def serving(model: Path, faults: Faults | None = None) -> Iterator[str]:
    faults, made = faults or Faults(), load_engine(model)

    @web.middleware
    async def faulty(request: web.Request, handler: Any) -> web.StreamResponse:
        if not request.path.endswith("completions"):
            return await handler(request)
        faults.asked.append(await request.json())
        if len(faults.asked) > faults.answers:
            return web.Response(status=503)
        answer = await handler(request)
        if not faults.lost or answer.status != 200:
            return answer
        raw = answer.body.replace(f'"{faults.lost}"'.encode(), b'"_"')
        return web.Response(body=raw, content_type="application/json")

    def make() -> Server:
        engine = RowByRowEngine(made.spec, made.params, made.tokenizer)
        server = Server(engine, "m", 64, 64, 1000)
        plain = server.application

        def application() -> web.Application:
            app = plain()
            app.middlewares.insert(0, faulty)
            return app

        server.application = application  # type: ignore[method-assign]
        return server

    with in_thread(make) as url:
        yield url


def run(folder: Path, out: Path, backend: str = "torch", **changes: Any) -> list[dict[str, Any]]:
    options = GrpoOptions(model=str(folder / "model"), **(VALUES | changes))
    inputs = (str(folder / "prompts.jsonl"),)
    job = Job("grpo", inputs=inputs, out=str(out), to="jsonl", backend=backend)
    policy_run.run(job, options)
    return read_rows(metrics_path(out))


@pytest.mark.parametrize(("backend", "changes"), [
    ("torch", {}),  # samples share their prompt
    pytest.param("torch", {"micro_tokens": 40, "updates": 2, "reward": "regex"},
                 marks=pytest.mark.slow),  # a row for each
    pytest.param("jax", {"updates": 2}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_server_teaches_as_the_model_here(folder, tmp_path, backend, changes) -> None:
    own = run(folder, tmp_path / "own", backend, teacher=str(folder / "teacher"), **changes)
    faults = Faults()
    with serving(folder / "teacher", faults) as url:
        rows = run(folder, tmp_path / "run", backend, teacher=url, **changes)
    assert len(rows) == len(own) == 3
    for row, expected in zip(rows, own, strict=True):
        assert expected["teacher_kl"] > 0.01
        for name in FIGURES:
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
    assert len(faults.asked) == 1 + 3 * 2 * 8  # one probe, then each sample once
    one, two = (hub.load_model(tmp_path / name / "final")[1] for name in ("own", "run"))
    for name, tensor in one.items():
        np.testing.assert_allclose(two[name], tensor, atol=1e-3)


@pytest.mark.parametrize(("model", "lost", "said"), [
    ("foreign", "", "has another tokenizer than the policy"),
    ("teacher", "token_logprobs", "gives no log-probabilities of a prompt's tokens"),
    ("teacher", "tokens", "does not name the tokens"),
])  # fmt: skip
def test_a_server_is_refused_after_one_request(folder, tmp_path, model, lost, said) -> None:
    faults = Faults(lost)
    with serving(folder / model, faults) as url, pytest.raises(UsageError, match=said):
        run(folder, tmp_path / "run", teacher=url)
    assert len(faults.asked) == 1
    with pytest.raises(UsageError, match=r"--temperature: 0\.8 with a server"):
        GrpoOptions.read({"model": "m", "teacher": "http://h/v1", "temperature": "0.8"})


def test_an_outage_is_waited_for_and_then_ends_the_run(folder, tmp_path, monkeypatch) -> None:
    out, whole, said = tmp_path / "run", tmp_path / "whole", r"--teacher: .*run again when the serv"
    with serving(folder / "teacher", Faults(answers=25)) as url, monkeypatch.context() as patch:
        patch.setattr(server_calls, "OUTAGE_S", 3.0)
        with pytest.raises(Unavailable, match=said) as raised:
            run(folder, out, teacher=url)
        assert raised.value.exit_code == 75
    with serving(folder / "teacher") as url:  # at another address
        run(folder, whole, teacher=url)
        rows = run(folder, out, teacher=url)
    assert [row["step"] for row in rows] == [1, 2, 3]
    one, two = (hub.load_model(place / "final")[1] for place in (whole, out))
    for name, tensor in one.items():
        np.testing.assert_array_equal(two[name], tensor)
