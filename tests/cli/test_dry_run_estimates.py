"""`--dry-run` of commands that are no map stages: its estimates against what the command writes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from in_process import sabia

torch = pytest.importorskip("torch")


def call(*words: object) -> str:
    done = sabia(*words)
    assert done.exit_code == 0, done.output
    return done.stdout


def plan_of(*words: object) -> dict[str, Any]:
    return json.loads(call(*words, "--dry-run", "--json"))


def size_of(*paths: Path) -> int:
    return sum(path.stat().st_size for path in paths)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of two kinds, their tokens, and an untrained model."""
    root = tmp_path_factory.mktemp("world")
    rng, rows = random.Random(5), []
    for number in range(2_300):
        words = [f"{'abc'[number % 3]}{rng.randrange(400)}" for _ in range(60)]
        row = {"id": f"d{number}", "text": " ".join(words), "source": "xy"[number % 2]}
        rows.append(row | {"kind": "odd" if number % 2 else "even", "scores": {"s": number % 7}})
    (root / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = ("tokenize", root / "docs.jsonl", "--vocab-size", "400", "--length", "64")
    call(*tokens, "-o", root / "tokens", "-q")
    small = ("--shape", "d=32,layers=2", "--steps", "1", "--batch", "2")
    call("pretrain", root / "tokens", *small, "-o", root / "run", "-q")
    return root


@pytest.mark.parametrize(("form", "more"), [("arrow", ("--length", "64")), ("megatron", ())])
def test_token_files(world: Path, tmp_path: Path, form: str, more: tuple[str, ...]) -> None:
    words = ("tokenize", world / "docs.jsonl", "--tokenizer", world / "tokens" / "_tokenizer",
             "--format", form, *more, "-o", tmp_path / "out")  # fmt: skip
    plan = plan_of(*words)
    assert not (tmp_path / "out").exists() and plan["cpu_seconds"] > 0 and plan["memory_bytes"] > 0
    call(*words)
    data = [*tmp_path.glob("out/*.arrow"), *tmp_path.glob("out/*.bin")]
    assert plan["bytes_written"] == pytest.approx(size_of(*data), rel=0.15)
    again = plan_of(*words)
    assert [one["action"] for one in again["writes"]] == ["keep"] and again["bytes_written"] == 0


def test_a_mix_writes_the_tokens_asked_for(world: Path, tmp_path: Path) -> None:
    words = ("tokenize", world / "docs.jsonl", "--tokenizer", world / "tokens" / "_tokenizer",
             "--length", "64", "--mix", "x=1,y=1", "-o", tmp_path / "o")  # fmt: skip
    whole, part = plan_of(*words), plan_of(*words, "--tokens", "6400")
    assert part["bytes_written"] == 100 * 64 * 4 < whole["bytes_written"]
    assert whole["figures"] == {"mix": "x=1,y=1"} and not (tmp_path / "o").exists()


def test_a_fasttext_classifier(world: Path, tmp_path: Path) -> None:
    words = ("classify", "train", world / "docs.jsonl", "--label", "kind", "-o", tmp_path / "k.bin")
    plan = min((plan_of(*words) for _ in range(3)), key=lambda plan: plan["cpu_seconds"])
    assert list(tmp_path.iterdir()) == []
    call(*words, "-q")
    assert plan["bytes_written"] == pytest.approx(size_of(tmp_path / "k.bin"), rel=0.02)
    longer = plan_of(*words, "--epochs", 10_000, "--force")
    assert longer["cpu_seconds"] > 3 * plan["cpu_seconds"] > 0
    assert plan_of(*words)["writes"][0]["action"] == "keep"
    alone = plan_of("classify", "train", world / "docs.jsonl", "--label", "meta", *words[-2:])
    assert alone["cpu_seconds"] is None and "0 labels (expected 2 or more)" in alone["basis"]


def test_a_threshold_reads_and_writes_nothing_large(world: Path, tmp_path: Path) -> None:
    words = ("--score", "s", "--positive", "s > 3", "-o", tmp_path / "s.json")
    plan = plan_of("classify", "threshold", world / "docs.jsonl", *words)
    assert plan["cpu_seconds"] > 0 and plan["bytes_written"] == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["mixed", "w8", "w8a8", "w4", "fp8", "nf4", "nf4-double"])
def test_bytes_of_a_quantized_model_are_exact(world: Path, tmp_path: Path, recipe: str) -> None:
    words = ("quantize", world / "docs.jsonl", "--model", world / "run" / "final", "--samples", 2,
             "--length", 32, "--recipe", recipe, "--group-size", 32)  # fmt: skip
    words = words if recipe in ("mixed", "w4") else words[:-2]
    plan = plan_of(*words, "-o", tmp_path / "q")
    assert not (tmp_path / "q").exists()
    report = json.loads(call(*words, "-o", tmp_path / "q", "--json"))
    assert plan["bytes_written"] == report["size_after_bytes"]


def test_calibration_costs_by_its_tokens(world: Path, tmp_path: Path) -> None:
    words = ("quantize", world / "docs.jsonl", "--model", world / "run" / "final", "-o",
             tmp_path / "q", "--recipe", "w4", "--group-size", 32, "--length", 64,
             "--held-out", 0)  # fmt: skip
    less, more = (plan_of(*words, "--samples", n) for n in (10, 1_000))
    assert more["cpu_seconds"] > 20 * less["cpu_seconds"] > 0
    assert more["figures"]["calibration tokens"] == 64_000


def test_evaluation_costs_by_its_tokens(world: Path, tmp_path: Path) -> None:
    items = [{"id": str(n), "q": "a1 b2 c3 " * 4, "c": ["a1", "b2"], "a": 0} for n in range(20)]
    (tmp_path / "i.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    common = f'data = "{tmp_path / "i.jsonl"}"\nprompt = "{{{{ q }}}}"\n'
    tasks = {
        "mc": 'kind = "multiple_choice"\nchoices = "c"\nanswer = "a"\n',
        "words": 'kind = "exact_match"\nanswer = "{{ a }}"\nmax_new_tokens = 8\n',
    }
    for name, more in tasks.items():
        (tmp_path / f"{name}.toml").write_text(f'name = "{name}"\n{common}{more}')
    chosen = plan_of("eval", "--task", tmp_path / "mc.toml", "--model", world / "run" / "final")
    assert chosen["cpu_seconds"] > 0 and chosen["memory_bytes"] > 0 and chosen["bytes_written"] > 0
    words = ("eval", "--task", tmp_path / "words.toml", "--temperature", 1)
    once, often = (
        plan_of(*words, "--model", world / "run" / "final", "--samples", n) for n in (1, 40)
    )
    assert often["cpu_seconds"] > 8 * once["cpu_seconds"] > 0
    assert often["bytes_written"] == 40 * once["bytes_written"]
    far = plan_of(*words, "--model", "http://127.0.0.1:9/v1#m")
    assert far["cpu_seconds"] is far["memory_bytes"] is None and "endpoints" in far["basis"]


def test_a_search_costs_as_many_proxies(world: Path, tmp_path: Path) -> None:
    words = ("pretrain", world / "tokens", "--shape", "d=32,layers=2", "--steps", "8",
             "-o", tmp_path / "x")  # fmt: skip
    one = plan_of(*words)
    search = plan_of(*words, "--search-mix", "regression", "--proxies", "10")
    flops, of_all = (float(plan["basis"].split()[0]) for plan in (one, search))
    assert of_all == pytest.approx(12 * flops, rel=0.01) and search["cpu_seconds"] > 0
    assert search["figures"]["proxies"] == 12 and search["bytes_written"] == 0
