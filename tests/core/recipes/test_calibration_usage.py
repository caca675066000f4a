"""Calibration records like a sample of the use: shares, distance, what is missing."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from in_process import stage

from sabia.core.recipes.calibration.usage_match import (
    chosen_numbers,
    compared,
    length_range,
    traits,
)

PT = "Mas não era só isso: a menina, que ainda não sabia ler, olhava para as letras da porta. "
EN = "But that was not all: the girl, who could not read yet, looked at the letters on the door. "
DE = "Aber das war nicht alles: das Mädchen, das noch nicht lesen konnte, sah auf die Buchstaben. "


def test_lengths_are_between_powers_of_two() -> None:
    assert [length_range(n) for n in (1, 64, 65, 128, 129, 5000)] == [
        "1-64 tokens", "1-64 tokens", "65-128 tokens", "65-128 tokens", "129-256 tokens",
        "4097-8192 tokens",
    ]  # fmt: skip


def test_forms_and_languages_of_records() -> None:
    call = {"role": "user", "content": PT}
    rows = [
        {"messages": [call]},
        {"messages": [call], "tools": [{"type": "function"}]},
        {"messages": [call, {"role": "assistant", "content": EN}, call], "source": "s"},
    ]
    found = traits(rows, "chat", [9, 9, 9], [PT, EN, DE])
    assert [one[0] for one in found] == ["pt", "en", "de"]
    assert [one[1] for one in found] == ["", "", "s"]
    assert [one[2] for one in found] == [
        "chat, one turn", "chat, one turn, tools", "chat, several turns"
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_chosen_records_have_the_shares_of_the_use(seed: int) -> None:
    """Whatever the shares of the candidates, where there are enough of each value."""
    draw = random.Random(seed)

    def made(count: int, weights: list[float]) -> list[Any]:
        def one() -> Any:
            language = draw.choices(["pt", "en", "de"], weights)[0]
            form = draw.choices(["document", "chat, one turn"], weights[:2])[0]
            return language, "", form, length_range(draw.choice([50, 100, 900]))

        return [one() for _ in range(count)]

    usage, candidates = made(500, [0.6, 0.3, 0.1]), made(4000, [0.05, 0.15, 0.8])
    numbers = chosen_numbers(usage, candidates, 100, seed)
    assert len(set(numbers)) == 100 and numbers == chosen_numbers(usage, candidates, 100, seed)
    match = compared(usage, [candidates[n] for n in numbers])
    assert set(match.distance) == {"language", "form", "length"}  # no source has a name
    assert max(match.distance.values()) <= 0.02 and not match.missing()
    at_random = compared(usage, draw.sample(candidates, 100))
    assert at_random.distance["language"] > 0.5


def test_the_distance_is_half_the_sum_of_differences() -> None:
    usage = [("pt", "a", "document", "1-64 tokens")] * 3 + [("en", "b", "document", "1-64 tokens")]
    chosen = [("pt", "a", "document", "1-64 tokens"), ("de", "a", "document", "65-128 tokens")]
    match = compared(usage, chosen)
    assert match.distance == {"language": 0.5, "source": 0.25, "form": 0, "length": 0.5}
    assert match.missing() == [("language", "en", 0.25, 0), ("source", "b", 0.25, 0)]


def test_few_candidates_are_all_taken() -> None:
    one = ("pt", "", "document", "1-64 tokens")
    assert sorted(chosen_numbers([one], [("en", "", "document", "1-64 tokens"), one], 9, 0)) == [
        0, 1
    ]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    from sabia.core.model.storage import hub
    from sabia.core.spec import from_config, new_config
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    root = tmp_path_factory.mktemp("m")
    train_bpe([PT, EN, DE] * 4, 400).save(root / "t")
    spec = from_config(new_config(hidden=64, layers=1, heads=4, vocab=400, tied=False))
    hub.save_model(root / "m", spec, hub.init_params(spec, 0), tokenizer_from=root / "t")
    return root / "m"


def documents(path: Path, texts: Counter[str]) -> Path:
    lines = [json.dumps({"text": f"{n} {t * 3}"}) for t, count in texts.items()
             for n in range(count)]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_report_has_both_distributions_and_what_is_missing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    usage = documents(tmp_path / "u.jsonl", Counter({PT: 30, DE: 10}))
    docs = documents(tmp_path / "d.jsonl", Counter({EN: 150, PT: 40}))

    def report(**settings: Any) -> tuple[dict[str, Any], str]:
        given = {"inputs": (str(docs),), "out": tmp_path / "q", "json": True, "model": model}
        stage("quantize", **given, recipe="w8", samples=16, held_out=4, length=64, **settings)
        made = capsys.readouterr()
        return json.loads(made.out)["calibration"], made.err

    assert report()[0]["usage"] is None
    calibration, said = report(usage=usage)
    assert "already made" not in said
    assert calibration["rows"] == 16 and calibration["held_out"] == 4
    assert calibration["usage"]["usage"]["language"] == {"de": 0.25, "pt": 0.75}
    assert calibration["usage"]["chosen"]["language"]["pt"] >= 0.75
    assert calibration["usage"]["distance"]["language"] == pytest.approx(0.25, abs=0.01)
    assert "calibration lacks language de (25% of the use, 0% of it)" in said
    card = (tmp_path / "q" / "README.md").read_text()
    assert "# Model card: q\n" in card and f"| de | 25.0% | {0:.1%} |" in card
    assert "16 records (document)" in card and "| transformers | loads | - |" in card
    assert "| attention | w8a16 | rtn | 4 |" in card and "KL to the original" in card
    assert "already made" in report(usage=usage)[1]
    documents(usage, Counter({PT: 30}))
    calibration, said = report(usage=usage)
    assert "already made" not in said and "lacks" not in said
    assert calibration["usage"]["distance"]["language"] == 0
