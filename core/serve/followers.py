"""Processes that hold a served model together: the first one serves, the others follow.

Before each step the first process sends the requests that have come and the tickets of those that
are cancelled since the last one, so that the sessions of all make the same steps. Guides are sent
as grammars; each process keeps its own of the last ones. Other weights are announced, so that all
processes read their parts of them meanwhile, and replaced when all have them.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sabia.core.errors import SabiaError
from sabia.core.generate.engine import PAGES_SHARE, Engine
from sabia.core.generate.requests import Request
from sabia.core.generate.session import Session
from sabia.core.grammar.guide import Guide
from sabia.core.model.storage.stored_weights import load_stored
from sabia.core.serve.response_format import KEPT, ResponseFormats

Change = Request | int  # a new request, or the ticket of one that is cancelled


@dataclass(frozen=True)
class Announced:
    """A model directory, whose weights are to be read."""

    directory: Path


@dataclass(frozen=True)
class Replaced:
    """The weights announced last are used from now on, if all processes have read them."""

    version: int


# what the first process sends: changes before a step, or of the weights; None: there is no step
Message = Sequence[Change] | Announced | Replaced | None


@dataclass(frozen=True)
class Others:
    """The processes that follow the first one. send: gives them a message. agree: the first error
    of any process, by what each says ('' for none); every process calls it."""

    send: Callable[[Message], None]
    agree: Callable[[str], str]


def served_session(engine: Engine, samples: int, context: int) -> Session:
    """The session of a server; every process that holds the model makes it."""
    pages = engine.cache_bytes // PAGES_SHARE
    return engine.session(samples, context, context, pages, keeps_replies=True)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> bytes | None:
        return pickle.dumps((value.root, value.what)) if isinstance(value, Guide) else None


def packed(message: Message) -> bytes:
    """A message, to be sent."""
    file = io.BytesIO()
    _Pickler(file).dump(message)
    return file.getvalue()


def follow(
    engine: Engine, session: Session, receive: Callable[[], bytes], agree: Callable[[str], str]
) -> None:
    """Make the steps of the first process, until it ends. receive: gives what it sends; agree: see
    Others."""
    formats = ResponseFormats(engine.tokenizer, engine.spec.vocab_size)

    @lru_cache(KEPT)
    def guide(grammar: bytes) -> Guide:
        root, what = pickle.loads(grammar)
        return Guide(root, formats.vocabulary, what)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, grammar: bytes) -> Guide:
            return guide(grammar)

    def read(directory: Path) -> tuple[dict[str, Any], str]:
        """The weights, or why there are none."""
        try:
            return engine.placed(load_stored(directory)[1]), ""
        except (SabiaError, OSError, ValueError) as error:
            return {}, str(error)

    with session.runner.computing(), ThreadPoolExecutor(1) as pool:
        while (message := Unpickler(io.BytesIO(receive())).load()) is not None:
            if isinstance(message, Announced):
                reading = pool.submit(read, message.directory)
            elif isinstance(message, Replaced):
                params, error = reading.result()
                if not agree(error):
                    session.replace(params, message.version)
            else:
                for change in message:
                    if isinstance(change, Request):
                        session.add(change)
                    else:
                        session.cancel(change)
                session.step()
