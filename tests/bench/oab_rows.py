"""OAB-bench as rows for `sabia eval`: questions with rubrics, and published answers.

    python tests/bench/oab_rows.py OAB_BENCH OUT

Reads question.jsonl, guidelines.jsonl and model_answer/ of OAB-bench. OUT gets questions.jsonl, a
row for each turn (id QUESTION/TURN, messages, key, maximum, and as rubric the lines of the key's
table of points), and MODEL.jsonl, the answers with the conversation that each was given in.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def asked(question: Row, turn: int, answers: list[str]) -> list[dict[str, str]]:
    """The conversation up to a turn; earlier turns have the answers given, where there are any."""
    messages = [{"role": "system", "content": question["system"]}]
    for number, words in enumerate(question["turns"][: turn + 1]):
        said = f"{question['statement'].rstrip()}\n\n{words}" if number == 0 else words
        messages.append({"role": "user", "content": said})
        if number < turn and answers:
            messages.append({"role": "assistant", "content": answers[number]})
    return messages


def rubric(key: str, maximum: float) -> list[Row]:
    """The lines of a Markdown table of points: text and points; the whole key where it has none.

    A line is worth the highest grade of its last cell. Where that makes more than the question is
    worth (cells that span lines repeat all their grades), it is worth the points in parentheses.
    """
    lines = []
    for line in key.split("\n"):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        grades = _numbers(cells[-1])
        if line.lstrip().startswith("|") and len(cells) > 1 and grades and max(grades) > 0:
            named = _numbers(" ".join(re.findall(r"\([\s\d.,]+\)", cells[0])))
            lines.append((cells[0], max(grades), round(sum(named), 2) or max(grades)))
    spanned = sum(highest for _, highest, _ in lines) > maximum + 1e-6
    items = [
        {"id": str(number), "text": text, "weight": min(highest, named) if spanned else highest}
        for number, (text, highest, named) in enumerate(lines, 1)
    ]
    return items or [{"id": "1", "text": key, "weight": maximum}]


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", ".")) for number in re.findall(r"\d+[.,]\d+", text)]


def questions(bench: Path) -> Iterator[Row]:
    """A row for each turn of each question."""
    keys = {row["question_id"]: row for row in read(bench / "guidelines.jsonl")}
    for question in read(bench / "question.jsonl"):
        written = keys[question["question_id"]]["choices"][0]["turns"]
        for turn, (key, maximum) in enumerate(zip(written, question["values"], strict=True)):
            yield {"id": f"{question['question_id']}/{turn + 1}", "exam": question["category"],
                   "messages": asked(question, turn, []), "key": key, "maximum": maximum,
                   "rubric": rubric(key, maximum)}  # fmt: skip


def answers(bench: Path, path: Path) -> Iterator[Row]:
    """A row for each turn that a model answered."""
    by_id = {row["question_id"]: row for row in read(bench / "question.jsonl")}
    for row in read(path):
        turns = row["choices"][0]["turns"]
        for turn, text in enumerate(turns):
            yield {"id": f"{row['question_id']}/{turn + 1}", "model": path.stem, "response": text,
                   "messages": asked(by_id[row["question_id"]], turn, turns)}  # fmt: skip


def write(path: Path, rows: Iterator[Row]) -> None:
    """Rows as JSON lines."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Write the files."""
    bench, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    write(out / "questions.jsonl", questions(bench))
    for path in sorted((bench / "model_answer").glob("*.jsonl")):
        write(out / path.name, answers(bench, path))


if __name__ == "__main__":
    main()
