"""Every change of code that a stage runs is either a new version of its results or stated to leave
them as they were.

    python tests/core/test_result_versions.py --update

writes the digests of all modules: the statement that the results of each stage whose number in
`core/results.py` was not raised are unchanged.
"""

import ast
import random
import re
import sys
from pathlib import Path

import pytest

from sabia.cli.registry import all_calls
from sabia.core.results import RESULTS

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.source_digests import (
    FUNCTIONS,
    ROOT,
    closure,
    digest,
    local_names,
    modules,
)

STORED = Path(__file__).with_name("module_digests.txt")
NUMBERS = (int, float, bool)
UPDATE = "python tests/core/test_result_versions.py --update"


def current() -> dict[str, str]:
    """Stage → version of its results, module → digest, for all that any stage runs."""
    run = sorted(set[str]().union(*(closure(stage) for stage in RESULTS)))
    numbers = {f"results of {stage}": str(number) for stage, number in RESULTS.items()}
    return numbers | {name: digest(modules()[name]) for name in run}


def stored() -> dict[str, str]:
    """What --update has written."""
    lines = (line.rpartition(" ") for line in STORED.read_text().splitlines())
    return {name: value for name, _, value in lines}


def lines_of_results() -> dict[str, int]:
    """Stage → number of its line in core/results.py."""
    lines = enumerate((ROOT / "core/results.py").read_text().splitlines(), 1)
    return {m[1]: n for n, line in lines if (m := re.match(r'    "([\w -]+)": \d+,$', line))}


def explained(before: dict[str, str], after: dict[str, str]) -> str:
    """What differs, and what to do; '' if nothing does."""
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name)
                     != after.get(name))  # fmt: skip
    code = {name for name in changed if not name.startswith("results of ")}
    if not changed:
        return ""
    parts = [f"changed: {', '.join(changed)}"]
    numbers = lines_of_results()
    for stage in RESULTS if code else ():
        if closure(stage) & code or code - modules().keys():
            parts.append(f"  core/results.py:{numbers[stage]}: {stage!r} runs it, {RESULTS[stage]}")
    parts.append("Raise the numbers of the stages whose results differ now, then (or if none do):")
    return "\n".join([*parts, f"  {UPDATE}"])


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="3.12 splits formatted texts otherwise")
def test_changes_of_results_have_a_new_version() -> None:
    difference = explained(stored(), current())
    assert not difference, difference


def test_every_stage_has_a_line() -> None:
    assert lines_of_results().keys() == RESULTS.keys()
    assert RESULTS.keys() <= set(all_calls()) | {"classify"}


def changed_code(text: str, draw: random.Random) -> str | None:
    """A module with one number, comparison, operator or condition changed; None if it has none."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
    kinds = (ast.Compare, ast.BinOp, ast.BoolOp, ast.If, ast.Constant)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)
             and (not isinstance(node, ast.Constant) or type(node.value) in NUMBERS)]  # fmt: skip
    if not nodes:
        return None
    node = draw.choice(nodes)
    if isinstance(node, ast.Compare):
        node.ops[0] = ast.LtE() if not isinstance(node.ops[0], ast.LtE) else ast.Gt()
    elif isinstance(node, ast.BinOp):
        node.op = ast.Sub() if not isinstance(node.op, ast.Sub) else ast.Add()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        node.value = not node.value if isinstance(node.value, bool) else 2 * node.value + 1
    return ast.unparse(tree)


def renamed(text: str, draw: random.Random) -> str:
    """A module without comments, with other docstrings and other names of local variables."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and isinstance(node.body, list):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node) is not None and isinstance(first, ast.Expr):
                first.value = ast.Constant(f"Another text, {draw.random()}.")
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        nested = [
            node for node in ast.walk(function) if isinstance(node, (*FUNCTIONS, ast.ClassDef))
        ]
        if len(nested) > 1:
            continue  # inner functions have names of their own
        own = local_names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in own:
                node.id = f"renamed_{node.id}"
            elif isinstance(node, ast.ExceptHandler) and node.name:
                node.name = f"renamed_{node.name}"
    return ast.unparse(tree)


def run_modules(draw: random.Random, count: int) -> list[tuple[str, str]]:
    """(stage, module that it runs), drawn over all stages."""
    stages = [draw.choice(sorted(RESULTS)) for _ in range(count)]
    return [(stage, draw.choice(sorted(closure(stage)))) for stage in stages]


@pytest.mark.slow
def test_planted_changes_are_named(tmp_path: Path) -> None:
    """40 changes of code that any stage runs: the test names the module and the stage's line."""
    draw, planted = random.Random(7), 0
    before = {module: digest(modules()[module]) for stage in RESULTS for module in closure(stage)}
    for stage, module in run_modules(draw, 80):
        text = modules()[module].read_text()
        plain, other = tmp_path / f"{planted}.py", tmp_path / f"{planted}_changed.py"
        changed = changed_code(text, draw)
        if changed is None or planted == 40:
            continue
        plain.write_text(text)
        other.write_text(changed)
        assert digest(plain) != digest(other), module
        message = explained(before, before | {module: digest(other)})
        line = lines_of_results()[stage]
        assert module in message and f"core/results.py:{line}: {stage!r}" in message, message
        planted += 1
    assert planted == 40


@pytest.mark.slow
def test_comments_names_and_docstrings_do_not_count(tmp_path: Path) -> None:
    draw = random.Random(8)
    for number, (_, module) in enumerate(run_modules(draw, 40)):
        plain, other = tmp_path / f"{number}.py", tmp_path / f"{number}_renamed.py"
        plain.write_text(text := modules()[module].read_text())
        other.write_text(renamed(text, draw))
        assert digest(plain) == digest(other), module


def test_a_new_number_is_recorded_too() -> None:
    before = {"results of dedup": "1", "sabia.core.units": "a"}
    assert explained(before, before) == ""
    message = explained(before, before | {"results of dedup": "2"})
    assert "results of dedup" in message and UPDATE in message and "results.py" not in message


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(f"usage: {UPDATE}")
    STORED.write_text("".join(f"{name} {value}\n" for name, value in current().items()))
