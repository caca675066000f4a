"""One option, declared once: its kind, choices, default, group, help and conditions.

A class of options lists them as attributes (see `table.Options`). The text below a declaration, a
string of its own, is the option's long help, which the manual page and `--help=json` print.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sabia.core.errors import UsageError
from sabia.core.options.kinds import KINDS

# the groups of a help page, in their order
GROUPS = (
    "Input and output", "Plan", "Crawl", "Relevance", "Requests", "Archive", "Scores",
    "Content filters", "Threshold", "Method", "Near duplicates", "Duplicated parts", "Embeddings",
    "Benchmark items", "Index", "Training data", "Data", "Tokenizer", "Tokenizer training",
    "Model", "fastText", "Reward", "Rollouts", "Loss", "Judge", "Language model", "Endpoint",
    "Optimizer", "Precision", "Adapters", "Parallelism", "Checkpoints", "Guards", "Mixture",
    "Tasks", "Sampling", "Run", "Hardware", "Layout", "Failures and checkpoints", "Money",
    "Costs and carbon", "Generation", "GRPO", "Judge model", "Output", "Logging", "General",
)  # fmt: skip


class Condition(NamedTuple):
    """When an option has a meaning: one of `given` has a value, or an option has a listed value; or
    none of `absent` has a value."""

    given: tuple[str, ...] = ()
    values: tuple[tuple[str, tuple[Any, ...] | range], ...] = ()
    absent: tuple[str, ...] = ()

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether it holds for resolved values by name."""
        if self.absent:
            return not any(is_set(values.get(name)) for name in self.absent)
        return any(is_set(values.get(name)) for name in self.given) or any(
            values.get(name) in allowed for name, allowed in self.values
        )

    def text(self, table: Mapping[str, "Option"]) -> str:
        """Such as 'with --search or --fast', 'with --updates 2 or more', 'without --url'."""
        having, lacking = [table[name].flag for name in self.given], list(self.absent)
        for name, allowed in self.values:
            named = [] if isinstance(allowed, range) else [v for v in allowed if is_set(v)]
            if isinstance(allowed, range):
                having.append(f"{table[name].flag} {allowed.start} or more")
            elif named:
                having.append(f"{table[name].flag} {listed(named)}")
            else:
                lacking.append(name)
        parts = [f"with {listed(having)}"] if having else []
        without = listed(table[name].flag for name in lacking)
        return listed([*parts, f"without {without}"] if without else parts)


def needs(*given: str, **values: Any) -> Condition:
    """A condition: one of the options `given` has a value, or an option has one of its values.

    `engine="local"`, `engine=("local", "endpoint")`, `updates=MORE_THAN_ONE`; None and "" among
    the values stand for the option left out.
    """
    kinds = tuple | range
    return Condition(
        given, tuple((k, v if isinstance(v, kinds) else (v,)) for k, v in values.items())
    )


def unless(*absent: str) -> Condition:
    """A condition: none of the options `absent` has a value."""
    return Condition(absent=absent)


MORE_THAN_ONE = range(2, 1 << 62)


def is_set(value: Any) -> bool:
    """Whether a resolved value says something: not None, empty, False or 0."""
    return bool(value)


def listed(names: Iterable[Any]) -> str:
    """'a', 'a or b', 'a, b or c'."""
    names = [str(name) for name in names]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@dataclass(eq=False)
class Option:
    """One option of a command; declared by `text`, `choice`, `integer` and so on below.

    default, metavar, choices: as help shows them; a default may have a unit. least, most, above:
    bounds. many: repeatable, the value is a tuple. short: such as '-o'. common: shown by `-h`.
    recorded: whether it decides a result. only: conditions that must all hold. excludes: options
    that it cannot stand beside. unset: what leaving it out means. variable: an environment variable
    of several commands. values: data whose names complete it.
    """

    kind: str
    help: str
    default: Any = None
    metavar: str = ""  # '': that of the kind
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
    name: str = ""

    def __post_init__(self) -> None:
        self.metavar = self.metavar or KINDS[self.kind].metavar
        self.only = (self.only,) if isinstance(self.only, Condition) else tuple(self.only)

    def __set_name__(self, owner: type, name: str) -> None:
        if not self.name:
            self.name = name

    @property
    def key(self) -> str:
        """The name in TOML files: that of the flag, 'batch-tokens'."""
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
        """The value where nothing is given; a default written with a unit is read here."""
        if self.many:
            return tuple(self.default or ())
        if isinstance(self.default, str) and self.kind != "text":
            return KINDS[self.kind].read(self.default, self.flag)
        return self.default

    def read(self, value: Any) -> Any:
        """The value of an option as given: text, or a TOML value. Raises UsageError."""
        if self.many:
            return tuple(
                self._one(v) for v in (value if isinstance(value, list | tuple) else [value])
            )
        if isinstance(value, list | tuple | dict):
            raise UsageError(f"{self.flag}: {value!r} (expected one value)")
        return self._one(value)

    def _one(self, value: Any) -> Any:
        if isinstance(value, bool) and self.kind != "flag":
            raise UsageError(f"{self.flag}: {value!r} (expected a value)")
        found = KINDS[self.kind].read(value, self.flag)
        if found == "" and self.default is None:
            raise UsageError(f"{self.flag}: is empty (expected {self.placeholder})")
        if self.choices and found not in self.choices:
            raise unknown(self.flag, found, self.choices)
        least, most, above = self.least, self.most, self.above
        if (
            (least is not None and found < least)
            or (most is not None and found > most)
            or (above is not None and found <= above)
        ):
            raise UsageError(f"{self.flag}: {value} is out of range (expected {self.range_text()})")
        return found

    def range_text(self) -> str:
        """'1 or more', '0 to 1', 'above 0', '' where there is no bound."""
        if self.above is not None:
            most = "" if self.most is None else f", at most {self.most:,}"
            return f"above {self.above:,}{most}"
        if self.least is not None and self.most is not None:
            return f"{self.least:,} to {self.most:,}"
        if self.least is not None:
            return f"{self.least:,} or more"
        return f"at most {self.most:,}" if self.most is not None else ""

    def default_text(self) -> str:
        """What help shows as the default; '' where leaving the option out needs no word."""
        if self.unset or self.required or self.kind == "flag":
            return self.unset
        return "" if self.default in (None, "", ()) else str(self.default)


def unknown(flag: str, value: Any, known: Iterable[str]) -> UsageError:
    """The error of a value that is none of the known ones, with the nearest of them."""
    known = list(known)
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return UsageError(f"{flag}: {value!r} (expected {listed(known)}){hint}")


def flags(option: Option) -> list[str]:
    """Its spellings on the command line: ['-o', '--out'], ['--verify', '--no-verify']."""
    words = [option.flag, *([f"--no-{option.key}"] if option.negative else [])]
    return [option.short, *words] if option.short else words


def changed(option: Any, **changes: Any) -> Any:
    """An inherited option with some fields changed, such as a command's own help."""
    return replace(option, **changes)


def text(help: str, metavar: str = "TEXT", **fields: Any) -> Any:
    """An option whose value is text: a name, a path, an expression."""
    return Option("text", help, **({"default": "", "metavar": metavar} | fields))


def choice(help: str, *choices: str, **fields: Any) -> Any:
    """An option whose value is one of `choices`; the first is the default unless one is given."""
    return Option("text", help, choices=choices, **({"default": choices[0]} | fields))


def pattern(help: str, **fields: Any) -> Any:
    """An option whose value is a regular expression, searched in names."""
    return Option("regex", help, **({"default": ""} | fields))


def several(help: str, metavar: str, **fields: Any) -> Any:
    """An option that may be given often; its value is a tuple of texts."""
    return Option("text", help, many=True, default=(), metavar=metavar, **fields)


def switch(help: str, **fields: Any) -> Any:
    """An option without a value; with `negative` it has a --no- form too."""
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
