"""The GPU run: results survive hangs, crashes and kills; nothing is repeated; errors are named."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

cases = pytest.importorskip("cases")
pytest.importorskip("torch")
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import reports  # noqa: E402
import run as gpu_run  # noqa: E402
from cases import RESULTS, Case, Comparison, Device, Failed, append_row, read_rows  # noqa: E402
from run import Part, main, seconds_of  # noqa: E402
from run_part import load_part, run_case  # noqa: E402

HEAD = "import os, time\nfrom cases import Case, Failed, Skipped\n"
COUNTED = (
    HEAD
    + """
def counted(name):
    with open({log!r}, "a") as file:
        file.write(name + "\\n")
    return {{"value": 1}}

def cases(device):
    for name in "abcd":
        yield Case(name, lambda name=name: counted(name))
"""
)


def part(folder: Path, name: str, text: str, limit_s: float = 60) -> Part:
    file = folder / f"{name}.py"
    file.write_text(text)
    return Part(file, limit_s)


@pytest.fixture(autouse=True)
def _own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits as on a GPU; the longer ones of the CPU are for machines that are busy."""
    monkeypatch.setattr(gpu_run, "SLOWER", 1)


def statuses(out: Path) -> dict[str, str]:
    return {f"{r['part']}/{r['case']}": r["status"] for r in reports.last(read_rows(out / RESULTS))}


def test_failures_skips_and_crashes_are_rows_and_stop_nothing(tmp_path: Path) -> None:
    text = (
        HEAD
        + """
def fail(): raise Failed("off by 2", {"difference": 2.0})
def skip(): raise Skipped("no such unit")
def cases(device):
    yield Case("fine", lambda: {"difference": 0.0})
    yield Case("wrong", fail)
    yield Case("absent", skip)
    yield Case("error", lambda: 1 / 0)
    yield Case("crash", lambda: os.abort())
    yield Case("after", lambda: {})
"""
    )
    fine = HEAD + 'def cases(device):\n    yield Case("fine", lambda: {})\n'
    parts = {"mixed": part(tmp_path, "mixed", text), "last": part(tmp_path, "last", fine)}
    out = tmp_path / "out"
    assert main(["--out", str(out)], parts) == 1
    assert statuses(out) == {
        "mixed/fine": "ok", "mixed/wrong": "failed", "mixed/absent": "skipped",
        "mixed/error": "failed", "mixed/crash": "crashed", "mixed/after": "ok", "last/fine": "ok",
    }  # fmt: skip
    rows = {r["case"]: r for r in reports.last(read_rows(out / RESULTS)) if r["part"] == "mixed"}
    assert rows["wrong"]["figures"] == {"difference": 2.0} and "SIGABRT" in rows["crash"]["message"]
    assert "off by 2" in (out / "report.md").read_text()
    assert len(list(out.iterdir())) <= 6


@pytest.mark.slow  # waits for a limit of 30 s
def test_a_case_that_hangs_is_ended_and_named(tmp_path: Path) -> None:
    hangs = (
        HEAD
        + """
def cases(device):
    yield Case("quick", lambda: {})
    yield Case("endless", lambda: time.sleep(1000))
    yield Case("later", lambda: {})
"""
    )
    parts = {"hang": part(tmp_path, "hang", hangs, limit_s=30)}
    parts["next"] = part(tmp_path, "next", COUNTED.format(log=str(tmp_path / "log")))
    out = tmp_path / "out"
    assert main(["--out", str(out)], parts) == 1
    assert statuses(out)["hang/quick"] == "ok" and statuses(out)["hang/endless"] == "timeout"
    assert "hang/later" not in statuses(out) and statuses(out)["next/d"] == "ok"
    assert main(["--out", str(out), "--resume"], parts) == 1  # the hang is still a failure
    assert statuses(out)["hang/later"] == "ok"
    assert (tmp_path / "log").read_text().split() == list("abcd")


WAITING = """
from pathlib import Path
log = Path({log!r})

def waits(name):
    with log.open("a") as file:
        file.write(name + "\\n")
    while name != "a" and not log.with_suffix(".go").exists():
        time.sleep(0.1)
    return {{}}

def cases(device):
    for name in "abcd":
        yield Case(name, lambda name=name: waits(name))
"""
PROGRAM = """
import sys
sys.path.insert(0, {gpu!r})
from pathlib import Path
from run import Part, main
sys.exit(main(sys.argv[1:], {{"slow": Part(Path({file!r}), 900)}}))
"""


def test_resume_after_a_kill_repeats_nothing(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    slow = part(tmp_path, "slow", HEAD + WAITING.format(log=str(log)))
    program = tmp_path / "program.py"
    folder = str(Path(gpu_run.__file__).parent)
    program.write_text(PROGRAM.format(gpu=folder, file=str(slow.file)))
    words = [sys.executable, str(program), "--out", str(out)]
    first = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)
    while not (log.exists() and "b" in log.read_text()):
        time.sleep(0.1)
        assert first.poll() is None
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    log.with_suffix(".go").touch()
    assert subprocess.run([*words, "--resume"], stdout=subprocess.DEVNULL).returncode == 0
    assert log.read_text().split() == ["a", "b", "b", "c", "d"]  # b had no result
    assert subprocess.run([*words, "--resume"], stdout=subprocess.DEVNULL).returncode == 0
    assert log.read_text().split() == ["a", "b", "b", "c", "d"]
    assert subprocess.run(words, capture_output=True).returncode == 2  # results are never replaced


def test_a_case_that_two_calls_could_not_end_is_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(name: str, one: Part, out: Path, *rest: object) -> None:
        append_row(out, {"part": name, "case": "endless", "status": "started"})

    monkeypatch.setattr(gpu_run, "_process", cut_off)
    parts, out = {"hang": part(tmp_path, "hang", HEAD, limit_s=900)}, tmp_path / "out"
    assert main(["--out", str(out), "--budget", "8s"], parts) == 75
    assert statuses(out) == {}
    assert main(["--out", str(out), "--budget", "8s", "--resume"], parts) == 1
    assert statuses(out) == {"hang/endless": "timeout"}


def test_a_missing_package_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = part(tmp_path, "needy", HEAD + "def cases(device): return []\n").file
    parts = {"needy": Part(file, 60, ("nowhere_to_be_had",))}
    assert main(["--out", str(tmp_path / "out")], parts) == 0
    assert "nowhere_to_be_had not installed" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--only", "kernel"], ["--budget", "soon"], []])
def test_wrong_usage(words: list[str], tmp_path: Path) -> None:
    given = words and [*words, "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as error:
        main(given)
    assert error.value.code == 2


def test_budgets() -> None:
    assert [seconds_of(t) for t in ("9m", "90", "1.5h", "")] == [540, 90, 5400, float("inf")]


def test_comparison_says_what_became_better_and_worse(tmp_path: Path) -> None:
    for name, speed, status in (("old", 100.0, "failed"), ("new", 120.0, "ok")):
        (tmp_path / name).mkdir()
        for case, factor in (("a", 1), ("b", 1 if name == "old" else 0.5)):
            append_row(tmp_path / name, {
                "part": "speed", "case": case, "status": status if case == "a" else "ok",
                "seconds": 1, "message": "", "figures": {"tokens_per_s": speed * factor},
            })  # fmt: skip
    text = reports.comparison(*(read_rows(tmp_path / n / RESULTS) for n in ("old", "new")))
    assert "worse: speed: b: tokens_per_s 100 → 60 (-40%)" in text
    assert "better: speed: a: failed → ok" in text and "(+20%)" in text


def test_record_appends_a_dated_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests" / "bench").mkdir(parents=True)
    results = tmp_path / "tests" / "bench" / "RESULTS.md"
    results.write_text("# Measurements\n")
    out = tmp_path / "out"
    out.mkdir()
    gaps = [{"us": 917.25, "after": "a | b"}]
    machine = {"device": "NVIDIA X1", "gaps": gaps}
    for name, figures in (("machine", machine), ("copy", {"gb_per_s": 12.5})):
        append_row(out, {"part": "environment", "case": name, "status": "ok", "seconds": 1,
                         "message": "", "figures": figures})  # fmt: skip
    monkeypatch.setattr(gpu_run, "ROOT", tmp_path)
    assert main(["--out", str(out), "--resume", "--only", "none", "--record"]) == 0
    text = results.read_text()
    assert text.startswith("# Measurements\n\n## GPU run on NVIDIA X1, 20") and "| 12.5 |" in text
    assert "machine: gaps\n\n- us 917.2, after a \\| b\n" in text


def test_carry_collects_pure_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, tag in (("pure_one", "py3-none-any"), ("built_one", "cp311-cp311-linux_x86_64")):
        with zipfile.ZipFile(wheels / f"{name}-1.0-{tag}.whl", "w") as file:
            info = f"{name}-1.0.dist-info"
            file.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            )
            file.writestr(
                f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
            )
            file.writestr(f"{info}/RECORD", "")
    for key in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    parts = {"x": Part(tmp_path / "x.py", 1, ("pure_one", "built_one"))}
    assert main(["--carry", str(tmp_path / "carried")], parts) == 0
    assert [p.name for p in (tmp_path / "carried").iterdir()] == ["pure_one-1.0-py3-none-any.whl"]
    text = capsys.readouterr().out
    assert "built_one: no pure-Python wheel" in text and "pip install --no-index" in text


def test_differences() -> None:
    compared = Comparison()
    compared.add("equal", [1.0, np.nan], [1.0, np.nan], 0.0)
    compared.add("near", [1.0, 2.1], [1.0, 2.0], 0.06)
    assert compared.check()["difference"] == pytest.approx(0.05)
    for actual in ([np.nan, 2.0], [1.0], [np.inf, 2.0]):
        wrong = Comparison()
        wrong.add("x", actual, [1.0, 2.0], 1e9)
        with pytest.raises(Failed, match="differs by inf"):
            wrong.check()
    compared.add_norm("far", [1.0, 0.0], [0.0, 1.0], 1.0)
    with pytest.raises(Failed, match=r"far \[2\] differs by 1.41"):
        compared.check()


def device(folder: Path) -> Device:
    return Device(False, "cpu", 0, folder, folder)


def test_a_planted_error_in_a_kernel_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from sabia.kernels.rms_norm import torch_impl

    right = torch_impl.IMPLEMENTATIONS["triton"]
    monkeypatch.setitem(
        torch_impl.IMPLEMENTATIONS,
        "triton",
        lambda x, weight, *rest: right(x, weight * 1.001, *rest),
    )
    module = load_part(gpu_run.PARTS["kernels-others"].file)
    chosen = [c for c in module.cases(device(tmp_path)) if c.name.startswith("rms_norm / triton")]
    assert len(chosen) >= 8
    rows = {c.name: run_case(c)[0] for c in chosen if "float32 / 36 wide" in c.name}
    assert {row["status"] for row in rows.values()} == {"failed"}
    assert (
        "d weight [36] differs by"
        in rows["rms_norm / triton / torch / float32 / 36 wide"]["message"]
    )


def test_every_kernel_with_arrays_is_compared(tmp_path: Path) -> None:
    from sabia.kernels.runtime.dispatch import KERNELS

    names = {
        c.name.split(" / ")[0]
        for c in load_part(gpu_run.PARTS["kernels-others"].file).cases(device(tmp_path))
    }
    arrays = {k.operation for k in KERNELS.values() if "torch" in k.implementations}
    assert names == arrays - {"quantize"}


def test_names_of_cases_are_unique(tmp_path: Path) -> None:
    for name, one in gpu_run.PARTS.items():
        if name in ("kernels-others", "codes", "decoding", "tuning", "environment"):
            listed = [case.name for case in load_part(one.file).cases(device(tmp_path))]
            assert len(set(listed)) == len(listed)
    assert isinstance(Case("x", dict).run(), dict)
    assert json.dumps(listed)
