"""What `classify` looks for besides quality, when asked: personal data, bad words, blocked URLs.

Each adds scores (pii, bad_words and blocklist say which); two edit the text: `c4_lines` before all
figures are taken, `pii` = mask after them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sabia.core.errors import UsageError
from sabia.core.text import bad_words, blocklist, c4, pii
from sabia.core.text.removed import put_column

PII = ("", "count", "mask")


@dataclass(frozen=True)
class Screens:
    """pii: count, mask or nothing; lists of bad words and of URLs: paths; c4_lines: keep only the
    lines that C4's rules keep."""

    pii: str = ""
    bad_words: tuple[str, ...] = ()
    block_urls: tuple[str, ...] = ()
    c4_lines: bool = False

    def check(self) -> str:
        """Open all lists; a hash of them, for fingerprints. UsageError for what will not do."""
        if self.pii not in PII:
            raise UsageError(f"--pii: {self.pii!r} (expected count or mask)")
        if self.bad_words:
            bad_words.load(self.bad_words)
        if self.block_urls:
            blocklist.load(self.block_urls)
        words = bad_words.digest(self.bad_words) if self.bad_words else ""
        return words + (blocklist.digest(self.block_urls) if self.block_urls else "")

    def before(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch of which figures are taken."""
        if not self.c4_lines:
            return batch
        return _with_texts(batch, c4.edit(batch.column("text").to_pylist()))

    def after(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[str, np.ndarray]]:
        """(the batch, masked if asked; the scores of the screens that are on)."""
        new: dict[str, np.ndarray] = {}
        if self.block_urls:
            urls = batch.column("url").to_pylist()
            found = blocklist.load(self.block_urls).look_up(urls)
            new[blocklist.SCORE] = (found >= 0).astype(float)
        if not self.pii and not self.bad_words:
            return batch, new
        texts = batch.column("text").to_pylist()
        if self.bad_words:
            lists, languages = bad_words.load(self.bad_words), batch.column("language").to_pylist()
            new |= bad_words.scan(lists, texts, languages)
        if self.pii:
            texts, counts = pii.scan(texts, masked=self.pii == "mask")
            new |= counts
        return (_with_texts(batch, texts) if self.pii == "mask" else batch), new

    def reasons(self, batch: pa.RecordBatch, names: Iterable[str]) -> list[str]:
        """For each row that goes, which list blocks its URL, where an expression asks for that."""
        if not self.block_urls or blocklist.SCORE not in names:
            return [""] * batch.num_rows
        return blocklist.load(self.block_urls).reasons(batch.column("url").to_pylist())


NOTHING = Screens()


def _with_texts(batch: pa.RecordBatch, texts: list[str]) -> pa.RecordBatch:
    return put_column(batch, "text", pa.array(texts, pa.string()))
