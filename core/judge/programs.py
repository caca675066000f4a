"""The verifier `code`: the program in a model's text passes the tests of the record.

The reference holds the tests, as
  - Python with asserts;
  - a list of such texts in JSON;
  - an object in JSON with the keys of HumanEval (`prompt`, `test`, `entry_point`) or of MBPP
    (`test_list`, `test_setup_code`, `test_imports`); other keys are not read.
The program is the last Python code block that defines what the tests use, the last one without
such, or the whole text without a block. What stands before the entry point in `prompt` (imports,
helpers) is put in front; a text that does not define the entry point continues the prompt. The
tests run in another process than the program (see `core.sandbox.isolated`): a function of the
program with the name of one of Python's own replaces it in the tests only as `entry_point`.
"""

import ast
import builtins
import contextlib
import functools
import json
import re
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import BadData
from sabia.core.sandbox.isolated import Tested, boxes

_FENCE = re.compile(r"^[ ]{0,3}(```+|~~~+)[ \t]*([\w+.-]*)[^\n]*\n", re.MULTILINE)
_KEYS = ("test", "test_list", "test_setup_code", "test_imports", "prompt", "entry_point")
_PYTHON = ("", "python", "python3", "py")


@dataclass(frozen=True)
class Tests:
    """The tests of a record. names: what they take from the program."""

    tests: str
    setup: str = ""
    prompt: str = ""
    preamble: str = ""
    entry_point: str = ""
    names: tuple[str, ...] = ()


def passes(text: str, reference: str) -> Tested:
    """Whether the program of a text passes the tests of a reference.

    Raises BadData for a reference without tests, MissingBackend where the kernel permits no
    isolation.
    """
    tests = tests_of(reference)
    asked = {"setup": tests.setup, "tests": tests.tests, "entry_point": tests.entry_point}
    with boxes.one() as box:
        return box.test(program_of(text, tests), {**asked, "names": tests.names})


@functools.lru_cache(1024)
def tests_of(reference: str) -> Tests:
    """The tests of a reference. Raises BadData."""
    keys: dict[str, Any] = {"test": reference}
    if reference.lstrip()[:1] in ("{", "["):
        # what is no JSON is Python that begins with a bracket
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(reference)
            keys = {"test_list": value} if isinstance(value, list) else value
    given = {name: _text(keys, name) for name in _KEYS}
    tests = "\n".join(part for part in (given["test"], given["test_list"]) if part)
    prompt, entry = given["prompt"] if given["entry_point"] else "", given["entry_point"]
    preamble = ""
    if prompt:
        start = _definition(prompt, entry)
        if start is None:
            raise BadData(f"tests: the prompt does not define the entry point {entry!r:.80}")
        preamble = prompt[:start]
    setup = "\n".join(p for p in (preamble, given["test_imports"], given["test_setup_code"]) if p)
    tree, setup_tree = _parsed(tests, "tests"), _parsed(setup, "the code before the tests")
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        raise BadData(f"tests: no assert in {tests!r:.80} (expected Python with asserts)")
    own = _bound(tree) | _bound(setup_tree) | set(dir(builtins))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names = (used - own) | ({entry} if entry else set())
    return Tests(tests, setup, prompt, preamble, entry, tuple(sorted(names)))


def _text(keys: dict[str, Any], name: str) -> str:
    value = keys.get(name)
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise BadData(f"tests: {name} is {value!r:.60} (expected a text or a list of texts)")
    return value


def _parsed(source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadData(f"{what} are not Python: {error}") from error


def _bound(tree: ast.Module) -> set[str]:
    """The names that statements of the module bind, not those in its functions."""
    names: set[str] = set()
    open_nodes: list[ast.AST] = [*tree.body]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        open_nodes += ast.iter_child_nodes(node)
    return names


def _definition(source: str, name: str) -> int | None:
    """Where the last definition of a name on the level of the module begins."""
    word = re.escape(name)
    pattern = rf"^(?:(?:async )?(?:def|class) +{word}\b|{word} *[:=][^=])"
    starts = list(re.finditer(pattern, source, re.MULTILINE))
    return starts[-1].start() if starts else None


def program_of(text: str, tests: Tests) -> str:
    """The program that a text gives for these tests."""
    blocks = code_blocks(text)
    wanted = (tests.entry_point,) if tests.entry_point else tests.names
    program = next(
        (b for b in reversed(blocks) if any(_definition(b, name) is not None for name in wanted)),
        blocks[-1] if blocks else text,
    )
    if tests.prompt and _definition(program, tests.entry_point) is None:
        return tests.prompt + program
    return tests.preamble + program


def code_blocks(text: str) -> list[str]:
    """The Python code blocks of a Markdown text, in order; one that is not closed ends with it."""
    blocks, at = [], 0
    while opened := _FENCE.search(text, at):
        fence, language = opened.groups()
        closing = re.compile(rf"^[ ]{{0,3}}{fence[0]}{{{len(fence)},}}[ \t]*$", re.MULTILINE)
        closed = closing.search(text, opened.end())
        end = closed.start() if closed else len(text)
        if language.lower() in _PYTHON:
            blocks.append(text[opened.end() : end])
        at = closed.end() if closed else len(text)
    return blocks
