"""Figures of the server in the text format of Prometheus (exposition format 0.0.4)."""

import time
from collections.abc import Mapping

from sabia.core.serve.worker import Load


def exposition(
    load: Load, waiting: int, answered: Mapping[tuple[str, int], int], started: float
) -> str:
    """The page of /metrics. answered: number of answers by path and status. started: Unix time."""
    gauges = {
        "requests_waiting": ("Requests that no step has begun.", waiting),
        "samples_running": ("Samples that are being decoded.", load.running),
        "uptime_seconds": ("Seconds since the start.", round(time.time() - started, 3)),
    }
    counters = {
        "prompt_tokens": ("Tokens of prompts.", load.prompt_tokens),
        "generated_tokens": ("Tokens drawn.", load.drawn_tokens),
        "proposed_tokens": ("Tokens that a draft proposed.", load.proposed_tokens),
        "accepted_tokens": ("Proposed tokens that were kept.", load.accepted_tokens),
    }
    lines = list[str]()
    for name, (text, value) in gauges.items():
        lines += [*_head(name, text, "gauge"), f"sabia_{name} {value}"]
    for name, (text, value) in counters.items():
        lines += [*_head(f"{name}_total", text, "counter"), f"sabia_{name}_total {value}"]
    lines += _head("requests_total", "Answers by path and HTTP status.", "counter")
    for (path, status), count in sorted(answered.items()):
        lines.append(f'sabia_requests_total{{path="{path}",status="{status}"}} {count}')
    return "\n".join(lines) + "\n"


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP sabia_{name} {text}", f"# TYPE sabia_{name} {kind}"]
