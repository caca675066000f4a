"""Descriptions of a command's options, for help, manual pages and programs."""

import ast
import inspect
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from sabia.core.options.option import GROUPS, KINDS, Condition, Option, flags, listed
from sabia.core.options.table import Options, variable_of

HELP = ("-h, --help", "Print the common options (-h), all (--help), or JSON (--help=json)")


def by_group(cls: type[Options]) -> dict[str, list[Option]]:
    """The options of a command by group, in the order of `GROUPS`; an unknown group is an error."""
    groups: dict[str, list[Option]] = {}
    for option in cls.table.values():
        groups.setdefault(option.group, []).append(option)
    return {group: groups[group] for group in sorted(groups, key=GROUPS.index)}


def conditions(option: Option, cls: type[Options], known: Iterable[Condition] = ()) -> list[str]:
    """What the option needs and excludes ('only with --search', 'not with --batch'), without the
    conditions in `known`."""
    needed = [c.text(cls.table) for c in option.only if c not in known]
    parts = [f"only {' and '.join(needed)}"] if needed else []
    if others := [cls.table[name].flag for name in option.excludes if name in cls.table]:
        parts.append(f"not with {listed(others)}")
    return parts


def shared_conditions(options: Sequence[Option]) -> tuple[Condition, ...]:
    """The conditions that two or more options have in common."""
    first, *others = options
    return tuple(c for c in first.only if others and all(c in o.only for o in others))


def long_help(cls: type[Options]) -> dict[str, str]:
    """Name → details, or the string below the declaration in the most derived class with one."""
    texts = {name: option.details for name, option in cls.table.items() if option.details}
    for base in cls.__mro__:
        if not issubclass(base, Options) or base is Options:
            continue
        tree = ast.parse(inspect.getsource(sys.modules[base.__module__]))
        body = next(
            n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == base.__name__
        )
        for before, after in pairwise(body):
            if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts.setdefault(before.target.id, " ".join(str(after.value.value).split()))
    return {name: text for name, text in texts.items() if name in cls.table}


def described(cls: type[Options], command: str) -> list[dict[str, Any]]:
    """Every option of a command as an object, for `--help=json`."""
    texts = long_help(cls)
    return [
        {
            "name": option.key,
            "flags": [] if option.positional else flags(option),
            "type": KINDS[option.kind].json,
            "unit": option.kind,
            "metavar": option.metavar,
            "choices": list(option.choices) or None,
            "minimum": option.least,
            "exclusive_minimum": option.above,
            "maximum": option.most,
            "default": option.default_value(),
            "default_text": option.default_text() or None,
            "group": option.group,
            "help": option.help,
            "long_help": texts.get(name),
            "required": option.required,
            "repeatable": option.many,
            "common": option.common,
            "conditions": conditions(option, cls),
            "recorded": option.recorded,
            "variable": variable_of(command, option),
        }
        for name, option in cls.table.items()
    ]
