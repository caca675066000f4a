"""The screens of classify on one batch: what they add, what they edit, what they refuse."""

from pathlib import Path

import pyarrow as pa
import pytest

from sabia.core.errors import UsageError
from sabia.core.text.screens import NOTHING, Screens

TEXT = "Write to ana@example.org, darn.\nHome | About\nIt rained all day."


def batch() -> pa.RecordBatch:
    columns = {"text": [TEXT, ""], "url": ["http://a.bad.com/x", None], "language": ["en", "und"]}
    return pa.RecordBatch.from_pydict(columns)


def test_nothing_asked_nothing_done() -> None:
    rows, new = NOTHING.after(NOTHING.before(batch()))
    assert rows.equals(batch()) and new == {} and NOTHING.check() == ""
    assert NOTHING.reasons(rows, ["blocked_url"]) == ["", ""]


def test_counts_mask_and_lists(tmp_path: Path) -> None:
    (tmp_path / "ads").write_text("bad.com\n")
    (tmp_path / "words").write_text("darn\n")
    lists = {"bad_words": (str(tmp_path / "words"),), "block_urls": (str(tmp_path / "ads"),)}
    screens = Screens(pii="mask", **lists)
    assert screens.check() and screens.check() != Screens(bad_words=lists["bad_words"]).check()
    rows, new = screens.after(screens.before(batch()))
    assert rows.column("text")[0].as_py() == TEXT.replace("ana@example.org", "[email]")
    assert new["pii_email"].tolist() == [1, 0] and new["bad_words"].tolist() == [1, 0]
    assert new["blocked_url"].tolist() == [1, 0]
    assert screens.reasons(rows, ["blocked_url"]) == ["blocked url: ads", ""]
    counted = Screens(pii="count").after(batch())
    assert counted[0].equals(batch()) and counted[1]["pii_email"].tolist() == [1, 0]


def test_c4_lines_go_before_figures_are_taken() -> None:
    kept = Screens(c4_lines=True).before(batch()).column("text").to_pylist()
    assert kept == ["Write to ana@example.org, darn.\nIt rained all day.", ""]


def test_what_will_not_do() -> None:
    for screens in (
        Screens(pii="hide"),
        Screens(bad_words=("/none",)),
        Screens(block_urls=("/n",)),
    ):
        with pytest.raises(UsageError):
            screens.check()
