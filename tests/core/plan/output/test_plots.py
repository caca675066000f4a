"""Charts: well-formed, self-contained, of the plan's own figures."""

import re
import xml.dom.minidom

import pytest

from sabia.core.errors import UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.answer import answer
from sabia.core.plan.output import plots
from sabia.core.plan.placed import plan_of

ARTICLE = PlanOptions(params=1.6e12, active=49e9)


def titles(charts):
    return [re.search(r"<title>(.*?)</title>", chart)[1] for chart in charts]


@pytest.mark.parametrize("form", [".svg", ".html"])
def test_documents_are_whole_and_need_nothing_else(form):
    output = answer(ARTICLE)
    text = plots.document(f"plan{form}", "a plan", output.text, output.charts())
    xml.dom.minidom.parseString(text)
    assert "<script" not in text
    assert ("var(--" in text) == (form == ".html")  # not every renderer of SVG knows variables
    links = set(re.findall(r"https?://[^\"' <]+", text)) - {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml",
    }  # fmt: skip
    assert not links


def test_a_plan_draws_chips_cost_and_memory():
    assert titles(answer(ARTICLE).charts()) == [
        "Chips by deadline", "Cost by deadline", "Memory of the cluster, by term"
    ]  # fmt: skip
    fixed = PlanOptions(params=1.6e12, active=49e9, chips=150)
    assert titles(answer(fixed).charts()) == ["Memory of the cluster, by term"]


def test_a_search_draws_its_front():
    pytest.importorskip("numpy", reason="a search needs numpy")
    asked = PlanOptions(params=8e9, tokens=1e12, chip="h100", price="2", search=True)
    assert titles(answer(asked).charts()) == [
        "Chips by deadline", "Cost by deadline", "Memory of the fullest chip, by term",
        "Pareto front of layouts",
    ]  # fmt: skip


def test_points_are_the_plan_s_own():
    _, plan = plan_of(ARTICLE)
    days = plots._spread([7.0, 14.0, 30.0])
    assert days[0] == pytest.approx(3.5) and days[-1] == pytest.approx(60)
    rows = plots._replanned(plan, [14.0])
    at_two_weeks = plots._chip_lines(rows)
    chips = {line.name: line.points[0][1] for line in at_two_weeks}
    row = plan.rows[1]
    assert chips["by compute"] == row.compute_min_chips
    assert (chips["by memory"], chips["used"]) == (row.memory_min_chips, row.chips)
    (point,) = plots._cost_line(plan, rows, plan.cluster.prices[0]).points
    assert point[1] == pytest.approx(plan.cost_usd(plan.cluster.prices[0], row))


def test_comparisons_and_budgets_are_drawn_too(request):
    several = answer(PlanOptions(params=8e9, compare="b200,h100"))
    assert titles(several.charts()) == ["Days", "Cost"]
    pyramid = request.config.rootpath / "examples" / "pyramid.toml"
    assert titles(answer(PlanOptions(budget=str(pyramid))).charts()) == ["Budget"]


@pytest.mark.parametrize("path", ["plan.png", "plan.pdf", "plan"])
def test_other_forms_are_refused_before_anything_is_planned(path):
    with pytest.raises(UsageError, match=r"expected .*\.svg"):
        answer(PlanOptions(plot=path))
