"""plan-cluster with layouts, scripts and charts, as a user calls it."""

import json
import math
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from plan_calls import call, called, process, report

from sabia.core.options.pretrain import PretrainOptions

pytest.importorskip("numpy", reason="a search needs numpy")
RUN = "--params 8B --tokens 1T --chip h100 --price 2"


def test_a_search_shows_layouts_and_a_line_to_paste() -> None:
    done = process(f"{RUN} --search")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("# "))
    head, *rows = [line.replace(" *", "").split() for line in lines[first : first + 4]]
    assert head[:2] == ["#", "CHIPS"] and {"dp", "tp", "pp", "mb", "REMAT"} < set(head)
    assert "ep" not in head  # 1 in each layout of a dense model
    axes = head[2 : head.index("mb")]
    sizes = [dict(zip(head, row, strict=False)) for row in rows]
    for row in sizes:
        assert math.prod(int(row[axis]) for axis in axes) == int(row["CHIPS"].replace(",", ""))
    line = next(x for x in done.stdout.splitlines() if x.startswith("command"))
    assert line.split()[1:3] == ["sabia", "pretrain"] and "--mesh" in line


def test_the_pasted_line_is_accepted_by_the_parser_of_pretrain() -> None:
    from sabia.cli.registry import find

    flags = report(f"{RUN} --search --chips 64")["layout"]["pretrain_flags"]
    words = iter(shlex.split(flags)[2:])
    given = {word.removeprefix("--"): next(words) for word in words}
    options = find("pretrain").options.read(given | {"shape": "d=64,layers=2"})
    assert options.mesh == given["mesh"] and options.batch == int(given["batch"])


def test_explain_prints_terms_and_parts() -> None:
    text = call(f"{RUN} --fixed-layout fsdp=64 --explain").stdout
    for words in ("MEMORY of the fullest chip, fsdp=64", "optimizer", "total", "STEP", "matmul"):
        assert words in text


def test_rows_of_a_search_go_to_json_lines() -> None:
    rows = [json.loads(x) for x in call(f"{RUN} --search --to jsonl").stdout.splitlines()]
    assert [row["deadline_s"] for row in rows] == [30 * 86400, 14 * 86400, 7 * 86400]
    assert rows[0]["chips"] < rows[2]["chips"]


@pytest.mark.parametrize("kind", ["slurm", "skypilot"])
def test_a_script_is_all_that_stdout_carries(kind: str, tmp_path: Path) -> None:
    done = call(f"{RUN} --search --chips 64 --emit {kind}")
    assert done.code == 0, done.stderr
    assert "sabia" in done.stdout and "--mesh" in done.stdout and "DEADLINE" not in done.stdout
    assert "given 64 H100" in done.stderr
    if kind == "slurm":
        path = tmp_path / "run.sbatch"
        path.write_text(done.stdout)
        assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
        assert "#SBATCH --nodes=8" in done.stdout


def test_a_script_takes_the_words_that_it_is_given(tmp_path: Path) -> None:
    command = ["--pretrain-args", "rows/ --model base/ --lr 1e-4 --steps 100"]
    text = called([*f"{RUN} --search --chips 64 --emit slurm".split(), *command]).stdout
    assert "pretrain rows/ --model base/ --lr 1e-4 --steps 100 --mesh" in text
    assert "--tokens" not in text


def test_the_script_s_checkpoints_are_options_of_the_trainer() -> None:
    text = called([*f"{RUN} --search --chips 64 --emit slurm --preempt 6h".split()]).stdout
    words = shlex.split(re.findall(r"(?m)^set -- (.*)$", text)[0])
    at = words.index("--save-every")
    assert words[at : at + 3] == ["--save-every", "auto", "--mtbf"]
    options = PretrainOptions.read({"save_every": words[at + 1], "mtbf": words[at + 3],
                                    "inputs": ["x"], "out": "run", "config_json": "c.json",
                                    "tokens": "1B"})  # fmt: skip
    assert options.mtbf == pytest.approx(1 / (64 * 0.001 / 86400 + 1 / 21600), abs=1)


def test_a_chart_is_written_beside_the_table(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    done = process(f"{RUN} --search --chips 64 --plot {path}")
    assert done.returncode == 0 and "DEADLINE" in done.stdout
    assert path.read_text().startswith("<svg ") and not list(path.parent.glob(".*"))


def test_compared_by_layouts() -> None:
    rows = report("--params 8B --tokens 1T --compare h100,v5p --search --chips 64 --deadline 90d")[
        "rows"
    ]
    assert all(row["layout"] and 0.1 < row["mfu"] < 0.8 for row in rows)


def test_tensor_beyond_the_fast_domain_warns() -> None:
    words = "--params 405B --chip h100 --fixed-layout tp={},fsdp=64,pp=2 --stack megatron"
    beyond = call(f"{words.format(16)} --tokens 10B --deadline 90d")
    assert beyond.code == 0 and "tensor=16 is more than the 8 h100" in beyond.stderr
    within = call(f"{words.format(8)} --tokens 10B --deadline 90d --utilisation 100%")
    assert "goes beyond" not in within.stderr


def test_rows_name_the_layout_as_it_can_be_given_again() -> None:
    (row, *_) = report(f"{RUN} --search --chips 64")["rows"]
    again = report(f"{RUN} --fixed-layout {row['layout']}")["rows"][0]
    assert again["finishes_s"] == row["finishes_s"] and again["layout"] == row["layout"]
