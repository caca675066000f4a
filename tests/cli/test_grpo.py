"""`sabia grpo` as a user calls it: a run directory, metrics on stdout, stops and resumes."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Command
from training_cases import without_template

pytest.importorskip("torch")
COMMAND = Command("grpo")
PLAIN = [sys.executable, "-m", "sabia.cli.main", "grpo"]
OPTIONS = ("--reward", "regex", "--prompts", 4, "--group", 8, "--max-new-tokens", 4, "--lr", "1e-3")


def run(*arguments: object) -> subprocess.CompletedProcess:
    call = [*COMMAND, *map(str, arguments)]
    return subprocess.run(call, capture_output=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sabia.core.model.storage import hub
    from sabia.core.spec import from_config, new_config
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    root = tmp_path_factory.mktemp("m")
    tokenizer = train_bpe(["user assistant 37+58=095"] * 4, 300)
    tokenizer.save(root / "t")
    config = new_config(hidden=32, layers=2, heads=2, vocab=tokenizer.vocab_size, context=64)
    spec = from_config(config)
    hub.save_model(root / "m", spec, hub.init_params(spec, 0), tokenizer_from=root / "t")
    return root / "m"


@pytest.fixture(scope="module")
def prompts(model: Path) -> Path:
    """Prompts whose reward is any digit or upper-case letter: about every second sample."""
    path = model.parent / "prompts.jsonl"
    rows = [{"id": str(n), "messages": [{"role": "user", "content": f"{n}+{n}="}],
             "answer": "[0-9A-Z]"} for n in range(20)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def weights(place: Path) -> bytes:
    return (place / "final" / "model.safetensors").read_bytes()


def test_metrics_are_one_parquet_stream_and_the_rest_lies_in_the_directory(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    out = tmp_path / "run"
    done = run(prompts, "--model", model, *OPTIONS, "--steps", 3, "-o", out)
    assert done.returncode == 0, done.stderr.decode()
    rows = pq.read_table(io.BytesIO(done.stdout)).to_pylist()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["samples"] == 32 for row in rows)
    assert b"reward     live   length     clip  |dlogp|" in done.stderr
    assert pq.read_table(out / "samples").num_rows == 96
    assert (out / "final" / "tokenizer.json").exists()
    again = run(prompts, "--model", model, *OPTIONS, "--steps", 3, "-o", out, "--to", "jsonl")
    assert again.returncode == 0
    assert len(again.stdout.splitlines()) == 3
    assert b"already finished" in again.stderr


@pytest.mark.slow
def test_sigterm_saves_and_the_same_call_goes_on_to_the_same_weights(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    call = (prompts, "--model", model, *OPTIONS, "--steps", 150, "--to", "jsonl")
    whole = run(*call, "-o", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr.decode()
    out = tmp_path / "stopped"
    process = subprocess.Popen(
        [*PLAIN, *map(str, call), "-o", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr.decode()
    assert stdout == b""
    assert list((out / "checkpoints").glob("step-*"))
    assert not (out / "final").exists()
    again = run(*call, "-o", out)
    assert again.returncode == 0, again.stderr.decode()
    assert b"resuming at step" in again.stderr
    assert weights(out) == weights(tmp_path / "whole")
    shown = [json.loads(line)["reward"] for line in again.stdout.splitlines()]
    assert shown == [json.loads(line)["reward"] for line in whole.stdout.splitlines()]


def test_dry_run_and_data_that_cannot_be_graded(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    plan = run(prompts, "--model", model, *OPTIONS, "-o", out, "--dry-run")
    assert plan.returncode == 0
    assert b"samples: 3,200 of at most 4 tokens" in plan.stdout
    assert not out.exists()
    n, held = 0, dict[str, int]()
    for more in ((), ("--lora-rank", 2), ("--lora-rank", 2, "--lora-base", "nf4")):
        words = (*OPTIONS, *more, "--peak-flops", "1T", "--dry-run", "--json", "-o", out)
        shown = json.loads(run(prompts, "--model", model, *words).stdout)
        n, held[" ".join(map(str, more))] = (
            int(shown["figures"]["parameters"].replace(",", "")),
            (shown["memory_bytes"]),
        )
    whole, lora, codes = held.values()
    assert whole == 16 * n and codes < lora < 6 * n  # the frozen base has its weights alone
    said = run(prompts, "--model", model, *OPTIONS, "-o", out, "--reward", "number")
    assert said.returncode == 65, said.stderr.decode()
    assert len(said.stderr.splitlines()) <= 3


JUDGE = ("--reward", "rubric", "--judge-url", "http://localhost:1/v1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--advantage", "median"), "--advantage: 'median' (expected mean, std or gae)"),
        (("--updates", "2", "--ratio", "foo"), "--ratio: 'foo' (expected token or sequence)"),
        (("--reward", "vibes"), "--reward: 'vibes'"),
        (JUDGE, "--judge-model: is missing"),
        ((*JUDGE[2:], "--judge-model", "m"), "--judge-url: only with --reward rubric"),
        ((*JUDGE, "--judge-model", "m", "--max-usd", "1"), "--max-usd: only with --prices"),
        (("--judge-model", "m"), "--judge-model: only with --judge-url"),
        (("--judge-votes", "1"), "--judge-votes: only with --judge-url"),
        (("--max-judge-tokens", "1M"), "--max-judge-tokens: only with --judge-url"),
        (("--max-unknown", "0"), "--max-unknown: only with --judge-url"),
        (("--concurrency", "4"), "--concurrency: only with --judge-url"),
        (("--clip-low", "0.2"), "--clip-low: only with --updates 2 or more"),
        (("--decay", "0"), "--decay: only with --schedule wsd"),
        (("--save-every", "often", "--dry-run"), "--save-every: 'often'"),
        (("--warmup", "much", "--dry-run"), "--warmup: 'much'"),
        (("--final-lr", "0.1"), "--final-lr: only with --schedule wsd or cosine"),
        (("--mesh", "fsdp=2"), "--mesh: fsdp=2"),
        (("--model", "/nope"), "--model: /nope: not a model directory"),
        (("--model", "PLAIN"), "has no chat template"),
    ],
)
def test_refusals(model: Path, prompts: Path, tmp_path: Path, arguments, said: str) -> None:
    out = tmp_path / "run"
    if "PLAIN" in arguments:
        arguments = ("--model", without_template(model, tmp_path / "plain"))
    done = run(prompts, "--model", model, "-o", out, *OPTIONS, *arguments)
    assert done.returncode == 2, done.stderr.decode()
    (line,) = done.stderr.decode().splitlines()
    assert said in line
    assert not out.exists()


@pytest.mark.slow
def test_two_processes_make_the_updates_of_one(model: Path, prompts: Path, tmp_path: Path) -> None:
    import numpy as np

    from sabia.core.model.storage import hub

    call = (prompts, "--model", model, *OPTIONS, "--steps", 3)
    alone = run(*call, "-o", tmp_path / "one")
    assert alone.returncode == 0, alone.stderr.decode()
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    words = [*launch, *PLAIN[1:], *map(str, call), "-o", str(tmp_path / "two")]
    both = subprocess.run(words, capture_output=True)
    assert both.returncode == 0, both.stderr.decode()
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert rows[0][0]["reward"] == rows[1][0]["reward"]
    assert rows[0][0]["samples"] == rows[1][0]["samples"] == 32
    one, two = (hub.load_model(tmp_path / name / "final")[1] for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert max(np.abs(one[name] - two[name]).max() for name in one) < 1e-4
