"""`sabia pretrain --search-mix` and `--max-repeat`, as a user calls them."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training_cases import Commands

SOURCES = ("easy", "hard", "noise")
SMALL = ("--shape", "d=32,layers=2,heads=2,vocab=64", "--batch", "16", "--lr", "3e-3", "-q")


def ids(rng: random.Random, source: str, length: int = 48) -> list[int]:
    """easy: one cycle; hard: a chain with two ways on from each token; noise: anything."""
    if source == "easy":
        return [1 + i % 6 for i in range(length)]
    if source == "noise":
        return [rng.randrange(1, 64) for _ in range(length)]
    at, found = rng.randrange(1, 64), []
    for _ in range(length):
        found.append(at)
        at = 1 + (at * (5 if rng.random() < 0.5 else 11) + 3) % 63
    return found


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    rows = [
        {"input_ids": ids(rng, source), "document_lengths": [48], "source": source}
        for source in SOURCES
        for _ in range(120)
    ]
    kinds = {"input_ids": pa.list_(pa.int32()), "document_lengths": pa.list_(pa.int32()),
             "source": pa.string()}  # fmt: skip
    path = tmp_path_factory.mktemp("mix") / "tokens.parquet"
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(kinds.items()))), path)
    return path


@pytest.fixture(scope="module")
def call(sabia: Commands) -> Callable[..., str]:
    """Runs `pretrain` to the end; its standard output."""

    def run(*words: str) -> str:
        done = sabia("pretrain", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode(errors="replace")

    return run


def test_doremi_answers_and_goes_on(tokens: Path, tmp_path: Path, call) -> None:
    out = tmp_path / "mix"
    words = (str(tokens), *SMALL, "--steps", "6", "--search-mix", "doremi", "-o", str(out))
    call(*words)
    answer = json.loads((out / "mixture.json").read_text())
    assert sum(answer["weights"].values()) == pytest.approx(1, abs=1e-5)
    assert set(answer["weights"]) == set(SOURCES)
    lines = (out / "proxies.jsonl").read_text()
    call(*words)
    assert (out / "proxies.jsonl").read_text() == lines  # the two last proxies were kept
    assert json.loads((out / "mixture.json").read_text()) == answer


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_both_searches_prefer_what_can_be_learnt(
    tokens: Path, tmp_path: Path, backend: str, call
) -> None:
    for method, more in (("regression", ("--target", "hard=1", "--proxies", "12")), ("doremi", ())):
        out = tmp_path / method
        call(str(tokens), *SMALL, "--steps", "60", "--search-mix", method, *more, "-o", str(out),
             "--backend", backend)  # fmt: skip
        answer = json.loads((out / "mixture.json").read_text())
        weights = answer["weights"]
        assert weights["hard"] > 0.4 and weights["hard"] == max(weights.values()), answer
        assert answer["loss"] < answer["loss_as_the_rows_are"], answer


def test_the_plan_shows_limited_repeats(tokens: Path, tmp_path: Path, call, sabia) -> None:
    words = (str(tokens), *SMALL, "--steps", "40", "-o", str(tmp_path / "run"), "--dry-run")
    free = call(*words, "--mix", "easy=1,hard=8")
    assert "hard 4.74" in free
    assert "hard 2.00" in call(*words, "--mix", "easy=1,hard=8,noise=1", "--max-repeat", "2")
    done = sabia("pretrain", *words, "--mix", "hard=1", "--max-repeat", "2")
    assert done.returncode == 2 and b"--max-repeat" in done.stderr


def test_what_does_not_fit_is_refused(tokens: Path, tmp_path: Path, sabia: Commands) -> None:
    base = [str(tokens), *SMALL, "--steps", "4", "-o", str(tmp_path / "x")]
    search = ["--search-mix", "doremi"]
    for words, said in (
        (["--search-mix", "magic"], "--search-mix: 'magic' (expected regression or doremi)"),
        (["--search-mix", "regression", "--proxies", "3"], "--proxies: 3 is out of range"),
        ([*search, "--mix", "easy=1"], "--mix: only without --search-mix"),
        ([*search, "--target", "none=1"], "none"),
        (["--target", "easy=1"], "--target: only with --search-mix"),
        (["--proxies", "24"], "--proxies: only with --search-mix regression"),
        ([*search, "--proxies", "24"], "--proxies: only with --search-mix regression"),
        ([*search, "--max-repeat", "1", "--for-tokens", "10M"], "--max-repeat: 1 passes"),
        ([*search, "--max-repeat", "1"], "--max-repeat: only with --for-tokens or without"),
        ([*search, "--for-tokens", "1M"], "--for-tokens: only with --max-repeat"),
        ([*search, "--lora-rank", "2"], "--lora-rank: only without --search-mix"),
        ([*search, "--save-every", "10m"], "--save-every: only without --search-mix"),
        ([*search, "--mesh", "data=1"], "--mesh: only without --search-mix"),
        ([*search, "--list-read"], "--list-read: only without --search-mix"),
    ):
        done = sabia("pretrain", *base, *words)
        assert done.returncode == 2 and said in done.stderr.decode(), done.stderr
