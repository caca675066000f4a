"""Spending of a run and load of its servers: caps over processes and kills, calls in flight."""

import importlib.util
import random
import subprocess
import sys
import time
from bisect import bisect
from pathlib import Path

import pytest
from waiting import HANG_S, until

from sabia.core.generate.budget import Budget
from sabia.core.generate.calls import ChatRequest, Usage
from sabia.core.generate.client import Client
from sabia.core.generate.ledger import Ledger

STUB = Path(__file__).parents[2] / "openai_stub.py"
spec = importlib.util.spec_from_file_location("openai_stub", STUB)
openai_stub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(openai_stub)
Stub = openai_stub.Stub


def ask(text: str) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": text}], max_tokens=32)


SPENDER = """
import sys
from sabia.core.errors import SabiaError
from sabia.core.generate.budget import Budget, Price
from sabia.core.generate.calls import ChatRequest
from sabia.core.generate.client import Client
from sabia.core.generate.ledger import Ledger
from pathlib import Path
url, folder, name, cap, value = sys.argv[1:]
ledger = Ledger(Path(folder, "spent"))
budget = Budget({"m": Price(10.0, 30.0)}, ledger=ledger, **{cap: float(value)})
ask = [ChatRequest([{"role": "user", "content": f"{name} {i}"}], max_tokens=32) for i in range(400)]
try:
    with Client(url, "m", cache_dir=Path(folder, name), budget=budget, max_concurrency=4) as one:
        one.chat(ask)
except SabiaError as error:
    sys.exit(f"{int(error.exit_code)} {error}")
"""


@pytest.mark.parametrize(
    ("cap", "value"), [("max_requests", 20), ("max_tokens", 1500), ("max_usd", 0.01)]
)
def test_no_number_of_processes_and_restarts_passes_a_cap(cap, value, tmp_path):
    """Three processes with caches of their own, killed at random, share one ledger."""
    draw = random.Random(cap)
    with Stub(latency_s=0.05) as stub:
        start = [sys.executable, "-c", SPENDER, stub.url, str(tmp_path)]
        for trial in range(3):
            words = [[*start, f"p{n} {trial}", cap, str(value)] for n in range(3)]
            ranks = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True) for line in words]
            if trial < 2:
                while stub.requests <= 4 * trial + 3:  # or those of the kills have reached the cap
                    if all(rank.poll() is not None for rank in ranks):
                        break
                    time.sleep(0.005)
                time.sleep(draw.random() * 0.05)
                for rank in ranks:
                    rank.kill()
            ends = [rank.communicate(timeout=HANG_S)[1] for rank in ranks]
        ended = "by all processes and starts"
        assert all(end.startswith("3 ") and ended in end for end in ends), ends
        words = [len(body["messages"][0]["content"].split()) for body in stub.bodies]
        prompt, completion = sum(words), sum(words) + len(words)
    spent = {
        "max_requests": stub.requests,
        "max_tokens": prompt + completion,
        "max_usd": (prompt * 10 + completion * 30) / 1e6,
    }
    assert spent[cap] <= value
    ledger = Ledger(tmp_path / "spent")  # has those killed before they were received, too
    assert 0 <= ledger.requests["m"] - stub.requests <= 2 * 3 * 4


def test_either_line_of_a_call_counts_it(tmp_path):
    path = tmp_path / "spent"
    with (
        Stub() as stub,
        Client(
            stub.url, "m", cache_dir=tmp_path / "calls", budget=Budget(ledger=Ledger(path))
        ) as one,
    ):
        one.chat(ask(f"q {i}") for i in range(3))
        spent = one.budget.spent
    assert (spent.requests, spent.usage) == (3, Usage(6, 9))
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6
    for number in range(6):
        damaged = lines[number].replace(b'"m"', b'"n"')
        path.write_bytes(b"".join([*lines[:number], damaged, *lines[number + 1 :]]))
        again = Budget(ledger=Ledger(path)).spent
        assert again.requests == 3
        assert again.usage.total_tokens >= spent.usage.total_tokens
    path.write_bytes(b"".join(lines)[:-7])  # torn: the next line is one of its own
    ledger = Ledger(path)
    with ledger.locked():
        ledger.charge("m", Usage(1, 1))
    assert Budget(ledger=Ledger(path)).spent.requests == 4


STUB_OF_ITS_OWN = """
import importlib.util, random, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("openai_stub", sys.argv[1])
sys.path.append(sys.argv[2])
openai_stub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(openai_stub)
class Uneven(openai_stub.Stub):
    latency_s = property(lambda self: random.uniform(1.0, 4.0), lambda self, value: None)
    async def _chat(self, request):
        begun = time.monotonic()
        try:
            return await super()._chat(request)
        finally:
            print(begun, time.monotonic(), flush=True)
with Uneven() as stub:
    Path(sys.argv[3]).write_text(stub.url)
    time.sleep(1e9)
"""


@pytest.mark.slow
def test_while_calls_wait_the_server_is_busy(tmp_path):
    """From the server's log: never fewer than 60 of 64 calls in flight while others wait."""
    words = [str(STUB), str(STUB.parent / "support"), str(tmp_path / "url")]
    server = subprocess.Popen(
        [sys.executable, "-c", STUB_OF_ITS_OWN, *words], stdout=subprocess.PIPE, text=True
    )
    until(lambda: (tmp_path / "url").exists() and (tmp_path / "url").read_text(), server)
    with Client(
        (tmp_path / "url").read_text(), "m", cache_dir=tmp_path / "calls", max_concurrency=64
    ) as one:
        one.chat(ask(f"q {i}") for i in range(600))
    server.kill()
    spans = [tuple(map(float, line.split())) for line in server.communicate()[0].splitlines()]
    begun, ended = sorted(a for a, _ in spans), sorted(b for _, b in spans)
    assert len(spans) == 600
    waiting = [end for end in ended if begun[63] < end < begun[-1]]  # from the 64th on
    in_flight = [bisect(begun, end) - bisect(ended, end) for end in waiting]
    assert len(in_flight) > 500 and min(in_flight) >= 60, min(in_flight)
