"""The screens of classify on one batch: what they add, what they edit, what they refuse."""

from pathlib import Path

import pyarrow as pa
import pytest

from sabia.core.errors import UsageError
from sabia.core.options.classify import ContentChecks
from sabia.core.text.classify import content_checks

TEXT = "Write to ana@example.org, darn.\nHome | About\nIt rained all day."


def batch() -> pa.RecordBatch:
    columns = {"text": [TEXT, ""], "url": ["http://a.bad.com/x", None], "language": ["en", "und"]}
    return pa.RecordBatch.from_pydict(columns)


def test_nothing_asked_nothing_done() -> None:
    nothing = ContentChecks()
    rows, new = content_checks.check_texts(content_checks.edit_texts(batch(), nothing), nothing)
    assert rows.equals(batch()) and new == {} and content_checks.digest(nothing) == ""
    assert content_checks.reasons(rows, nothing, ["blocked_url"]) == ["", ""]


def test_counts_mask_and_lists(tmp_path: Path) -> None:
    (tmp_path / "ads").write_text("bad.com\n")
    (tmp_path / "words").write_text("darn\n")
    lists = {"bad_words": (str(tmp_path / "words"),), "block_urls": (str(tmp_path / "ads"),)}
    options = ContentChecks(pii="mask", **lists)
    words = ContentChecks(bad_words=lists["bad_words"])
    assert content_checks.digest(options) and content_checks.digest(
        options
    ) != content_checks.digest(words)
    rows, new = content_checks.check_texts(content_checks.edit_texts(batch(), options), options)
    assert rows.column("text")[0].as_py() == TEXT.replace("ana@example.org", "[email]")
    assert new["pii_email"].tolist() == [1, 0] and new["bad_words"].tolist() == [1, 0]
    assert new["blocked_url"].tolist() == [1, 0]
    assert content_checks.reasons(rows, options, ["blocked_url"]) == ["blocked url: ads", ""]
    counted = content_checks.check_texts(batch(), ContentChecks(pii="count"))
    assert counted[0].equals(batch()) and counted[1]["pii_email"].tolist() == [1, 0]


def test_c4_lines_go_before_figures_are_taken() -> None:
    kept = (
        content_checks.edit_texts(batch(), ContentChecks(c4_lines=True)).column("text").to_pylist()
    )
    assert kept == ["Write to ana@example.org, darn.\nIt rained all day.", ""]


def test_what_will_not_do() -> None:
    for options in (ContentChecks(bad_words=("/none",)), ContentChecks(block_urls=("/n",))):
        with pytest.raises(UsageError):
            content_checks.digest(options)
