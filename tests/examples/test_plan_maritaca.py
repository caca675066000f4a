"""The article's example: it runs, its figures are the planner's, each difference has a reason."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "plan_maritaca.sh"


def report_module():
    spec = importlib.util.spec_from_file_location(
        "plan_maritaca_report", SCRIPT.with_name("plan_maritaca_report.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Standard output and the folder of JSON of one run of the script."""
    folder = tmp_path_factory.mktemp("maritaca")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(SCRIPT), str(folder)],
        env=os.environ | {"PATH": path, "COLUMNS": "200"},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def test_tables_are_shown_with_the_line_that_makes_them(ran):
    text, _ = ran
    assert text.count("$ sabia plan-cluster ") == 6
    assert "45,370 GPU-hours" in text
    assert "= all" in text and "(9.0 weeks)" in text
    assert "cannot" not in text and "Traceback" not in text


def test_every_figure_is_the_planners_and_every_difference_has_a_reason(ran):
    text, folder = ran
    figures = report_module().load(folder)
    assert len(figures) >= 55
    assert not [figure.what for figure in figures if figure.unexplained]
    differ = {figure.what: figure for figure in figures if figure.difference}
    assert differ["30 days: B200 by memory"].sabia == 152
    assert differ["medium models, $M"].sabia == pytest.approx(0.352)
    assert differ["small models, training, %"].sabia == pytest.approx(46.5, abs=0.05)
    assert differ["weeks on 20 B200"].sabia == pytest.approx(9.0, abs=0.005)
    table1 = json.loads((folder / "table1.json").read_text())
    hours = next(figure for figure in figures if figure.what == "thousand GPU-hours")
    assert hours.sabia == table1["chip_hours"] / 1e3 == pytest.approx(45.3704, abs=1e-4)
    assert not hours.difference
    assert f"{len(figures)} figures: {len(figures) - len(differ)} are" in text
    assert all(figure.why.split()[0] in text for figure in differ.values())


def test_reasons_are_only_given_where_figures_differ(ran):
    """A reason that is on file for a figure that agrees would be out of date."""
    import tomllib

    told = tomllib.loads((SCRIPT.with_name("plan_maritaca.toml")).read_text())["figure"]
    figures = report_module().load(ran[1])
    idle = [f.what for f, row in zip(figures, told, strict=True) if "why" in row and not f.why]
    assert not idle


def test_a_difference_without_a_reason_fails(tmp_path, capsys, monkeypatch):
    module = report_module()
    figure = {"part": "p", "what": "w", "article": 3, "within": 0.5, "at": "run:rows.0.n"}
    (tmp_path / "run.json").write_text('{"rows": [{"n": 3.4}]}')
    same = module.compare(figure, {"run": {"rows": [{"n": 3.4}]}})
    assert (same.difference, same.unexplained) == ("", False)
    off = module.compare(figure, {"run": {"rows": [{"n": 4.0}]}})
    assert (off.difference, off.unexplained) == ("+1", True)
    low = module.compare(figure | {"article": [5, 9]}, {"run": {"rows": [{"n": 4.0}]}})
    assert (low.article, low.difference) == ("5 to 9", "-1")
    monkeypatch.setattr(module, "load", lambda _: [off])
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path)])
    assert module.main() == 1
    assert "figures that differ without a reason: w" in capsys.readouterr().err
