"""What plan-cluster imports and how soon it answers; `--help` by panels."""

import json
import os
import subprocess
import sys

import pytest
from plan_calls import call

LOCAL = ("typer", "annotated_doc", "shellingham", "rich", "sabia")  # typer needs the next two
PROBE = """
import sys, json
before = set(sys.modules)
sys.argv = ['sabia', 'plan-cluster', *sys.argv[1:]]
from sabia.cli.main import main
code = 0
try: main()
except SystemExit as end: code = end.code
loaded = {name.split('.')[0] for name in set(sys.modules) - before}
foreign = sorted(loaded - set(sys.stdlib_module_names))
print(json.dumps([code, foreign, len(sys.modules)]), file=sys.stderr)
"""


def probed(words: str) -> tuple[int, list[str], int]:
    command = [sys.executable, "-c", PROBE, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    return tuple(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "words",
    [
        "--params 8B --lora --chips 20 --deadline 99w",
        "--params 8B --compare h100 --preempt 6h --simulate 50 --carbon --serve-tokens 1T --json",
        "--params 8B --chip h100 --fixed-layout fsdp=64 --explain",
        "--params 8B --compare b200,v5p --plot {out}",
        "--params 8B --chip h100 --stage serve",
        "--params 8B --tokens 500m",
    ],
)
def test_without_a_search_only_the_standard_library_and_typer(words: str, tmp_path) -> None:
    _code, foreign, modules = probed(words.format(out=tmp_path / "plan.svg"))
    assert not [name for name in foreign if not name.startswith(LOCAL)], foreign
    assert modules <= 320


def test_a_terse_answer_needs_few_modules() -> None:
    code, foreign, _ = probed("--params 1.6T --active 49B")
    assert not code and {name for name in foreign if not name.startswith(LOCAL)} <= {"numpy"}


def test_the_help_is_grouped_and_every_line_short() -> None:
    shown = call("--help").stdout
    titles = [line.rstrip(":") for line in shown.splitlines() if line[:1] not in ("", " ")]
    assert [title.partition(" (only with")[0] for title in titles[1:-1]] == [
        "Input and output", "Plan", "Model", "Run", "Hardware", "Layout",
        "Failures and checkpoints", "Money", "Costs and carbon", "Generation", "GRPO",
        "Judge model", "Output", "General", "Examples",
    ]  # fmt: skip
    assert "GRPO (only with --stage grpo)" in titles
    assert max(map(len, shown.splitlines())) <= 80


def test_an_option_may_come_from_the_environment() -> None:
    environment = os.environ | {"SABIA_PLAN_CLUSTER_FIXED_LAYOUT": "fsdp=64"}
    command = [sys.executable, "-m", "sabia.cli.main", "plan-cluster", "--params", "8B",
               "--chip", "h100", "--tokens", "100B", "--json", "-q"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert json.loads(done.stdout)["layout"]["best"]["fsdp"] == 64
