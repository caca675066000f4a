"""Commands called in this process: by their command line, or by values of their options."""

import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from sabia.cli.command import call, make_job, print_error
from sabia.cli.group import run
from sabia.cli.registry import find


class Done(NamedTuple):
    """How a command line ended; `output` is what it wrote to stdout and stderr."""

    exit_code: int
    stdout: str
    output: str


def sabia(*words: object) -> Done:
    """`sabia WORDS` with an empty stdin."""
    with _streams() as (out, both):
        code = run([str(word) for word in words], call, print_error)
        sys.stdout.flush()
        texts = [stream.getvalue().decode(errors="replace") for stream in (out, both)]
    return Done(code, *texts)


class _Tee(io.BytesIO):
    """Bytes that are also written to another stream."""

    def __init__(self, other: io.BytesIO) -> None:
        super().__init__()
        self.other = other

    def write(self, data: Any) -> int:
        self.other.write(data)
        return super().write(data)


@contextmanager
def _streams() -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    both = io.BytesIO()
    out = _Tee(both)
    saved = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    sys.stdout = io.TextIOWrapper(out, write_through=True)
    sys.stderr = io.TextIOWrapper(both, write_through=True)
    try:
        yield out, both
    finally:
        sys.stdout.flush()
        sys.stdin, sys.stdout, sys.stderr = saved


def stage(name: str, beyond: Mapping[str, Any] | None = None, **values: Any) -> None:
    """A command with the values of its options, as texts or numbers, without its command line.

    `beyond`: values that are not checked, such as a memory of one byte. Raises what the command
    raises.
    """
    command = find(name)
    texts = {k: str(v) if hasattr(v, "__fspath__") else v for k, v in values.items()}
    options = command.options.read({k: v for k, v in texts.items() if v is not None})
    options = options.replace(**beyond or {})
    command.run(make_job(name, options), options)
