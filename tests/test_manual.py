"""The manual pages: one for each command, with every section, and clean by mandoc's own lint."""

import shutil
import subprocess
from pathlib import Path

import pytest

from sabia.cli.main import COMMANDS

MAN = Path(__file__).parent.parent / "man"
PAGES = ["sabia", *(f"sabia-{name}" for name in COMMANDS)]
SECTIONS = ("NAME", "SYNOPSIS", "DESCRIPTION", "INPUT AND OUTPUT", "ENVIRONMENT", "EXIT STATUS",
            "EXAMPLES", "SEE ALSO")  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_page_has_every_section(page: str) -> None:
    text = (MAN / f"{page}.1").read_text()
    for section in SECTIONS:
        assert f"\n.Sh {section}\n" in text


def test_no_page_without_a_command() -> None:
    assert {path.stem for path in MAN.glob("*.1")} == set(PAGES)


@pytest.mark.skipif(not shutil.which("mandoc"), reason="mandoc is not installed")
@pytest.mark.parametrize("page", PAGES)
def test_mandoc_finds_nothing(page: str) -> None:
    done = subprocess.run(
        ["mandoc", "-Tlint", str(MAN / f"{page}.1")], capture_output=True, text=True
    )
    said = [x for x in done.stdout.splitlines() if "referenced manual not found" not in x]
    assert not said
