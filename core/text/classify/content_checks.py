"""Optional checks of `classify`: personal data, bad words, blocked URLs.

Each adds scores (see pii, bad_words and blocklist). Two options edit the text: `c4_lines` before
all scores are computed, `pii` = mask after them.

`c4_lines` removes the lines of a text that break C4's rules. A line (of str.splitlines, without
white space at its ends and without citations such as `[12]`, `[edit]`, `[citation needed]`) is kept
if it has no word of more than 1,000 characters, ends in one of . ? ! " ' but not in three dots, has
three words or more, and contains neither `javascript`, `{`, `lorem ipsum` nor a phrase about
policies and cookies (kernels.quality.POLICY). The filter `c4` of heuristics uses the same rules,
and rejects texts where a line that passes the other rules contains `{` or `lorem ipsum`. Raffel et
al. 2020, section 2.2.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from sabia.core.options.classify import ContentChecks
from sabia.core.text.classify import bad_words, blocklist, pii
from sabia.core.text.removed_rows import put_column
from sabia.kernels.quality.reference import c4_verdict


def kept_lines(text: str) -> str:
    """The lines that the rules keep, joined by line feeds."""
    verdicts = (c4_verdict(line) for line in text.splitlines())
    return "\n".join(line for verdict, line in verdicts if verdict == "keep")


def digest(options: ContentChecks) -> str:
    """Load all lists; returns a hash of them, for fingerprints. UsageError where that fails."""
    if options.bad_words:
        bad_words.load(options.bad_words)
    if options.block_urls:
        blocklist.load(options.block_urls)
    words = bad_words.digest(options.bad_words) if options.bad_words else ""
    return words + (blocklist.digest(options.block_urls) if options.block_urls else "")


def edit_texts(batch: pa.RecordBatch, options: ContentChecks) -> pa.RecordBatch:
    """The batch with the texts that are scored."""
    if not options.c4_lines:
        return batch
    return _with_texts(batch, [kept_lines(text) for text in batch.column("text").to_pylist()])


def check_texts(
    batch: pa.RecordBatch, options: ContentChecks
) -> tuple[pa.RecordBatch, dict[str, np.ndarray]]:
    """(the batch, masked if requested; the scores of the checks that are on)."""
    new: dict[str, np.ndarray] = {}
    if options.block_urls:
        urls = batch.column("url").to_pylist()
        categories = blocklist.load(options.block_urls).look_up(urls)
        new[blocklist.SCORE] = (categories >= 0).astype(float)
    if not options.pii and not options.bad_words:
        return batch, new
    texts = batch.column("text").to_pylist()
    if options.bad_words:
        lists, languages = bad_words.load(options.bad_words), batch.column("language").to_pylist()
        new |= bad_words.scan(lists, texts, languages)
    if options.pii:
        texts, counts = pii.scan(texts, masked=options.pii == "mask")
        new |= counts
    return (_with_texts(batch, texts) if options.pii == "mask" else batch), new


def reasons(batch: pa.RecordBatch, options: ContentChecks, names: Iterable[str]) -> list[str]:
    """For each excluded row, the list that blocks its URL, if the expression uses that score."""
    if not options.block_urls or blocklist.SCORE not in names:
        return [""] * batch.num_rows
    return blocklist.load(options.block_urls).reasons(batch.column("url").to_pylist())


def _with_texts(batch: pa.RecordBatch, texts: list[str]) -> pa.RecordBatch:
    return put_column(batch, "text", pa.array(texts, pa.string()))
