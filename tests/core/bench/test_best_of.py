"""Samples graded by a judge: best@k next to every choice, and through the command."""

import importlib.util
import json
import random
import re
from itertools import combinations
from pathlib import Path

import pytest
from in_process import stage

from sabia.core.bench.many_samples import best_of
from sabia.core.errors import UsageError

STUB = Path(__file__).parents[2] / "openai_stub.py"
_spec = importlib.util.spec_from_file_location("openai_stub", STUB)
assert _spec is not None and _spec.loader is not None
openai_stub = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(openai_stub)


def test_best_of_is_the_mean_over_all_choices() -> None:
    draw = random.Random(2)
    for _ in range(100):
        n = draw.randint(1, 7)
        right = [float(draw.random() < 0.5) for _ in range(n)]
        grades = [draw.choice([0.2, 0.5, 0.9, None]) for _ in range(n)]
        for k in range(1, n + 1):
            expected = []
            for chosen in combinations(range(n), k):
                best = max((grades[i] or -1.0) for i in chosen)
                winners = [right[i] for i in chosen if (grades[i] or -1.0) == best]
                expected.append(sum(winners) / len(winners))
            value = best_of(right, grades, k)
            assert value == pytest.approx(sum(expected) / len(expected))


def test_the_judge_chooses_among_the_samples(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    given = {"1": ["7", "8", "9"], "2": ["8", "7", "8"], "3": ["7", "7", "8"], "4": ["9", "8", "9"]}
    rows = [{"id": name, "q": f"What is {name}?", "answer": "7"} for name in given]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.toml").write_text('name = "t"\nkind = "exact_match"\ndata = "rows.jsonl"\n'
                                     'prompt = "{{q}}"\nanswer = "answer"\n')  # fmt: skip
    answers = [{"id": n, "response": text} for n, texts in given.items() for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    seen = []

    def judge(text: str) -> str:
        seen.append(text)
        answer = re.search(r"<answer-\w+>\n(.*)\n", text)[1]
        # it likes 8 best, except for the first item; and cannot say anything about 9
        liked = "8" if "What is 1?" not in text else "7"
        return "hm" if answer == "9" else "[[9]]" if answer == liked else "[[2]]"

    call = {"task": (str(tmp_path / "t.toml"),), "answers": (f"m={tmp_path / 'a.jsonl'}",),
            "judge_model": "j", "judge_cache": str(tmp_path / "cache")}  # fmt: skip
    with openai_stub.Stub(judge) as stub:
        stage("eval", **call, judge_url=(stub.url,), best_of=True, json=True,
              report=tmp_path / "r.html")  # fmt: skip
        made = json.loads(capsys.readouterr().out)
        assert len(set(seen)) == 9  # equal samples of an item are one call
    by_k = {one["k"]: one["best_at_k_value_share"] for one in made["samples"]}
    # of all three: item 1 right, 2 and 3 wrong, 4 wrong
    assert by_k[3] == pytest.approx(1 / 4)
    of_two = [best_of([x == "7" for x in xs], [g[x] for x in xs], 2) for xs, g in zip(
        given.values(), [{"7": 0.9, "8": 0.2, "9": None}] + 3 * [{"7": 0.2, "8": 0.9, "9": None}],
        strict=True)]  # fmt: skip
    assert by_k[2] == pytest.approx(sum(of_two) / 4)
    assert "best@k" in (tmp_path / "r.html").read_text()
    assert not any(re.search(r"<key-?\w*>\n7", text) for text in seen)
    stage("eval", **call, judge_url=("http://127.0.0.1:9/v1",), best_of=True, dry_run=True)
    assert "4 calls at most" in " ".join("".join(capsys.readouterr()).split())
    with pytest.raises(UsageError, match="--best-of"):
        small = {k: v for k, v in call.items() if k != "answers"} | {"model": ("http://h/v1#m",)}
        stage("eval", **small, judge_url=("http://h/v1",), best_of=True)
