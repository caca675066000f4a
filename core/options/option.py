"""One option, declared once: its kind, choices, default, group, help and conditions.

Options are declared as attributes of a class (see `table.Options`). The string below a declaration
is the long help of the option, which the manual page and `--help=json` print.

KINDS: how each kind of value is parsed, and how help names it. Values come from the command line,
an environment variable or a TOML file, as text or as a TOML number. Every reader raises UsageError
with the option's flag, the value and what was expected.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sabia.core import units
from sabia.core.errors import UsageError

TRUE, FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


class Kind(NamedTuple):
    """A kind of value: metavar in help, reader `(text, flag) → value`, and JSON type."""

    metavar: str
    read: Callable[[Any, str], Any]
    json: str


def _text(value: object, flag: str) -> str:
    text = str(value)
    if "\0" in text:
        raise UsageError(f"{flag}: has a zero byte (expected text without one)")
    return text


def _integer(value: object, flag: str) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise UsageError(
            f"{flag}: {value!r} is not a whole number (expected a number such as 4)"
        ) from None


def _number(value: object, flag: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        raise UsageError(
            f"{flag}: {value!r} is not a number (expected a number such as 0.5)"
        ) from None
    if not math.isfinite(number):
        raise UsageError(
            f"{flag}: {value!r} is not a finite number (expected a number such as 0.5)"
        )
    return number


def _whole(value: Any, flag: str) -> int:
    count = units.parse_count(value, flag)
    if count != int(count):
        raise UsageError(f"{flag}: {value!r} is not a whole number (expected a count such as 10k)")
    return int(count)


def _flag(value: object, flag: str) -> bool:
    text = str(value).strip().lower()
    if text not in TRUE + FALSE:
        raise UsageError(f"{flag}: {value!r} is not a boolean (expected true or false)")
    return text in TRUE


def _regex(value: object, flag: str) -> str:
    try:
        re.compile(str(value))
    except re.error as error:
        raise UsageError(f"{flag}: {value!r} is not a regular expression ({error})") from None
    return str(value)


KINDS = {
    "text": Kind("TEXT", _text, "string"),
    "regex": Kind("REGEX", _regex, "string"),
    "flag": Kind("", _flag, "boolean"),
    "integer": Kind("N", _integer, "integer"),
    "number": Kind("X", _number, "number"),
    "count": Kind("COUNT", units.parse_count, "number"),
    "whole": Kind("COUNT", _whole, "integer"),
    "length": Kind("LENGTH", units.parse_length, "integer"),
    "size": Kind("BYTES", units.parse_bytes, "integer"),
    "duration": Kind("DURATION", units.parse_duration, "number"),
    "share": Kind("FRACTION", units.parse_fraction, "number"),
    "money": Kind("USD", units.parse_money, "number"),
}


# the groups of a help page, in order
GROUPS = (
    "Input and output", "Selection", "Question", "Plan", "Crawl", "Relevance", "Requests",
    "Archive", "Scores", "Content checks", "Threshold", "Method", "Near duplicates",
    "Duplicated parts", "Embeddings",
    "Benchmark items", "Index", "Training data", "Data", "Tokenizer", "Tokenizer training",
    "Model", "fastText", "Reward", "Rollouts", "Loss", "Judge", "Language model", "Endpoint",
    "Optimizer", "Precision", "Adapters", "Parallelism", "Checkpoints", "Guards", "Mixture",
    "Comparison", "Tasks", "Sampling", "Run", "Hardware", "Layout", "Failures and checkpoints",
    "Money", "Costs and carbon", "Generation", "GRPO", "Judge model", "Output", "Logging",
    "General",
)  # fmt: skip


class Condition(NamedTuple):
    """When an option applies: one of the options `given` has a value, or an option has one of its
    listed `values`; or, with `absent`, none of those options has a value."""

    given: tuple[str, ...] = ()
    values: tuple[tuple[str, tuple[Any, ...] | range], ...] = ()
    absent: tuple[str, ...] = ()

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the condition is true for resolved values by name."""
        if self.absent:
            return not any(values.get(name) for name in self.absent)
        return any(values.get(name) for name in self.given) or any(
            values.get(name) in allowed for name, allowed in self.values
        )

    def text(self, table: Mapping[str, "Option"]) -> str:
        """Text such as 'with --search or --fast', 'with --updates 2 or more', 'without --url'."""
        present, lacking = [table[name].flag for name in self.given], list(self.absent)
        for name, allowed in self.values:
            named = [] if isinstance(allowed, range) else [v for v in allowed if v]
            if isinstance(allowed, range):
                present.append(f"{table[name].flag} {allowed.start} or more")
            elif named:
                present.append(f"{table[name].flag} {listed(named)}")
            else:
                lacking.append(name)
        parts = [f"with {listed(present)}"] if present else []
        without = listed(table[name].flag for name in lacking)
        return listed([*parts, f"without {without}"] if without else parts)


def needs(*given: str, **values: object) -> Condition:
    """A condition: one of the options `given` has a value, or an option has one of its values.

    Values: `engine="local"`, `engine=("local", "endpoint")`, `updates=MORE_THAN_ONE`; None or ""
    means that the option is not given.
    """
    kinds = tuple | range
    return Condition(
        given, tuple((k, v if isinstance(v, kinds) else (v,)) for k, v in values.items())
    )


def unless(*absent: str) -> Condition:
    """A condition: none of the options `absent` has a value."""
    return Condition(absent=absent)


MORE_THAN_ONE = range(2, 1 << 62)


def listed(names: Iterable[Any]) -> str:
    """'a', 'a or b', 'a, b or c'."""
    names = [str(name) for name in names]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@dataclass(eq=False)
class Option:
    """One option of a command; declared by `text`, `choice`, `integer` and so on below.

    default, metavar, choices: as help shows them; a default may have a unit. least, most: inclusive
    bounds. above: exclusive lower bound. many: repeatable, the value is a tuple. short: such as
    '-o'. common: shown by `-h`. recorded: whether it affects the result. only: conditions that must
    all be true. excludes: options that it cannot be combined with. unset: help text of the default.
    variable: an environment variable that several commands share. values: a data file whose names
    are completions. details: the long help, where it is no string below the declaration. later:
    recorded only if its value is not the default, because records of earlier versions lack it.
    """

    kind: str
    help: str
    default: Any = None
    metavar: str = ""  # default: that of the kind
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    many: bool = False
    short: str = ""
    group: str = ""
    common: bool = False
    recorded: bool = True
    required: bool = False
    positional: bool = False
    negative: bool = False
    only: Any = ()  # a condition or several; a tuple of them when it is read
    excludes: tuple[str, ...] = ()
    unset: str = ""
    variable: str = ""
    values: str = ""
    details: str = ""
    later: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        self.metavar = self.metavar or KINDS[self.kind].metavar
        self.only = (self.only,) if isinstance(self.only, Condition) else tuple(self.only)

    def __set_name__(self, owner: type, name: str) -> None:
        if not self.name:
            self.name = name

    @property
    def key(self) -> str:
        """The name in TOML files, that of the flag without dashes: 'batch-tokens'."""
        return self.name.rstrip("_").replace("_", "-")

    @property
    def flag(self) -> str:
        """'--batch-tokens', or the metavar of an argument."""
        return self.metavar.split("]")[0].strip("[") if self.positional else f"--{self.key}"

    @property
    def placeholder(self) -> str:
        """What help shows for the value: '{a,b}' for choices, else the metavar."""
        return "{" + ",".join(self.choices) + "}" if self.choices else self.metavar

    def default_value(self) -> Any:
        """The value if the option is not given; a default with a unit is parsed here."""
        if self.many:
            return tuple(self.default or ())
        if isinstance(self.default, str) and self.kind != "text":
            return KINDS[self.kind].read(self.default, self.flag)
        return self.default

    def read(self, value: object) -> Any:
        """Parse the value of an option: text, or a TOML value. Raises UsageError."""
        if self.many:
            return tuple(
                self._one(v) for v in (value if isinstance(value, list | tuple) else [value])
            )
        if isinstance(value, list | tuple | dict):
            raise UsageError(f"{self.flag}: {value!r} (expected one value)")
        return self._one(value)

    def _one(self, value: object) -> Any:
        if isinstance(value, bool) and self.kind != "flag":
            raise UsageError(f"{self.flag}: {value!r} (expected a value)")
        parsed = KINDS[self.kind].read(value, self.flag)
        if parsed == "" and self.default is None:
            raise UsageError(f"{self.flag}: is empty (expected {self.placeholder})")
        if self.choices and parsed not in self.choices:
            raise unknown(self.flag, parsed, self.choices)
        least, most, above = self.least, self.most, self.above
        if (
            (least is not None and parsed < least)
            or (most is not None and parsed > most)
            or (above is not None and parsed <= above)
        ):
            raise UsageError(f"{self.flag}: {value} is out of range (expected {self.range_text()})")
        return parsed

    def range_text(self) -> str:
        """'1 or more', '0 to 1', 'above 0'; '' if there is no bound."""
        if self.above is not None:
            most = "" if self.most is None else f", at most {self.most:,}"
            return f"above {self.above:,}{most}"
        if self.least is not None and self.most is not None:
            return f"{self.least:,} to {self.most:,}"
        if self.least is not None:
            return f"{self.least:,} or more"
        return f"at most {self.most:,}" if self.most is not None else ""

    def default_text(self) -> str:
        """The default as help shows it; '' if help shows none."""
        if self.unset or self.required or self.kind == "flag":
            return self.unset
        return "" if self.default in (None, "", ()) else str(self.default)


def unknown(flag: str, value: object, known: Iterable[str]) -> UsageError:
    """The error for a value that is not one of the known ones, with the nearest of them."""
    known = list(known)
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return UsageError(f"{flag}: {value!r} (expected {listed(known)}){hint}")


def flags(option: Option) -> list[str]:
    """The flags of an option: ['-o', '--out'], ['--verify', '--no-verify']."""
    words = [option.flag, *([f"--no-{option.key}"] if option.negative else [])]
    return [option.short, *words] if option.short else words


def changed(option: Any, **changes: Any) -> Any:
    """A copy of an inherited option with some fields changed, such as the help."""
    return replace(option, **changes)


def text(help: str, metavar: str = "TEXT", **fields: Any) -> Any:
    """An option whose value is text: a name, a path, an expression."""
    return Option("text", help, **({"default": "", "metavar": metavar} | fields))


def choice(help: str, *choices: str, **fields: Any) -> Any:
    """An option whose value is one of `choices`; the first is the default unless one is given."""
    return Option("text", help, choices=choices, **({"default": choices[0]} | fields))


def pattern(help: str, **fields: Any) -> Any:
    """An option whose value is a regular expression."""
    return Option("regex", help, **({"default": ""} | fields))


def several(help: str, metavar: str, **fields: Any) -> Any:
    """A repeatable option; its value is a tuple of texts."""
    return Option("text", help, many=True, default=(), metavar=metavar, **fields)


def switch(help: str, **fields: Any) -> Any:
    """An option without a value; with `negative` it also has a --no- form."""
    return Option("flag", help, **({"default": False} | fields))


def quantity(kind: str, help: str, default: Any = None, **fields: Any) -> Any:
    """An option whose value is a number of a kind in `KINDS`: count, length, size, duration, …"""
    return Option(kind, help, default=default, **fields)


def integer(help: str, default: int | None = None, **fields: Any) -> Any:
    """An option whose value is a whole number."""
    return Option("integer", help, default=default, **fields)


def number(help: str, default: float | None = None, **fields: Any) -> Any:
    """An option whose value is a number."""
    return Option("number", help, default=default, **fields)
