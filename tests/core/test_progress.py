"""The progress bar says when kernels are compiled, on a terminal only."""

import io

import pytest

from sabia.core.notes import progress
from sabia.kernels.runtime.cache_folder import compile_listeners


class Terminal(io.StringIO):
    """A stderr that is a terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_compiling_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    stderr = Terminal(terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    before = list(compile_listeners)
    with progress(10, "dedup: reading"):
        for listener in compile_listeners[len(before) :]:
            listener("html.numba_impl._scan")
            listener("minhash.numba_impl._sketch")
            listener("text.utf8_numba.mix")
    shown = "compiling kernel minhash, once per machine: 2 of 16 functions, about 0 s left"
    assert (shown in stderr.getvalue()) is terminal
    assert bool(stderr.getvalue()) is terminal
    assert compile_listeners == before
