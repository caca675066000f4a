"""The child process of core.judge.bounded_regex; it runs as a script of the standard library only.

It reads a request a line, [pattern, text, "first" or "last"], and answers in a line: [whole, group
1 or null] of that match, [] without one, "limit" past the limit of CPU time or memory, or
{"error": …} for an invalid pattern. Matching checks for signals, so the timer ends it.
"""

import json
import re
import resource
import signal
import sys
from typing import Any


class _PastLimitError(Exception):
    pass


def _stop(*_: object) -> None:
    raise _PastLimitError


def _answer(pattern: str, text: str, pick: str) -> list[str | None]:
    chosen = None
    for match in re.finditer(pattern, text, re.MULTILINE):
        chosen = match
        if pick == "first":
            break
    if chosen is None:
        return []
    return [chosen[0], chosen[1] if chosen.re.groups else None]


def main(cpu_s: float, memory_bytes: int) -> None:
    """Answer requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGVTALRM, _stop)
    for line in sys.stdin:
        reply: Any
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
            reply = _answer(*json.loads(line))
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except re.error as error:
            reply = {"error": str(error)}
        except (_PastLimitError, MemoryError, RecursionError):
            reply = "limit"
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
