"""Tools that an evaluated model may call: rows of a table, and programs in the sandbox.

A call has a name and arguments, an object or its JSON. What the model reads is a text; a call that
cannot be made gives a text that begins with `error:`, to which it can react.
"""

import json
from collections.abc import Mapping
from typing import Any

from sabia.core.bench.items import from_json
from sabia.core.bench.task import Task
from sabia.core.judge.lookup import CHARACTERS, LookupTable
from sabia.core.sandbox.isolated import boxes

PYTHON: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": (
            "Run a Python program without network and return what it prints. Only the standard "
            "library is available, and nothing is kept between calls."
        ),
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the program"}},
            "required": ["code"],
        },
    },
}
ARGUMENTS = {"lookup": "query", "python": "code"}


class ModelTools:
    """The tools of a task. Raises UsageError for a table, MissingBackend for a sandbox, that cannot
    be used."""

    def __init__(self, task: Task) -> None:
        self.table: LookupTable | None = None
        if "lookup" in task.tools:
            self.table = LookupTable(
                str(task.lookup_path), task.lookup_key, task.lookup_text, task.lookup_about
            )
            self.table.load()
        if "python" in task.tools:
            with boxes.one() as box:
                box.check()
        self.names = task.tools

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as requests and chat templates offer them."""
        offered = {"python": PYTHON} | ({"lookup": self.table.tool} if self.table else {})
        return [offered[name] for name in self.names]

    def answer(self, call: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """(the call as it is kept in details, what the model reads)."""
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        name, given = function.get("name"), _object(function.get("arguments"))
        made = {"tool": name, "arguments": given}
        if name not in self.names:
            return made, f"error: no tool {name!r:.60} (expected one of {', '.join(self.names)})"
        text = given.get(ARGUMENTS[name]) if given is not None else None
        if not isinstance(text, str):
            return made, f'error: expected {name} with arguments {{"{ARGUMENTS[name]}": "…"}}'
        return made, self._looked_up(text) if name == "lookup" else run_program(text)

    def _looked_up(self, query: str) -> str:
        hits = self.table.search(query) if self.table else []
        rows = [{"key": key, "text": text[:CHARACTERS]} for key, text in hits]
        return json.dumps(rows, ensure_ascii=False)


def run_program(source: str) -> str:
    """What a program prints, with the error that ends it; or why it did not run to its end."""
    with boxes.one() as box:
        ran = box.output(source)
    return ran.detail if ran.passed else f"error: {ran.detail}"


def _object(arguments: object) -> dict[str, Any] | None:
    given = from_json(arguments)
    return dict(given) if isinstance(given, Mapping) else None
