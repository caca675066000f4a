"""Open the judges that options name; grpo and eval do it here."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sabia.core import notes
from sabia.core.generate.budget import Budget
from sabia.core.generate.client import Client
from sabia.core.generate.opened import open_client
from sabia.core.judge.judge_file import JudgeServer, load_judges
from sabia.core.judge.llm import Judge
from sabia.core.judge.lookup import LookupTable
from sabia.core.judge.panel import Panel
from sabia.core.options.model_calls import RubricJudge

FEW = 20  # questions of a judge in which it may look nothing up


def judge_servers(options: RubricJudge) -> list[JudgeServer]:
    """The judges of --judge, or that of --judge-url; none without either. Raises UsageError."""
    if options.judge:
        servers = load_judges(options.judge)
        if not any(server.audit for server in servers):
            why = f"no table of {options.judge} has audit = true (expected one)"
            options.refuse(("audit_judge",), why)
        return servers
    if not options.judge_url:
        return []
    return [JudgeServer("judge", options.judge_url, options.judge_model)]


def judges_identity(options: RubricJudge) -> list[tuple[str | float, ...]]:
    """What decides verdicts: name, model and weight of each judge, and the digest of its table."""
    return [
        (s.name, s.model, s.weight, *([s.table.fingerprint] if s.table else []))
        for s in judge_servers(options)
        if not s.audit
    ]


@contextmanager
def open_panel(options: Any, budget: Budget) -> Iterator[Panel | None]:
    """The judges with clients that are charged to the budget; None if no judge is named.

    options: those of RubricJudge and of ApiCalls.
    At the end, what they have cost and how far they agree is noted.
    """
    servers = judge_servers(options)
    budget.prices = {s.model: s.price for s in servers if s.price is not None} | {**budget.prices}
    with ExitStack() as clients:
        judges = []
        for server in servers:
            if server.table:
                server.table.load()
                clients.callback(note_lookups, server.name, server.table)
            client = open_client(
                server.urls, server.model, options, options.judge_cache, budget,
                options.judge_timeout, server.api_key_env,
            )  # fmt: skip
            clients.callback(note_calls, server.name, client)
            judges.append((server, Judge(clients.enter_context(client), options, server.table)))
        mean = options.judge_combine == "mean"
        panel = Panel(judges, mean, options.audit_judge) if judges else None
        yield panel
        if panel is not None:
            for line in panel.agreement.lines():
                notes.note(line)


def note_lookups(name: str, table: LookupTable) -> None:
    """Note the lookups of a judge, if it was asked anything."""
    questions, lookups = table.counts["questions"], table.counts["lookups"]
    if questions:
        notes.note(f"{name}: {lookups:,} lookups in {questions:,} questions")
    if questions >= FEW and not lookups:
        notes.warn(
            f"judge {name} has not looked anything up in {table.path} (does its server support "
            "tool calls?)"
        )


def note_calls(name: str, client: Client) -> None:
    """Note what a client's calls were and have cost, if there were any."""
    if client.stats.requests or client.stats.cached:
        notes.note(f"{name}: {client.summary()}")
