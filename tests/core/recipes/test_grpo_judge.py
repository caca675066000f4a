"""GRPO with a judge behind a server: calls while samples are drawn, faults, kills, cost."""

import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kills import through_kills

from sabia.core.errors import ExitCode, Unavailable, UsageError
from sabia.core.generate import client
from sabia.core.generate.engine import Engine
from sabia.core.generate.ledger import Ledger
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions
from sabia.core.recipes.grpo import policy_run
from sabia.core.shards.job import Job
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

STUB = Path(__file__).parents[2] / "openai_stub.py"
_spec = importlib.util.spec_from_file_location("openai_stub", STUB)
assert _spec is not None and _spec.loader is not None
openai_stub = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(openai_stub)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default directory of finished calls is one of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("m")
    tokenizer = train_bpe(["user assistant 37+58=095"] * 4, 300)
    tokenizer.save(root / "t")
    config = new_config(hidden=32, layers=2, heads=2, vocab=tokenizer.vocab_size, context=64)
    spec = from_config(config)
    hub.save_model(root / "m", spec, hub.init_params(spec, 0), tokenizer_from=root / "t")
    return root / "m"


@pytest.fixture(scope="module")
def prompts(model: Path) -> Path:
    """Prompts whose samples are to contain a digit or a capital letter, and no vowel."""
    path = model.parent / "prompts.jsonl"
    items = [{"id": "mark", "text": "has a mark"}, {"id": "vowel", "text": "no vowel"}]
    rows = [{"id": str(n), "messages": [{"role": "user", "content": f"{n}+{n}="}], "rubric": items}
            for n in range(20)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verdict(text: str) -> str:
    """What the judge answers: a function of the sample."""
    response = text.partition("\n<response-")[2].partition(">\n")[2].rpartition("\n</response-")[0]
    name = "mark" if 'item "mark"' in text else "vowel"
    marks = any(c.isdigit() or c.isupper() for c in response)
    met = marks if name == "mark" else not set(response) & set("aeiou")
    return json.dumps({"verdicts": [{"item": name, "evidence": "", "met": met}]})


def options(model: Path, url: str, **changes: Any) -> GrpoOptions:
    return GrpoOptions(
        model=str(model), reward="rubric", steps=4, prompts=4, group=8, max_new_tokens=4, lr=1e-3,
        warmup="2", judge_url=(url,), judge_model="judge", **changes,
    )  # fmt: skip


def train(prompts: Path, out: Path, given: GrpoOptions) -> list[dict[str, Any]]:
    policy_run.run(Job("grpo", (str(prompts),), str(out), to="jsonl"), given)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> bytes:
    return (run / "final" / "model.safetensors").read_bytes()


def rewards(rows: list[dict[str, Any]]) -> list[float]:
    return [row["reward"] for row in rows]


def test_the_judge_is_called_while_samples_are_drawn(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []  # of each step
    at_first_call: dict[int, int] = {}
    stream = Engine.stream

    def counted(self: Engine, requests: Any) -> Iterator[Any]:
        drawn.append(0)
        for completion in stream(self, requests):
            drawn[-1] += 1
            yield completion
            time.sleep(0.02)

    def answer(text: str) -> str:
        at_first_call.setdefault(len(drawn), drawn[-1])
        return verdict(text)

    monkeypatch.setattr(Engine, "stream", counted)
    with openai_stub.Stub(answer) as stub:
        train(prompts, tmp_path / "run", options(model, stub.url))
    assert drawn == [32] * 4
    assert sorted(at_first_call) == [1, 2, 3, 4]
    assert max(at_first_call.values()) < 16


def faults(share: float) -> Callable[[str, int], str]:
    kinds = ("500", "503", "429-ms", "garbage", "reset", "no-choices")

    def fault(text: str, attempt: int) -> str:
        draw = random.Random(f"{text} {attempt}")
        return draw.choice(kinds) if draw.random() < share else ""

    return fault


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that wait for milliseconds where others wait for seconds."""
    shorter = client.Client.__init__.__kwdefaults__ | {"backoff_s": 0.002, "outage_s": 1.5}
    monkeypatch.setattr(client.Client.__init__, "__kwdefaults__", shorter)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "more", [{}, pytest.param({"step_delimiter": "[a-m ]"}, marks=pytest.mark.slow)]
)
def test_failing_calls_and_an_outage_change_no_weight_and_no_reward(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    with openai_stub.Stub(verdict) as stub:
        whole = train(prompts, tmp_path / "whole", options(model, stub.url, **more))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    with openai_stub.Stub(verdict, faults(0.1), retry_after_s=0.01) as stub:
        faulty = train(prompts, tmp_path / "faulty", options(model, stub.url, **more))
        assert stub.requests > sum(stub.delivered.values())
    assert weights(tmp_path / "faulty") == weights(tmp_path / "whole")
    assert rewards(faulty) == rewards(whole) and not any(row["no_reward"] for row in faulty)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "three"))
    down = lambda text, attempt: "503" if sum(stub.delivered.values()) > 80 else ""  # noqa: E731
    with openai_stub.Stub(verdict, down) as stub:
        with pytest.raises(Unavailable, match=r"no answer for 1.5 s") as caught:
            train(prompts, tmp_path / "outage", options(model, stub.url, **more))
        assert caught.value.exit_code == ExitCode.INTERRUPTED
        stub.fault = lambda text, attempt: ""
        after = train(prompts, tmp_path / "outage", options(model, stub.url, **more))
        assert set(stub.delivered.values()) == {1}  # none was paid for twice
    assert weights(tmp_path / "outage") == weights(tmp_path / "whole")
    assert rewards(after) == rewards(whole)


def test_each_step_has_its_cost_and_its_share_of_the_cache(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("[judge]\nprompt = 1000\ncompletion = 3000\n")
    with openai_stub.Stub(verdict) as stub:
        given = options(model, stub.url, prices=str(prices))
        rows = train(prompts, tmp_path / "run", given)
        paid = sum(stub.delivered.values())
        assert [row["judge_cached"] for row in rows] == pytest.approx(
            [1 - row["judge_calls"] / 64 for row in rows]
        )
        assert sum(row["judge_calls"] for row in rows) == paid > 64
        ledger = Ledger(tmp_path / ".run.spending")
        used = ledger.used["judge"]
        dollars = (used.prompt_tokens * 1000 + used.completion_tokens * 3000) / 1e6
        assert ledger.requests["judge"] == paid
        assert sum(row["judge_usd"] for row in rows) == pytest.approx(dollars)
        shown = capsys.readouterr()
        printed = [json.loads(line) for line in shown.out.splitlines()]
        assert [row["judge_usd"] for row in printed] == [row["judge_usd"] for row in rows]
        assert " cached  judge $" in shown.err and f"judge: {paid} calls, " in shown.err
        again = train(prompts, tmp_path / "again", given)
        assert sum(stub.delivered.values()) == paid
    assert [row["judge_cached"] for row in again] == [1.0] * 4
    assert [row["judge_usd"] for row in again] == [0.0] * 4
    assert np.isfinite(rewards(again)).all()


def test_a_judge_that_hangs_is_asked_again_after_its_time(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    hung: list[str] = []

    def fault(text: str, attempt: int) -> str:
        if len(hung) < 3 and text not in hung:
            hung.append(text)
            return "hang"
        return ""

    with openai_stub.Stub(verdict, fault) as stub:
        given = options(model, stub.url, judge_timeout=0.5)
        (row,) = train(prompts, tmp_path / "run", given.replace(steps=1))
    assert len(hung) == 3 and row["no_reward"] == 0
    assert stub.requests >= sum(stub.delivered.values()) + 3


def test_two_judges_decide_together_and_belong_to_the_run(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with openai_stub.Stub(verdict) as one, openai_stub.Stub(verdict) as two:
        alone = train(prompts, tmp_path / "alone", options(model, one.url))
        paid = sum(one.delivered.values())
        file = tmp_path / "judges.toml"
        table = '[{0}]\nurl = "{1}"\nmodel = "{0}"\nprompt = 1\ncompletion = 1\n'
        file.write_text(table.format("judge", one.url) + table.format("other", two.url))
        given = options(model, one.url).replace(judge_url=(), judge_model="", judge=str(file))
        both = train(prompts, tmp_path / "both", given)
        assert sum(one.delivered.values()) == paid == sum(two.delivered.values())
        assert rewards(both) == rewards(alone)
        assert weights(tmp_path / "both") == weights(tmp_path / "alone")
        assert all(row["judge_cached"] >= 0.5 and "judge_usd" in row for row in both)
        said = capsys.readouterr().err
        assert "item mark: judge and other agree on 100.0% of 128 verdicts" in said
        file.write_text(table.format("judge", one.url) + table.format("third", two.url))
        with pytest.raises(UsageError, match="holds another run"):
            train(prompts, tmp_path / "both", given)


@pytest.mark.slow
def test_five_kills_with_default_options_pay_for_nothing_twice(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def words(url: str, out: str) -> list[object]:
        return [
            *(sys.executable, "-m", "sabia.cli.main", "grpo", prompts, "--model", model),
            *("--reward", "rubric", "--judge-url", url, "--judge-model", "judge"),
            *("--prompts", 4, "--group", 8, "--max-new-tokens", 4, "--steps", 30),
            *("-o", tmp_path / out),
        ]

    with openai_stub.Stub(verdict, latency_s=0.05) as stub:
        begun = time.monotonic()
        through_kills(words(stub.url, "whole"), 0, random.Random(0), 0.0, tmp_path / "t")
        longest_s, asked = time.monotonic() - begun, len(stub.delivered)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "others"))
    with openai_stub.Stub(verdict, latency_s=0.05) as stub:
        through_kills(words(stub.url, "killed"), 5, random.Random(1), longest_s, tmp_path / "t")
        paid = sum(stub.delivered.values())
        assert len(stub.delivered) == asked
        assert paid - asked <= 16 * 5  # --concurrency is 16
        # the ledger has every request, also those that were killed before they arrived
        assert 0 <= Ledger(tmp_path / ".killed.spending").requests["judge"] - stub.requests <= 80
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    print(f"{paid - asked} of {asked} calls repeated")


@pytest.mark.slow
def test_two_ranks_and_their_restart_share_a_cap(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    launch = ("torch.distributed.run", "--nproc-per-node", 2, "--standalone", "-m")
    with openai_stub.Stub(verdict, latency_s=0.02) as stub:
        words = [
            *(sys.executable, "-m", *launch, "sabia.cli.main", "grpo", prompts, "--model", model),
            *("--reward", "rubric", "--judge-url", stub.url, "--judge-model", "judge"),
            *("--prompts", 4, "--group", 8, "--max-new-tokens", 4, "--steps", 2),
            *("--max-requests", 20, "-o", tmp_path / "run"),
        ]
        for _ in range(2):
            done = subprocess.run([*map(str, words)], capture_output=True)
            assert done.returncode and b"request budget reached: 20 sent" in done.stderr
            assert stub.requests <= 20
        words[words.index(20)] = 200
        done = subprocess.run([*map(str, words)], capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        assert f"the run in all: {stub.requests} requests" in done.stderr.decode()
