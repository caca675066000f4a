"""The thread that runs the engine: jobs come and go while others are decoded.

The server's event loop submits jobs and reads their events; all else is done by the thread, between
two steps of the session. A job that nobody waits for any more is cancelled at the next step.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sabia.core import notes
from sabia.core.generate.requests import Ended, Ranked, Request
from sabia.core.generate.session import Session
from sabia.core.serve.followers import Announced, Change, Others, Replaced


@dataclass(frozen=True)
class Progress:
    """Tokens that a sample in flight has got since the last event, with their log-probabilities."""

    prompt: int  # number of the request in the job
    sample: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    ranked: Sequence[Ranked]
    versions: Sequence[int]  # of the weights that drew each token


@dataclass(frozen=True)
class Done:
    """A sample that has ended; it may have tokens that no event has given."""

    prompt: int
    ended: Ended


@dataclass(frozen=True)
class Failure:
    """The job has no more events. refused: it was not begun."""

    message: str
    refused: bool = False


Event = Progress | Done | Failure


@dataclass(eq=False)
class Work:
    """The requests of one call; live: events are given for each token."""

    requests: Sequence[Request]
    live: bool
    events: "asyncio.Queue[Event]" = field(default_factory=asyncio.Queue)
    tickets: dict[int, int] = field(default_factory=dict)  # of the session → number of the request
    given: dict[tuple[int, int], int] = field(default_factory=dict)  # tokens in events, by sample
    left: int = 0  # samples


@dataclass
class Load:
    """Numbers since the start, and those of this moment."""

    running: int = 0  # samples in flight
    prompt_tokens: int = 0
    drawn_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0  # of the proposed ones


class EngineThread(threading.Thread):
    """Runs a session. `on_failure` is called in the event loop after an error of the engine.
    others: the processes that follow, if there are any."""

    def __init__(
        self, session: Session, loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[str], None], others: Others | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name="engine", daemon=True)
        self.load = Load()
        self._session, self._loop, self._on_failure = session, loop, on_failure
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._jobs: dict[int, Work] = {}  # by ticket
        self._open: set[Work] = set()  # of the event loop
        self._others, self._changes = others, list[Change]()  # since the last step
        self._running, self._paused = True, False
        self._submitted = 0  # requests, counted in the event loop
        self._added = 0  # of them, those that the thread has given to the session
        self._seen = (0, 0)  # requests added, those of them that wait; replaced as a whole

    @property
    def queued(self) -> int:
        """Requests that wait; called in the event loop."""
        added, waiting = self._seen
        return self._submitted - added + waiting

    def submit(self, work: Work) -> None:
        """Begin a job; the caller cancels it in the end."""
        self._open.add(work)
        self._submitted += len(work.requests)
        self._inbox.put(lambda: self._begin(work))

    def cancel(self, work: Work) -> None:
        """Forget a job; it gets no more events."""
        self._open.discard(work)
        self._inbox.put(lambda: self._forget(work))

    def refuse_waiting(self) -> None:
        """Refuse the jobs of which nothing has been computed."""
        self._inbox.put(self._refuse)

    def pause(self) -> "asyncio.Future[str]":
        """Make no steps until `resume`; requests wait, and those in flight keep their state. Done
        when the present step has ended."""
        return self._between_steps(lambda: self._pause(True))

    def resume(self) -> None:
        """Go on after `pause`."""
        self._inbox.put(lambda: self._pause(False))

    def announce(self, directory: Path) -> None:
        """Let the processes that follow read these weights, for `replace`."""
        if self._others:
            send = self._others.send
            self._inbox.put(lambda: send(Announced(directory)))

    def replace(self, params: dict[str, Any], version: int) -> "asyncio.Future[str]":
        """Replace the weights; done when all later tokens are of `version`, or with the error of a
        process that could not read them."""
        return self._between_steps(lambda: self._replace(params, version))

    def _replace(self, params: dict[str, Any], version: int) -> str:
        error = ""
        if self._others:
            self._others.send(Replaced(version))
            error = self._others.agree("")
        if not error:
            self._session.replace(params, version)
        return error

    def _between_steps(self, act: Callable[[], str]) -> "asyncio.Future[str]":
        done = self._loop.create_future()

        def now() -> None:
            self._loop.call_soon_threadsafe(_settle, done, act())

        self._inbox.put(now)
        return done

    def end(self) -> None:
        """End the thread after its present step."""
        self._inbox.put(self._stop)

    def run(self) -> None:
        """The thread."""
        try:
            with self._session.runner.computing():
                while self._running:
                    self._step()
            if self._others:
                self._others.send(None)
        except Exception as error:  # of any kind: the clients must not wait for ever
            line = str(error).strip().partition("\n")[0]
            message = f"the engine failed: {type(error).__name__}: {line}"
            notes.warn(message)
            self._loop.call_soon_threadsafe(self._fail, message)

    def _fail(self, message: str) -> None:
        for work in self._open:
            work.events.put_nowait(Failure(message))
        self._on_failure(message)

    def _step(self) -> None:
        """Do what the inbox asks for, waiting for it if nothing is to be computed; then a step."""
        while self._running:
            try:
                self._inbox.get(block=self._paused or not self._session.busy)()
            except queue.Empty:
                break
        if not self._running:
            return
        if self._others:
            self._others.send(self._changes)
        self._changes = []
        ended = self._session.step()
        self._count_now()
        events = [self._done(one) for one in ended]
        in_flight = {sample.of.ticket for sample in self._session.slots.owner}
        for ticket in {one.ticket for one in ended} - in_flight:
            del self._jobs[ticket]
        if any(work.live for work in self._jobs.values()):
            events += self._progress()
        if events:
            self._loop.call_soon_threadsafe(_deliver, events)

    def _begin(self, work: Work) -> None:
        for number, request in enumerate(work.requests):
            ticket = self._session.add(request)
            self._changes.append(request)
            self._jobs[ticket], work.tickets[ticket] = work, number
            work.left += len(request.samples)
            self.load.prompt_tokens += len(request.prompt)
        self._added += len(work.requests)
        self._count_now()

    def _forget(self, work: Work) -> None:
        for ticket in work.tickets:
            if self._jobs.pop(ticket, None) is not None:
                self._session.cancel(ticket)
                self._changes.append(ticket)
        self._count_now()

    def _refuse(self) -> None:
        begun = {sample.of.ticket for sample, *_ in self._session.in_flight()}
        for work in set(self._jobs.values()):
            finished = work.left < sum(len(request.samples) for request in work.requests)
            if not finished and not begun & set(work.tickets):
                self._forget(work)
                failure = Failure("the server is shutting down", refused=True)
                self._loop.call_soon_threadsafe(work.events.put_nowait, failure)

    def _pause(self, paused: bool) -> str:
        self._paused = paused
        return ""

    def _stop(self) -> None:
        self._running = False

    def _count_now(self) -> None:
        load, counts = self.load, self._session.counts
        load.running, load.drawn_tokens = self._session.slots.active, counts.drawn
        load.proposed_tokens, load.accepted_tokens = counts.proposed, counts.accepted
        self._seen = self._added, len(self._session.waiting)

    def _done(self, ended: Ended) -> tuple[Work, Event]:
        work = self._jobs[ended.ticket]
        work.left -= 1
        work.given.pop((ended.ticket, ended.completion.sample), None)
        return work, Done(work.tickets[ended.ticket], ended)

    def _progress(self) -> list[tuple[Work, Event]]:
        """The new tokens of samples whose jobs are live."""
        events = list[tuple[Work, Event]]()
        for sample, tokens, logprobs, versions in self._session.in_flight():
            work = self._jobs[sample.of.ticket]
            if not work.live:
                continue
            key = sample.of.ticket, sample.number
            first = work.given.get(key, 0)
            if first < len(tokens):
                work.given[key] = len(tokens)
                new = Progress(
                    work.tickets[sample.of.ticket], sample.number, tokens[first:].tolist(),
                    logprobs[first:].tolist(), sample.ranked[first:], versions[first:].tolist(),
                )  # fmt: skip
                events.append((work, new))
        return events


def _settle(done: "asyncio.Future[str]", result: str) -> None:
    if not done.done():  # its caller may have gone
        done.set_result(result)


def _deliver(events: Sequence[tuple[Work, Event]]) -> None:
    for work, event in events:
        work.events.put_nowait(event)
