"""Real examinations: ENEM, GSM8K, and OAB's published verdicts with their known totals.

The files are not part of the project; SABIA_TEST_DATA names the folder that holds them.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import stage

DATA = os.environ.get("SABIA_TEST_DATA")
pytestmark = pytest.mark.skipif(not DATA, reason="SABIA_TEST_DATA is not set (shared test data)")
EVAL = Path(DATA or ".") / "eval"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def test_enem_items_score_as_in_transformers(tiny_model: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from sabia.core.bench.loglikelihood import Scorer, encode_options
    from sabia.core.bench.task import task_from
    from sabia.core.bench.task_data.few_shot import load_items
    from sabia.core.model.storage import hub
    from sabia.core.text.tokenize.tokenizer import load_tokenizer

    task = task_from(
        {"name": "enem", "kind": "multiple_choice", "data": "enem/2022.json", "where": "not IU",
         "prompt": "Pergunta: {{context}}\n{{question}}\nResposta:", "choices": "options",
         "answer": "label"}, str(EVAL / "task.toml"),
    )  # fmt: skip
    items = load_items(task)
    assert len(items) >= 120 and {len(item.choices) for item in items} == {5}
    assert set(np.bincount([item.answer for item in items], minlength=5) > 10) == {True}
    tokenizer = load_tokenizer(tiny_model)
    rows = [
        encode_options(tokenizer, item.text, [" " + c for c in item.choices], False)
        for item in items[:6]
    ]
    scorer = Scorer(*hub.load_model(tiny_model))
    ours = np.concatenate(scorer.score(rows))
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    theirs = []
    with torch.no_grad():
        for row in (row.fitting(scorer.context) for option in rows for row in option):
            ids = torch.tensor([row.ids])
            logs = model(ids[:, :-1]).logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])
            theirs.append(float(logs[-row.scored :].sum()))
    assert np.abs(ours - theirs).max() <= 1e-4


def test_gsm8k_gold_solutions_are_right_and_neighbours_wrong(tmp_path: Path) -> None:
    from sabia.core.bench.metrics import exact_matches
    from sabia.core.bench.task import task_from
    from sabia.core.bench.task_data.few_shot import load_items

    task = task_from(
        {"name": "gsm8k", "kind": "exact_match", "data": "gsm8k/test.jsonl",
         "prompt": "Question: {{question}}\nAnswer:", "verifier": "number", "shots": 4},
        str(EVAL / "task.toml"),
    )  # fmt: skip
    items = load_items(task)
    assert len(items) == 1315 and items[0].text.count("Answer:") == 5
    answers = [str(item.answer) for item in items]
    numbers = [float(answer.rpartition("#### ")[2].replace(",", "")) for answer in answers]
    others = [f"The answer is {2 * number + 1:.2f}." for number in numbers]
    for texts, right in ((answers, 1315), (others, 0)):
        matches = exact_matches(task, list(zip(texts, answers, strict=True)))
        assert sum(match.score for match in matches) == right


def oab() -> tuple[list[dict], list[dict], dict[str, str]]:
    """(task rows, answers, reply of the judge by answer) of the 378 published verdicts."""
    root = EVAL / "oab-bench"
    questions = {q["question_id"]: q for q in lines(root / "question.jsonl")}
    keys = {k["question_id"]: k["choices"][0]["turns"] for k in lines(root / "guidelines.jsonl")}
    verdicts = lines(root / "model_judgment" / "o3-2025-04-16_single.jsonl")
    written = {
        (model, row["question_id"]): row["choices"][0]["turns"]
        for model in {v["model"] for v in verdicts}
        for row in lines(root / "model_answer" / f"{model}.jsonl")
    }
    tasks, answers, replies = [], [], {}
    for (model, name), turns in written.items():
        question = questions[name]
        first = f"{question['statement']}\n\n{question['turns'][0]}"
        messages = [{"role": "system", "content": question["system"]}]
        for number, (asked, text) in enumerate(
            zip([first, *question["turns"][1:]], turns, strict=False), 1
        ):
            messages = [*messages, {"role": "user", "content": asked}]
            row = {"question_id": name, "turn": number, "messages": messages}
            answers.append({**row, "model": model, "response": text})
            key, most = keys[name][number - 1], question["values"][number - 1]
            tasks.append({**row, "rubric": key, "maximum": most})
            messages = [*messages, {"role": "assistant", "content": text}]
    unique = {(row["question_id"], row["turn"]): row for row in tasks}
    for verdict in verdicts:
        text = written[verdict["model"], verdict["question_id"]][verdict["turn"] - 1]
        replies[text] = verdict["judgment"]
    return list(unique.values()), answers, replies


@contextmanager
def scripted_judge(replies: dict[str, str]) -> Iterator[str]:
    """A chat server that gives each answer the reply written for it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = body["messages"][-1]["content"]
            mark = said.partition("<answer-")[2][:8]
            text = said.partition(f"<answer-{mark}>\n")[2].rpartition(f"\n</answer-{mark}>")[0]
            message = {"role": "assistant", "content": replies[text]}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            usage = {"prompt_tokens": 1, "completion_tokens": 1}
            made = json.dumps({"choices": choices, "usage": usage, "model": "o3"}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(made)))
            self.end_headers()
            self.wfile.write(made)

        def log_message(self, *_: object) -> None:
            return None

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1"
    finally:
        running.shutdown()


def test_oab_verdicts_replayed_give_the_published_totals(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tasks, answers, replies = oab()
    assert (len(tasks), len(answers), len(replies)) == (189, 378, 378)
    for name, rows in (("task.jsonl", tasks), ("answers.jsonl", answers)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "oab.toml").write_text(
        'name = "oab"\nkind = "rubric"\nscoring = "points"\ndata = "task.jsonl"\n'
        'id = "{{question_id}}/{{turn}}"\nmetric = "points"\n'
    )
    with scripted_judge(replies) as url:
        stage(
            "eval", task=str(tmp_path / "oab.toml"), answers=str(tmp_path / "answers.jsonl"),
            report=tmp_path / "r.html", judge_url=url, judge_model="o3", json=True,
            judge_cache=tmp_path / "cache", out=tmp_path / "s.parquet",
        )  # fmt: skip
    made = json.loads(capsys.readouterr().out)
    points = {r["model"]: r for r in made["results"] if r["metric"] == "points"}
    assert points["o3-2025-04-16"]["value_points"] == 178.85
    assert points["sabia-3.1-2025-05-08"]["value_points"] == 140.85
    assert {r["maximum_points"] for r in points.values()} == {210.0}
    assert {r["items_without_verdict"] for r in points.values()} == {0}
    (pair,) = made["paired"]
    assert pair["items"] == 189 and abs(abs(pair["difference_points"]) - 38.0) < 1e-6
    assert (tmp_path / "r.html").stat().st_size < 1_000_000
