"""The scripted judge and OAB-bench's rows: replies that sabia reads, points that add up."""

import json
import os
import sys
from pathlib import Path

import pytest

from sabia.core.bench.judging import PointsQuestion, points_messages, read_points
from sabia.core.judge.prompt import judge_messages, parse_verdicts
from sabia.core.judge.rubric import Item
from sabia.core.judge.verdict import Verdict

sys.path.insert(0, str(Path(__file__).parent))

import oab_rows
import scripted_judge as judge

ASKED = [{"role": "user", "content": "Cabe recurso?"}]
ITEMS = (Item("1", "Apelação ao tribunal competente"), Item('the "2nd"', "Custas recolhidas"))
TABLE = """Sim.
| ITEM | PONTUAÇÃO |
|:-----|:----------|
| Fundamentos: | nan |
| A. Cabe apelação (0,40), nos termos da lei (0,10). | 0,00/0,40/0,50 |
| B. Prazo (0,10). | 0,00/0,10/0,20 |
| C. Preparo (0,10). | 0,00/0,10/0,20 |
"""


def joined(messages) -> str:
    return "\n\n".join(message["content"] for message in messages)


def test_verdicts_follow_from_the_words():
    text = joined(judge_messages(ASKED, "Cabe APELACAO ao Tribunal.", ITEMS))
    found = parse_verdicts(judge.verdicts(text), ITEMS)
    assert found == {"1": Verdict.MET, 'the "2nd"': Verdict.UNMET}


def test_points_are_replayed_or_follow_from_the_words():
    exam = PointsQuestion(ASKED, "Cabe apelação", "Apelação ao tribunal", 0.6)
    text = joined(points_messages(exam))
    assert read_points(judge.points(text, {}), 0.6) == pytest.approx(0.3)
    assert judge.points(text, {"Cabe apelação": ["Nota: [[0,40]]"]}) == "Nota: [[0,40]]"


def test_points_of_a_table_are_read():
    assert [i["weight"] for i in oab_rows.rubric(TABLE, 0.9)] == [0.5, 0.2, 0.2]
    spanned = oab_rows.rubric(TABLE, 0.7)  # grades of cells that span lines make too much
    assert [i["weight"] for i in spanned] == [0.5, 0.1, 0.1]
    assert oab_rows.rubric("Sim.", 0.5) == [{"id": "1", "text": "Sim.", "weight": 0.5}]


@pytest.mark.skipif("SABIA_TEST_DATA" not in os.environ, reason="SABIA_TEST_DATA is not set")
def test_published_examination_adds_up():
    bench = Path(os.environ["SABIA_TEST_DATA"]) / "eval" / "oab-bench"
    rows = list(oab_rows.questions(bench))
    assert len(rows) == 189 and sum(r["maximum"] for r in rows) == pytest.approx(210)
    weights = [item["weight"] for row in rows for item in row["rubric"]]
    assert len(weights) == 512 and sum(weights) == pytest.approx(210)
    published = judge.read_judgments(bench)
    for model in ("o3-2025-04-16", "sabia-3.1-2025-05-08"):
        given = list(oab_rows.answers(bench, bench / "model_answer" / f"{model}.jsonl"))
        assert len(given) == 189
        assert all(judge.folded(row["response"]) in published for row in given)
        assert json.dumps(given[0]["messages"])
