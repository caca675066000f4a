"""Classes of options: the options of a command, composed of groups that commands share.

    class Schedule(Options, group="Optimizer"):
        lr: float = number("Peak learning rate", 6e-4, least=0)
        "Reached at the end of the warm-up."            # the long help

    class Sft(Rows, Schedule, defaults={"lr": 2e-5}):
        model: str = text("Model directory to start from", "DIR", required=True)

`Sft.table` maps names to Options; an instance of the class has the values of one call.

`resolve` gives the values. Precedence: flag, SABIA_COMMAND_OPTION, --config file, default.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

from sabia.core.errors import UsageError
from sabia.core.options.option import Condition, Option, changed


class Options:
    """Resolved options of one call, as attributes; `given` names those that the user set.

    A subclass declares its options as attributes or inherits those of other groups. Class
    arguments: `group` is the help group of the options declared here; `recorded` tells whether they
    affect results; `defaults` changes inherited defaults; `only` adds conditions to all options of
    a base class; `without` removes inherited options; `keeps` removes all inherited options except
    those that it names. A removed option keeps its default as an attribute.
    """

    table: ClassVar[dict[str, Option]] = {}
    left_out: ClassVar[dict[str, Option]] = {}
    given: frozenset[str]
    texts: Mapping[str, Any] = MappingProxyType({})  # values as they were given, by name

    def __init_subclass__(
        cls,
        group: str = "",
        recorded: bool = True,
        defaults: Mapping[str, Any] | None = None,
        only: Mapping[type["Options"], Condition | tuple[Condition, ...]] | None = None,
        without: Iterable[str] = (),
        keeps: Iterable[str] = (),
    ) -> None:
        super().__init_subclass__()
        own = {name: option for name, option in vars(cls).items() if isinstance(option, Option)}
        for option in own.values():
            option.group = option.group or group
            option.recorded = option.recorded and recorded
        table: dict[str, Option] = {}
        for base in cls.__bases__:
            for name, option in getattr(base, "table", {}).items():
                table.setdefault(name, option)
        table |= own
        for base, conditions in (only or {}).items():
            added = (conditions,) if isinstance(conditions, Condition) else conditions
            for name in base.table:
                if name not in own:
                    table[name] = changed(table[name], only=(*table[name].only, *added))
        for name, value in (defaults or {}).items():
            table[name] = changed(table[name], default=value)
        kept = {*keeps, *own} if keeps else table.keys() - set(without)
        before = [getattr(base, "left_out", {}) for base in cls.__bases__]
        cls.table = {name: option for name, option in table.items() if name in kept}
        cls.left_out = {
            name: option
            for group_of in (*before, table)
            for name, option in group_of.items()
            if name not in cls.table
        }

    def __init__(self, _given: frozenset[str] | None = None, **values: Any) -> None:
        """Parsed values by name; other options get their defaults. Raises UsageError."""
        unknown = values.keys() - self.table.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {', '.join(sorted(unknown))}")
        for name, option in (self.left_out | self.table).items():
            setattr(self, name, values[name] if name in values else option.default_value())
        if _given is None:
            _given = frozenset(name for name, value in values.items() if value is not None)
        self.given = _given
        self.complete()
        self.check()

    @classmethod
    def named(cls, key: str) -> str:
        """The option name for a key in a file: 'batch-tokens' or 'batch_tokens'.

        Raises UsageError with the nearest name if there is no such option."""
        name = key.replace("-", "_")
        if known := {name, f"{name}_"} & cls.table.keys():
            return known.pop()
        keys = [option.key for option in cls.table.values()]
        near = difflib.get_close_matches(name.replace("_", "-"), keys, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"no option {key!r}{hint}")

    @classmethod
    def read_values(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Parsed values by name, from texts, TOML or JSON values by key. Raises UsageError."""
        named = {cls.named(key): value for key, value in values.items() if value is not None}
        return {name: cls.table[name].read(value) for name, value in named.items()}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Options from texts, TOML or JSON values by key. Raises UsageError."""
        return cls(**cls.read_values(values))

    def complete(self) -> None:
        """Set defaults that depend on other options; called before `check`."""

    def check(self) -> None:
        """Raise UsageError for a missing option, or one that does not apply in this call.

        Commands add their own checks."""
        values = self.values()
        for name, option in self.table.items():
            if option.required and not values[name]:
                raise UsageError(f"{option.flag}: is missing (expected {option.placeholder})")
            if name not in self.given:
                continue
            for condition in option.only:
                if not condition.holds(values):
                    raise UsageError(f"{option.flag}: only {condition.text(self.table)}")
            for other in option.excludes:
                if other in self.given and values[name] and values[other]:
                    flag = self.table[other].flag
                    raise UsageError(f"{option.flag}: not together with {flag}")

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raise UsageError for the first of these options that is given; why: 'only with …'."""
        for name in names:
            if name in self.given:
                raise UsageError(f"{self.table[name].flag}: {why}")

    def values(self) -> dict[str, Any]:
        """All values by name."""
        return {name: getattr(self, name) for name in self.table}

    def recorded(self) -> dict[str, object]:
        """The values that affect the result, by name, for fingerprints and the identity of a run.

        Options that do not apply in this call are not included, nor those that earlier versions did
        not have, at their defaults."""
        values = self.values()
        return {
            name: values[name]
            for name, option in self.table.items()
            if option.recorded
            and not (option.later and values[name] == option.default_value())
            and all(condition.holds(values) for condition in option.only)
        }

    def replace(self, **changes: object) -> Self:
        """A copy with some values changed; they are not checked."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__ | changes)
        return other

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.values() == other.values()

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.table)
        return f"{type(self).__name__}({shown})"


T = TypeVar("T", bound=Options)
# variables that are no options
OTHER_VARIABLES = ("SABIA_API_KEY", "SABIA_BACKEND", "SABIA_CONSTRAINTS", "SABIA_COORDINATOR",
                   "SABIA_DEBUG", "SABIA_ENV", "SABIA_JOB_SECRET", "SABIA_KERNELS", "SABIA_PAGER",
                   "SABIA_PIPE", "SABIA_RESTARTS", "SABIA_RUN_RECORD", "SABIA_TEST_DATA",
                   "SABIA_TORCH", "SABIA_VENV")  # fmt: skip


def resolve(
    cls: type[T], command: str, flags: Mapping[str, Any], environment: Mapping[str, str]
) -> T:
    """The options of a call of `command` ('dedup', 'classify train').

    `flags` maps option names to the values on the command line, or None. A value from a flag, a
    variable of the command or the file counts as given by the user; a variable that several
    commands share (SABIA_BACKEND, SABIA_PIPE) only changes the default. Raises UsageError.
    """
    given: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    sources: dict[str, str] = {}  # option → variable or file that set it
    texts: dict[str, Any] = {}
    for name, option in cls.table.items():
        variable = variable_of(command, option)
        if flags.get(name) not in (None, (), []):
            given[name], texts[name] = option.read(flags[name]), flags[name]
        elif environment.get(variable):
            text = environment[variable]
            given[name] = _read(option, text.split() if option.many else text, f"${variable}")
            sources[name], texts[name] = f"${variable}", text.split() if option.many else text
        elif option.variable and environment.get(option.variable):
            texts[name] = environment[option.variable]
            shared[name] = _read(option, texts[name], f"${option.variable}")
    path = given.get("config")
    for name, value in (_from_file(cls, command, path) if path else {}).items():
        if name not in given:
            given[name], sources[name] = _read(cls.table[name], value, str(path)), str(path)
            texts[name] = value
    try:
        options = cls(_given=frozenset(given), **shared | given)
        options.texts = texts
        return options
    except UsageError as error:
        for name, source in sources.items():
            if str(error).startswith(f"{cls.table[name].flag}:"):
                raise UsageError(f"{error} (set by {source})") from None
        raise


def variable_of(command: str, option: Option) -> str:
    """The environment variable of an option of a command: 'SABIA_DEDUP_MIN_COPIES'."""
    return f"SABIA_{command}_{option.key}".upper().replace("-", "_").replace(" ", "_")


def check_environment(
    cls: type[Options], command: str, calls: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Raise UsageError for a variable that looks like one of the command's but names no option, and
    for one that lacks the name of the command ('SABIA_JOBS').

    calls: all commands; a variable that begins with the name of another one is that command's.
    """

    def prefix(name: str) -> str:
        return f"SABIA_{name}_".upper().replace("-", "_").replace(" ", "_")

    table = cls.table.values()
    known = {*OTHER_VARIABLES, *(variable_of(command, one) for one in table)}
    known |= {option.variable for option in table if option.variable}
    short = {variable_of("", one).replace("__", "_"): variable_of(command, one) for one in table}
    own = prefix(command)
    others = tuple(prefix(name) for name in calls if name != command)
    for name in sorted(name for name, value in environment.items() if value):
        foreign = name.startswith(tuple(o for o in others if o.startswith(own) or not
                                        name.startswith(own)))  # fmt: skip
        if not name.startswith("SABIA_") or name in known or foreign:
            continue
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.85)
        near = [short[name]] if name in short else near
        if near or name.startswith(own):
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"${name}: sabia {command} has no such option{hint}")


def _read(option: Option, value: object, source: str) -> Any:
    try:
        return option.read(value)
    except UsageError as error:
        raise UsageError(f"{error} (set by {source})") from None


def _from_file(cls: type[Options], command: str, path: str) -> dict[str, object]:
    """Values by name from [command] or [command.subcommand] of a TOML file, else its top level."""
    from sabia.core.files import read_toml

    hint = "; a model's config.json goes with --model" * path.endswith(".json")
    values = read_toml("--config", path, hint)
    own: Any = values
    for word in command.split():
        own = own.get(word) if isinstance(own, dict) else None
    table = own if isinstance(own, dict) else values
    try:
        return {cls.named(key): v for key, v in table.items() if not isinstance(v, dict)}
    except UsageError as error:
        raise UsageError(f"--config: {path}: {command} has {error}") from None
