"""Models over the tensor axis draw the tokens of one device, with adapters and with drafts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from training_cases import ENVIRONMENT
from waiting import HANG_S

# formats that round inputs: where one lies between two codes, its last bit decides
INPUTS = {"w8a8", "fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4"}
ROUNDED = 2e-3
WORKER = Path(__file__).parents[2] / "support" / "split_engine.py"


def check(*processes: tuple[str, ...]) -> None:
    """The report of the first process, started with these words, has no difference."""
    started = [
        subprocess.Popen([sys.executable, str(WORKER), *words], text=True, env=ENVIRONMENT,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for words in processes
    ]  # fmt: skip
    said = [process.communicate(timeout=HANG_S) for process in started]
    for process, (_, errors) in zip(started, said, strict=True):
        assert process.returncode == 0, errors[-3000:]
    report = json.loads(said[0][0])
    assert len(report) % 5 == 0 and report
    for case, (same, gap, kept) in report.items():
        assert same, case
        assert gap <= (ROUNDED if INPUTS & {*case.split("/")[0].split("+")} else 1e-5), (case, gap)
        assert kept or not case.endswith("draft"), case


@pytest.mark.parametrize(
    "kinds",
    [
        ("dense", "dense+w4a16", "dense+fp8"),
        pytest.param(("moe", "hybrid", "sinks", "tied"), marks=pytest.mark.slow),
        pytest.param(
            [
                f"dense+{name}"
                for name in (
                    "w8a16",
                    "w8a8",
                    "w4a16-asym",
                    "fp8-static",
                    "fp8-block",
                    "mxfp8",
                    "nvfp4",
                )
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("dense+nf4-double", "moe+w4a16", "moe+nf4", "moe+w8a8", "tied+mxfp4a16"),
            marks=pytest.mark.slow,
        ),
    ],
    ids="-".join,
)
def test_two_processes(kinds: tuple[str, ...], tmp_path: Path) -> None:
    check(*(("torch", *kinds, str(rank), str(tmp_path / "store")) for rank in (0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe", "hybrid", "sinks", "tied", "dense+w4a16"])
def test_two_devices_of_jax(kind: str) -> None:
    check(("jax", kind))
