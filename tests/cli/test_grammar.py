"""The grammar that all commands share, as a user meets it: help, units, exit codes, options."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sabia.cli.registry import COMMANDS, SUBCOMMANDS, all_calls

SABIA = [sys.executable, "-m", "sabia.cli.main"]
HEAVY = ("numpy", "pyarrow", "torch", "jax", "rich", "pydantic", "numba", "aiohttp", "typer")


def run(*words: str, **settings) -> subprocess.CompletedProcess:
    return subprocess.run([*SABIA, *words], capture_output=True, text=True, **settings)


def test_help_lists_every_command() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    assert all(f"  {name} " in shown.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", all_calls())
def test_command_help_is_light_and_has_examples(name: str) -> None:
    probe = (
        "import sys; sys.argv = ['sabia', *sys.argv[1].split(), '--help']\n"
        "from sabia.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "print(len(sys.modules), file=sys.stderr)"
    )
    words = [sys.executable, "-c", probe, name]
    shown = subprocess.run(words, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "Examples:" in shown.stdout and f"man sabia-{name.split()[0]}" in shown.stdout
    assert int(shown.stderr) <= 200  # modules: a measure that does not depend on the machine's load


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_subcommands_are_listed_and_the_first_is_the_default(name: str) -> None:
    default, *others = SUBCOMMANDS[name]
    shown = run(name, "--help").stdout
    assert all(f"  {verb} " in shown for verb in SUBCOMMANDS[name])
    assert run(name, default, "--help").stdout == shown
    for verb in others:
        assert f"Usage: sabia {name} {verb} " in run(name, verb, "--help").stdout
    asked = run(name, f"./{others[0]}")
    assert asked.returncode == 2 and f"sabia {name}: error: " in asked.stderr


def test_version_says_what_is_there() -> None:
    assert re.fullmatch(r"sabia \d+\.\d+\.\d+\n", run("--version").stdout)


def test_unknown_command_is_usage_error_with_a_hint() -> None:
    asked = run("dedupe")
    assert asked.returncode == 2
    assert "dedup" in asked.stderr


def test_bare_call_shows_help_and_exits_2() -> None:
    asked = run()
    assert asked.returncode == 2 and "Commands" in asked.stderr and not asked.stdout


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    rows = [{"text": f"A small page about house number {i}, its door and its seven windows."}
            for i in range(50)]  # fmt: skip
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_unknown_config_key_is_named(documents: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("no-such-thing = 3\n")
    asked = run("dedup", str(documents), "--config", str(config), "-o", str(tmp_path / "o.parquet"))
    assert asked.returncode == 2 and "no-such-thing" in asked.stderr


def test_flag_beats_variable_beats_file_beats_default(documents: Path, tmp_path: Path) -> None:
    def threshold(*words: str, **environment: str) -> float:
        out = tmp_path / "o.parquet"
        done = run("dedup", str(documents), "-o", str(out), "--force", *words,
                   env=os.environ | environment)  # fmt: skip
        assert done.returncode == 0, done.stderr
        from sabia.core.shards.outputs import read_metadata

        return read_metadata(str(out))["options"]["threshold"]

    config = tmp_path / "c.toml"
    config.write_text("threshold = 0.7\n[dedup]\nthreshold = 0.75\n")
    assert threshold() == 0.7
    assert threshold("--config", str(config)) == 0.75
    assert threshold("--config", str(config), SABIA_DEDUP_THRESHOLD="0.6") == 0.6
    last = threshold("--threshold", "0.9", "--config", str(config), SABIA_DEDUP_THRESHOLD="0.6")
    assert last == 0.9


def test_wrong_choice_is_one_line(documents: Path) -> None:
    asked = run("dedup", str(documents), "--to", "csv")
    assert asked.returncode == 2 and asked.stderr.count("\n") == 1


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    asked = run("classify", str(tmp_path / "none.parquet"))
    assert asked.returncode == 2 and asked.stderr.count("\n") == 1


def test_stage_with_a_barrier_refuses_an_array(documents: Path) -> None:
    asked = run("dedup", str(documents), env=os.environ | {"SLURM_ARRAY_TASK_COUNT": "4"})
    assert asked.returncode == 2 and "one job" in asked.stderr


@pytest.mark.parametrize("variable", ["SLURM_ARRAY_TASK_COUNT", "SLURM_STEP_NUM_TASKS"])
@pytest.mark.parametrize("command", ["classify", "rewrite", "tokenize", "crawl"])
def test_one_of_several_tasks_must_know_its_slice(
    command: str, variable: str, documents: Path
) -> None:
    asked = run(command, str(documents), env=os.environ | {variable: "4"})
    assert asked.returncode == 2 and asked.stderr.count("\n") == 1
    for way in ("--shard auto", "--shard all", "--shard I/N"):
        assert way in asked.stderr


def test_a_stage_with_a_barrier_runs_on_inputs_of_its_own(documents: Path, tmp_path: Path) -> None:
    tasks = os.environ | {"SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_ID": "2",
                          "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_STEP": "1"}  # fmt: skip
    lines = (["dedup", "-o", tmp_path / "d"], ["tokenize", "--vocab-size", "280", "-o",
             tmp_path / "t"])  # fmt: skip
    for words in lines:
        line = [*map(str, words), str(documents)]
        assert run(*line, "--shard", "all", env=tasks).returncode == 0
        line[line.index("-o") + 1] += "-sliced"
        sliced = run(*line, "--shard", "auto", env=tasks)
        assert sliced.returncode == 2 and "--shard all" in sliced.stderr


def test_full_disk_is_one_line(documents: Path) -> None:
    with open("/dev/full", "wb") as full:
        asked = subprocess.run([*SABIA, "dedup", str(documents)], stdout=full,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert asked.returncode == 1
    assert "No space left" in asked.stderr and "Traceback" not in asked.stderr
