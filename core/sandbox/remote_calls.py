"""Calls between the process that tests and the process with the program, by values.

The program is untrusted and the tests decide, so the two share no objects: numbers, texts and
containers of them cross as values of Python's own types, whatever subclass the program returns.
Anything else stays where it is and crosses as a `Remote`, which can be called, iterated, indexed
and asked for its attributes and its text. A Remote equals only what the program calls equal among
its own objects, has no order and no arithmetic: no `__eq__` of the program decides about a value of
the tests. Arguments that a call has changed in place are changed for the caller too.

A message is a length in 4 bytes and JSON: ["ask", operation, target, arguments, named] or
["ok", value, changed arguments] or ["raise", name of the type, text].
"""

import builtins
import contextlib
import json
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_MESSAGE = 16 << 20
MAX_TEXT = 300
ENDED, LATE = "it ended", "it did not answer in time"  # why a connection is lost
_LENGTH = struct.Struct(">I")
_CHANGEABLE = (list, dict, set, bytearray, deque)
_PLAIN = (bool, int, float, str, type(None))
# type, value → its parts, parts → value
_Made = tuple[type, Callable[[Any], Iterable[Any]], Callable[[Any], Any]]
_BUILT: dict[str, _Made] = {
    **{
        kind.__name__: (kind, kind.__iter__, kind)
        for kind in (list, tuple, set, frozenset, bytes, bytearray, deque)
    },
    "dict": (dict, dict.items, dict),
    "complex": (complex, lambda v: (v.real, v.imag), lambda parts: complex(*parts)),
    "range": (range, lambda v: (v.start, v.stop, v.step), lambda parts: range(*parts)),
    "Fraction": (Fraction, lambda v: (v.numerator, v.denominator), lambda p: Fraction(*p)),
    "Decimal": (Decimal, lambda v: (Decimal.__str__(v),), lambda parts: Decimal(*parts)),
}


class GoneError(BaseException):
    """The other process has ended, hangs, or sent what is no message."""


class RemoteError(Exception):
    """An exception of the program of a type that is not Python's own."""


class Remote:
    """An object of the other process."""

    def __init__(self, peer: "Peer", number: int, kind: str) -> None:
        self._peer, self._number, self._kind = peer, number, kind

    def _ask(self, operation: str, *given: object, **named: object) -> Any:
        return self._peer.ask(operation, self._number, given, named)

    def __call__(self, *given: Sequence[object], **named: object) -> Any:
        return self._ask("call", *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", name)

    def __iter__(self) -> Any:
        return self._ask("iterate")

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return self._ask("length")

    def __bool__(self) -> bool:
        return self._ask("truth")

    def __getitem__(self, key: object) -> Any:
        return self._ask("item", key)

    def __str__(self) -> str:
        return str(self._ask("text"))

    def __repr__(self) -> str:
        return f"<{self._kind} of the program>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._ask("equal", other) is True

    def __hash__(self) -> int:
        return self._number


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *given, **named: target(*given, **named),
    "attribute": getattr,
    "iterate": iter,
    "next": next,
    "length": len,
    "truth": bool,
    "item": lambda target, key: target[key],
    "text": str,
    "equal": lambda target, other: bool(target == other),
}


class Peer:
    """One end of the connection; `allowed` are the operations that the other end may ask for."""

    def __init__(
        self, connection: socket.socket, allowed: Iterable[str], until: float | None = None
    ) -> None:
        self.connection, self.allowed, self.until = connection, frozenset(allowed), until
        self.own: list[Any] = []
        self.lost_by = ""

    def ask(
        self, operation: str, target: int, given: Sequence[object], named: Mapping[str, object]
    ) -> Any:
        """The result of an operation on an object of the other end; raises what it raised."""
        sent = [self.encoded(value) for value in given]
        texts = {name: self.encoded(value) for name, value in named.items()}
        self.send(["ask", operation, target, sent, texts])
        for message in self.messages():
            match message:
                case ["ok", value, dict(changed)]:
                    for number, new in changed.items():
                        self._change(given, number, new)
                    return self.decoded(value)
                case ["raise", str(name), str(text)]:
                    kind = getattr(builtins, name, None)
                    error: Exception = RemoteError(f"{name}: {text}")
                    if isinstance(kind, type) and issubclass(kind, Exception):
                        with contextlib.suppress(TypeError):  # some need more arguments
                            error = kind(text)
                    raise error
                case ["ask", *_]:
                    self.answer(message)
                case _:
                    self.lost("it sent what is no message")
        raise AssertionError("messages end by GoneError")

    def answer(self, message: list[Any]) -> None:
        """Do what the other end asks for and send the result."""
        try:
            match message:
                case ["ask", str(name), int(number), list(given), dict(named)]:
                    pass
                case _:
                    raise ValueError("not a request")
            if name not in self.allowed or not 0 <= number < len(self.own):
                raise PermissionError(name)
            values = [self.decoded(value) for value in given]
            more = {key: self.decoded(value) for key, value in named.items()}
            result = OPERATIONS[name](self.own[number], *values, **more)
            changed = {
                str(index): new
                for index, value in enumerate(values)
                if isinstance(value, _CHANGEABLE) and (new := self.encoded(value)) != given[index]
            }
            reply = ["ok", self.encoded(result), changed]
        except GoneError:
            raise
        except BaseException as error:
            reply = ["raise", type(error).__name__, text_of(error)]
        self.send(reply)

    def send(self, message: list[Any]) -> None:
        """Write a message. Raises GoneError."""
        data = json.dumps(message).encode()
        try:
            self._limit()
            self.connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            self.lost(_reason(error))

    def messages(self) -> Iterator[list[Any]]:
        """The messages of the other end. Raises GoneError at their end."""
        while True:
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if size > MAX_MESSAGE:
                self.lost(f"it sent a value of more than {MAX_MESSAGE >> 20} MiB")
            data = self._read(size)
            try:
                message = json.loads(data)
            except (ValueError, RecursionError):
                self.lost("it sent what is no message")
            yield message if isinstance(message, list) else []

    def lost(self, reason: str) -> None:
        """Note that the other end is gone. Raises GoneError."""
        self.lost_by = self.lost_by or reason
        raise GoneError(self.lost_by)

    def _limit(self) -> None:
        if self.until is not None:
            self.connection.settimeout(max(self.until - time.monotonic(), 1e-3))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                self._limit()
                block = self.connection.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                self.lost(_reason(error))
            if not block:
                self.lost(ENDED)
            data += block
        return bytes(data)

    def encoded(self, value: object) -> Any:
        """The value in JSON's types."""
        if isinstance(value, _PLAIN):
            return value
        for name, (kind, parts, _) in _BUILT.items():
            if isinstance(value, kind):
                return [name, [self.encoded(part) for part in parts(value)]]
        if type(value) is Remote:
            return ["yours", value._number]
        self.own.append(value)
        return ["mine", len(self.own) - 1, type(value).__name__]

    def decoded(self, value: object) -> Any:
        """The value of what `encoded` gave. Raises GoneError for anything else."""
        try:
            return self._decoded(value)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
            self.lost("it sent what is no value")

    def _decoded(self, value: object) -> Any:
        match value:
            case [str(name), list(parts)] if name in _BUILT:
                return _BUILT[name][2]([self._decoded(part) for part in parts])
            case ["yours", int(number)] if 0 <= number < len(self.own):
                return self.own[number]
            case ["mine", int(number), str(kind)]:
                return Remote(self, number, kind)
            case list() | dict():
                raise ValueError(value)
        return value

    def _change(self, given: Sequence[object], number: str, encoded: object) -> None:
        """Give a container of the caller the contents of another of its type."""
        new = self.decoded(encoded)
        if not number.isdecimal() or int(number) >= len(given):
            self.lost("it sent what is no message")
        old = given[int(number)]
        if type(old) is type(new) and isinstance(old, _CHANGEABLE):
            old.clear()
            getattr(old, "extend" if hasattr(old, "extend") else "update")(new)


def text_of(error: BaseException) -> str:
    """The text of an error of which `__str__` may fail, cut at MAX_TEXT."""
    try:
        return str(error)[:MAX_TEXT]
    except BaseException:
        return ""


def _reason(error: OSError) -> str:
    return LATE if isinstance(error, TimeoutError) else ENDED
