"""Charts and pages are well-formed, hold their numbers, and put marks where the values are."""

import math
from xml.etree import ElementTree

import pytest

from sabia.core import page, svg

NS = "{http://www.w3.org/2000/svg}"


def test_ticks_are_round_and_cover() -> None:
    assert svg.ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert svg.ticks(3, 3)[0] <= 3 <= svg.ticks(3, 3)[-1]
    for low, high in ((-7.3, 12), (0.001, 0.0013), (5e5, 9e6)):
        found = svg.ticks(low, high)
        assert found[0] <= low and found[-1] >= high and 3 <= len(found) <= 12


def test_line_chart_maps_values_linearly_and_breaks_at_nan() -> None:
    points = [(0, 0.0), (5, 0.5), (6, math.nan), (10, 1.0)]
    chart = svg.line_chart([svg.Series("a & b", points)], "Loss <x>", "step", "nats")
    root = ElementTree.fromstring(chart)
    path = root.find(f"{NS}path").get("d")
    places = [tuple(map(float, p.split())) for p in path.replace("L", "M").split("M") if p]
    assert len(places) == 3 and path.count("M") == 2
    (x0, y0), (x5, y5), (x10, y10) = places
    assert x5 - x0 == pytest.approx(x10 - x5, abs=0.11)
    assert y0 - y5 == pytest.approx(y5 - y10, abs=0.11) and y0 > y5
    texts = [t.text for t in root.iter(f"{NS}text")]
    assert {"a & b", "Loss <x>", "step", "nats"} <= set(texts)


def test_bars_are_proportional_and_carry_their_interval() -> None:
    groups = [
        svg.BarGroup("sums", [svg.Bar("base", 0.25, 0.2, 0.3), svg.Bar("tuned", 0.5, 0.4, 0.6)])
    ]
    root = ElementTree.fromstring(svg.bar_chart(groups, "Accuracy", "share", (0, 1)))
    bars = [r for r in root.iter(f"{NS}rect") if r.get("opacity")]
    widths = [float(r.get("width")) for r in bars]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    errors = [n for n in root.iter(f"{NS}line") if n.get("class") == "error"]
    length = float(errors[0].get("x2")) - float(errors[0].get("x1"))
    assert length == pytest.approx(widths[0] * 0.4, abs=0.2)
    assert {"0.25", "0.5", "sums", "base", "tuned"} <= {t.text for t in root.iter(f"{NS}text")}


def test_charts_without_data_are_refused() -> None:
    with pytest.raises(ValueError, match="no finite point"):
        svg.line_chart([svg.Series("a", [(0, math.nan)])], "t", "x", "y")
    with pytest.raises(ValueError, match="no bar"):
        svg.bar_chart([], "t", "x")


def test_page_is_xml_escapes_and_needs_nothing_from_outside() -> None:
    made = page.page(
        "A <b> & \x00 c", [page.section("s", [page.preformatted("x\x1b[0m <script>")])]
    )
    root = ElementTree.fromstring(made.partition("\n")[2])
    assert root.tag.endswith("html")
    assert "<script" not in made and "src=" not in made and "@import" not in made
    assert "prefers-color-scheme: dark" in made


def test_table_sets_numbers_flush_right() -> None:
    made = page.table(["task", "acc"], [["sums", "0.51 ± 0.02"], ["mc", "12.5 %"], ["x", None]])
    root = ElementTree.fromstring(made)
    assert [h.get("class") for h in root.iter("th")] == [None, "number"]
