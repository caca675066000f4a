"""Processes that hold a served model together: the first one serves, the others follow.

Before each step the first process sends the requests that have come and the tickets of those that
are cancelled since the last one, so that the sessions of all make the same steps. Guides are sent
as grammars; each process keeps its own of the last ones.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache

from sabia.core.generate.engine import PAGES_SHARE, Engine
from sabia.core.generate.requests import Request
from sabia.core.generate.session import Session
from sabia.core.grammar.guide import Guide
from sabia.core.serve.response_format import KEPT, ResponseFormats

Change = Request | int  # a new request, or the ticket of one that is cancelled
Share = Callable[[Sequence[Change] | None], None]


def served_session(engine: Engine, samples: int, context: int) -> Session:
    """The session of a server; every process that holds the model makes it."""
    pages = engine.cache_bytes // PAGES_SHARE
    return engine.session(samples, context, context, pages, keeps_replies=True)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> bytes | None:
        return pickle.dumps((value.root, value.what)) if isinstance(value, Guide) else None


def packed(changes: Sequence[Change] | None) -> bytes:
    """Changes before a step, to be sent; None: there is no further step."""
    file = io.BytesIO()
    _Pickler(file).dump(changes)
    return file.getvalue()


def follow(session: Session, receive: Callable[[], bytes], formats: ResponseFormats) -> None:
    """Make the steps of the first process, until it ends. receive: gives what it sends."""

    @lru_cache(KEPT)
    def guide(grammar: bytes) -> Guide:
        root, what = pickle.loads(grammar)
        return Guide(root, formats.vocabulary, what)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, grammar: bytes) -> Guide:
            return guide(grammar)

    with session.runner.computing():
        while (changes := Unpickler(io.BytesIO(receive())).load()) is not None:
            for change in changes:
                if isinstance(change, Request):
                    session.add(change)
                else:
                    session.cancel(change)
            session.step()
