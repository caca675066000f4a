"""Classes of options: the options of a command, composed of groups that commands share.

    class Schedule(Options, group="Optimizer"):
        lr: float = number("Peak learning rate", 6e-4, least=0)
        "Reached at the end of the warm-up."            # the long help

    class Sft(Rows, Schedule, defaults={"lr": 2e-5}):
        model: str = text("Model directory to start from", "DIR", required=True)

`Sft.table` maps names to Options; an instance of the class has the values of one call.
"""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

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
