"""Every option of every command: help that fits, meaningless options refused, one wording."""

import json
import random
import subprocess
import sys
import unicodedata
from collections.abc import Iterator

import pytest
from forked import Command

from sabia.cli import help_page
from sabia.cli.command import error_object
from sabia.cli.group import typer_command
from sabia.cli.registry import SUBCOMMANDS, all_calls, find
from sabia.core.errors import UsageError
from sabia.core.options import about
from sabia.core.options.option import GROUPS, Option
from sabia.core.options.table import Options, resolve

CALLS = all_calls()
SABIA = Command()
PLAIN = [sys.executable, "-m", "sabia.cli.main"]
WORDS = {"integer": "3", "number": "0.5", "count": "2k", "whole": "2k", "length": "64",
         "size": "2MB", "duration": "3m", "share": "40%", "money": "4", "regex": "x"}  # fmt: skip
MEANINGLESS = 300


def table(name: str) -> type[Options]:
    return find(name).options


def width(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def value_of(option: Option) -> object:
    """A legal value of an option, not the default where there is another."""
    if option.choices:
        return next((c for c in option.choices if c != option.default), option.choices[0])
    if option.many:
        return ["x"]
    if option.kind == "flag":
        return True
    if option.kind == "share":
        return "50%"
    bounds = [bound for bound in (option.least, option.above, option.most) if bound is not None]
    if bounds:
        value = min(bounds[0] + 1, option.most or bounds[0] + 1)
        return str(int(value) if option.kind in ("integer", "whole") else value)
    return WORDS.get(option.kind, "x")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("common", [False, True])
def test_help_fits_80_columns_and_has_groups(name: str, common: bool) -> None:
    shown = help_page.text(name, find(name), SUBCOMMANDS.get(name, {}), common)
    assert [line for line in shown.splitlines() if width(line) > 80] == []
    groups = [group for group in GROUPS if f"\n{group}" in shown]
    assert len(groups) >= (1 if common else 2)
    for option in table(name).table.values():
        listed = f" --{option.key}" in shown or option.positional
        assert listed or common, option.name


@pytest.mark.parametrize("name", CALLS)
def test_common_help_is_shorter_and_names_the_rest(name: str) -> None:
    common = [o for o in table(name).table.values() if o.common or o.required]
    assert 1 <= len(common) <= 14
    shown = help_page.text(name, find(name), {}, common=True)
    assert f"--help shows all {len(table(name).table)} options" in shown


@pytest.mark.parametrize("name", CALLS)
def test_json_help_is_the_table(name: str) -> None:
    page = json.loads(help_page.as_json(name, find(name), {}))
    assert {one["name"] for one in page["options"]} == {o.key for o in table(name).table.values()}
    assert all(one["help"] and one["group"] in GROUPS for one in page["options"])


@pytest.mark.parametrize("name", CALLS)
def test_declarations_hold_together(name: str) -> None:
    options = table(name).table
    for option in options.values():
        assert not option.help.endswith("."), option.name
        for condition in option.only:
            assert set(condition.given) <= set(options), (option.name, condition)
            for other, values in condition.values:
                known = options[other].choices
                wanted = {value for value in values if value} if known else set()
                assert wanted <= set(known), (option.name, other, values)
        if option.choices and option.default not in (None, ""):
            assert option.default in option.choices, option.name
    flags = [flag for option in options.values() for flag in about.flags(option)]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("name", CALLS)
def test_typer_splits_every_flag(name: str) -> None:
    got: dict[str, object] = {}
    command = typer_command(name, find(name), lambda _name, _command, flags: got.update(flags) or 0)
    words, expected = [], {}
    for option in table(name).table.values():
        value = value_of(option)
        expected[option.name] = value
        if option.positional:
            words += ["x"]
        elif option.kind == "flag":
            words += [about.flags(option)[0]]
        else:
            words += [about.flags(option)[0], *(value if option.many else [value])]
    command.main(words, prog_name="sabia", standalone_mode=False)
    assert got == expected


def meaningless_lines() -> Iterator[tuple[str, dict[str, object], str]]:
    """(command, flags, the option without a meaning), drawn at random from the tables."""
    draw = random.Random(0)
    candidates = [(name, option) for name in CALLS for option in table(name).table.values()
                  if option.only]  # fmt: skip
    while True:
        name, option = draw.choice(candidates)
        flags: dict[str, object] = {}
        for other in table(name).table.values():
            steering = any(other.name in dict(c.values) for c in option.only)
            if steering and other.choices and draw.random() < 0.7:
                flags[other.name] = draw.choice(other.choices)
            if other.required:
                flags[other.name] = value_of(other)
        flags[option.name] = value_of(option)
        values = {o.name: o.default_value() for o in table(name).table.values()} | flags
        if not all(condition.holds(values) for condition in option.only):
            yield name, flags, option.flag


def refusal(name: str, flags: dict[str, object]) -> str:
    with pytest.raises(UsageError) as refused:
        resolve(table(name), name, flags, {})
    return str(refused.value)


def test_options_without_a_meaning_are_refused() -> None:
    lines = meaningless_lines()
    seen = set()
    for _ in range(MEANINGLESS):
        name, flags, flag = next(lines)
        said = refusal(name, flags)
        assert "only with" in said or "not together" in said, (name, flags, said)
        seen.add((name, flag))
    assert len(seen) > 60


def test_refusals_reach_the_shell() -> None:
    lines = meaningless_lines()
    for _ in range(5):
        name, flags, _ = next(lines)
        words = []
        for key, value in flags.items():
            flag = table(name).table[key].flag
            for one in value if isinstance(value, list) else [value]:
                words += [flag] if one is True else [flag, str(one)]
        done = subprocess.run(
            [*SABIA, *name.split(), *words], capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 2, (words, done.stderr)
        assert done.stderr.count("\n") == 1 and "only with" in done.stderr, done.stderr


# command lines whose last option was once accepted and ignored, or has no meaning there
IGNORED = [
    ("classify", "x --long windows"),
    ("classify", "x --precision bf16"),
    ("classify", "x --length 77"),
    ("classify", "x --concurrency 3"),
    ("classify", "x --max-usd 5"),
    ("classify", "x --url http://localhost/v1"),
    ("rewrite", "x --url http://localhost/v1"),
    ("rewrite", "x --max-usd 3"),
    ("rewrite", "x --temperature 0"),
    ("rewrite", "x --on-unfaithful keep"),
    ("rewrite", "x --engine local --model m --url http://localhost/v1"),
    ("dedup", "x --method url --ngram 5"),
    ("dedup", "x --method url --ngram 6"),
    ("dedup", "x --method exact --threshold 0.7"),
    ("dedup", "x --clusters 3"),
    ("dedup", "x --overlap 0.6"),
    ("dedup", "x --min-copies 2"),
    ("dedup", "x --method line --signatures sabia"),
    ("tokenize", "x --tokenizer t --vocab-size 32k"),
    ("tokenize", "x --tokenizer t --digits single"),
    ("tokenize", "x --max-repeat 4"),
    ("pretrain", "x --model m --proxies 24"),
    ("pretrain", "x --shape d=64,layers=2 --context 8k"),
    ("pretrain", "x --shape d=64,layers=2 --lora-alpha 4"),
    ("pretrain", "x --shape d=64,layers=2 --schedule cosine --decay 20%"),
    ("pretrain", "x --shape d=64,layers=2 --mtbf 3h"),
    ("sft", "x --model m --lora-targets q"),
    ("sft", "x --model m --on-spike off --spike-sigmas 8"),
    ("grpo", "x --model m --judge-votes 1"),
    ("grpo", "x --model m --concurrency 16"),
    ("grpo", "x --model m --decay 10"),
    ("grpo", "x --model m --gae-lambda 0.9"),
    ("grpo", "x --model m --value-clip 0.1"),
    ("sft", "x --model m --lora-base nf4"),
    ("eval", "--task t --model m --judge-format text"),
    ("eval", "--task t --model m --judge-tokens 1024"),
    ("classify train", "x --label l -o o --regression"),
    ("classify train", "x --label l -o o --lr 5e-5"),
    ("classify train", "x --label l -o o --model m --dim 0"),
    ("classify train", "x --label l -o o --sample 10k"),
    ("plan-cluster", "--params 8B --recompute none"),
    ("plan-cluster", "--params 8B --seed 0"),
    ("plan-cluster", "--params 8B --prompts 64"),
]


@pytest.mark.parametrize(("name", "line"), IGNORED, ids=[" ".join(x) for x in IGNORED])
def test_options_that_were_ignored_are_refused(name: str, line: str) -> None:
    got: dict[str, object] = {}
    command = typer_command(name, find(name), lambda _name, _command, flags: got.update(flags) or 0)
    command.main(line.split(), prog_name="sabia", standalone_mode=False)
    option = [word for word in line.split() if word.startswith("--")][-1]
    said = refusal(name, got)
    assert said.startswith(option) and "only with" in said, said


def test_help_is_found_wherever_it_stands_but_not_as_a_value() -> None:
    options = table("rewrite").table
    assert help_page.asked(["x", "-o", "y", "--help"], options) == "--help"
    assert help_page.asked(["-h", "x"], options) == "-h"
    assert help_page.asked(["--help=json"], options) == "--help=json"
    assert help_page.asked(["--model", "--help"], options) == ""
    assert help_page.asked(["--", "-h"], options) == ""


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("--to: 'csv' (expected parquet or arrow); did you mean arrow?",
         ("--to", "csv", "parquet or arrow", "did you mean arrow?")),
        ("--jobs: 0 is out of range (expected 1 or more)", ("--jobs", "0", "1 or more", None)),
        ("x: No such file or directory; check the path", (None, "x", None, "check the path")),
        ("--task: /x: No such file or directory", ("--task", "/x", None, None)),
        ("--url: only with --engine endpoint", ("--url", None, "with --engine endpoint", None)),
        ("X: y (an error; run again)", ("X", None, None, "run again")),
        ("--tau: only without --data; see man", ("--tau", None, "without --data", "see man")),
    ],
)  # fmt: skip
def test_errors_are_objects_for_programs(message: str, parts: tuple) -> None:
    found = error_object(2, message)
    assert (found["option"], found["value"], found["expected"], found["fix"]) == parts
    assert (found["code"], found["message"]) == (2, message)


def test_json_errors_reach_stderr_as_one_object() -> None:
    for words in (["rewrite", "nowhere.parquet", "--json"], ["rewrite", "--nope", "--json"]):
        done = subprocess.run([*SABIA, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and not done.stdout
        assert json.loads(done.stderr)["error"]["code"] == 2


def complete(*words: str) -> list[str]:
    environment = {
        "_SABIA_COMPLETE": "complete_bash", "COMP_WORDS": "sabia " + " ".join(words),
        "COMP_CWORD": str(len(words)), "PATH": "/usr/bin",
    }  # fmt: skip
    done = subprocess.run(PLAIN, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "some"),
    [
        ("de", "dedup"),
        ("dedup --meth", "--method"),
        ("dedup --method ", "minhash exact url"),
        ("pretrain --backend ", "torch jax"),
        ("plan-cluster --chip h", "h100 h200"),
        ("classify t", "train threshold"),
        ("classify train --class-w", "--class-weights"),
    ],
)
def test_shells_complete_commands_options_and_values(words: str, some: str) -> None:
    assert set(some.split()) <= set(complete(*words.split(" ")))
