"""The version of each stage's results, which the fingerprints of its outputs contain.

Raise the number of a stage when its code gives other rows or weights for the same inputs and
options: outputs of the earlier number are then made again by the same command. A number that does
not change keeps them valid, whatever else changes in the package.
`tests/core/test_result_versions.py` fails when code that a stage runs changes: it names the lines
of this table. Results that were wrong, and not only different, also belong in `known_defects.toml`.
"""

from collections.abc import Mapping
from typing import Any

RESULTS = {
    "crawl": 4,
    "classify": 1,
    "classify train": 2,
    "classify threshold": 1,
    "dedup": 1,
    "rewrite": 2,
    "tokenize": 1,
    "pretrain": 2,
    "sft": 4,
    "grpo": 6,
    "quantize": 9,
    "eval": 7,
    "plan-cluster": 8,
}
# what fingerprints of results 1 contain: the version of the package at that time
FIRST = "0.1.0"


def result_version(command: str) -> int:
    """The version of the results of a command; 1 for calls of no command of the table."""
    return RESULTS.get(command, 1)


def code_identity(command: str) -> str:
    """What stands for the code in the fingerprints of a command's outputs."""
    number = result_version(command)
    return FIRST if number == 1 else f"{FIRST} result {number}"


def recorded_result(made: Mapping[str, Any]) -> int:
    """The version of the results that a provenance or the record of a run tells."""
    return int(made.get("result", 1))
