"""Classes of options: a command's options, put together from groups that commands share.

    class Schedule(Options, group="Optimizer"):
        lr: float = number("Peak learning rate", 6e-4, least=0)
        "Reached after the warm-up."                    # the long help

    class Sft(Rows, Schedule, defaults={"lr": 2e-5}):
        model: str = text("Model directory to start from", "DIR", required=True)

The class is the table (`Sft.table`: name → Option), an instance holds the values of one call.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from sabia.core.errors import UsageError
from sabia.core.options.option import Condition, Option, changed, is_set


class Options:
    """Resolved options of one call, as attributes; `given` names those that were set by hand.

    A subclass declares its options as attributes or inherits those of other groups. Class
    arguments: `group` is the group in help of the options declared here, `recorded` whether they
    decide results, `defaults` changes inherited defaults, `only` adds conditions to all options of
    a base class, `without` leaves inherited options out, `keeps` all inherited ones but those that
    it names. What is left out keeps its default as an attribute.
    """

    table: ClassVar[dict[str, Option]] = {}
    left_out: ClassVar[dict[str, Option]] = {}
    given: frozenset[str]

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
        """Values by name, already read; the others take their defaults. Raises UsageError."""
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
        """The name of the option that a key of a file means: 'batch-tokens' or 'batch_tokens'.

        Raises UsageError with the nearest name where there is none."""
        name = key.replace("-", "_")
        found = next((known for known in (name, f"{name}_") if known in cls.table), None)
        if found is None:
            known = [option.key for option in cls.table.values()]
            near = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"no option {key!r}{hint}")
        return found

    @classmethod
    def read_values(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by name from texts, TOML or JSON values by key; None is left out. UsageError."""
        named = {cls.named(key): value for key, value in values.items() if value is not None}
        return {name: cls.table[name].read(value) for name, value in named.items()}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Options from texts, TOML or JSON values by key. Raises UsageError."""
        return cls(**cls.read_values(values))

    def complete(self) -> None:
        """Set defaults that depend on other options; called before `check`."""

    def check(self) -> None:
        """Refuse what has no meaning in this call; a command adds its own checks. UsageError."""
        refuse_meaningless(self)

    def values(self) -> dict[str, Any]:
        """All values by name."""
        return {name: getattr(self, name) for name in self.table}

    def recorded(self) -> dict[str, Any]:
        """The values that decide the result, by name: part of a fingerprint or a run's identity.

        Options without a meaning in this call are left out."""
        values = self.values()
        return {
            name: values[name]
            for name, option in self.table.items()
            if option.recorded and all(condition.holds(values) for condition in option.only)
        }

    def replace(self, **changes: Any) -> Self:
        """The same options with some values changed, not checked again."""
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


def refuse_meaningless(options: Options) -> None:
    """UsageError for an option that was given and has no meaning beside the others."""
    table, values = options.table, options.values()
    for name, option in table.items():
        if option.required and not is_set(values[name]):
            raise UsageError(f"{option.flag}: is missing (expected {option.placeholder})")
        if name not in options.given:
            continue
        for condition in option.only:
            if not condition.holds(values):
                raise UsageError(f"{option.flag}: only {condition.text(table)}")
        for other in option.excludes:
            if other in options.given and is_set(values[name]) and is_set(values[other]):
                raise UsageError(f"{option.flag}: not together with {table[other].flag}")
