"""Sources split by a score."""

import pyarrow as pa
import pytest

from sabia.core.errors import UsageError
from sabia.core.shards.arrow_arrays import type_of
from sabia.core.text.tokenize.document_encoding import Buckets


def test_edges_belong_to_the_bucket_above() -> None:
    scores = [{"edu": 0.9}, {"edu": 1.0}, {"edu": 3.0, "x": 1.0}, {"edu": 99.0}, {}, None]
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(["web"] * 5 + [None]),
            pa.array(scores, type_of(["edu", "x"])),
            pa.array(range(6)),
        ],
        ["source", "scores", "n"],
    )
    buckets = Buckets.parse("edu=1,3")
    assert buckets
    split = buckets.split(batch)
    assert split.column("source").to_pylist() == [
        "web/edu0", "web/edu1", "web/edu2", "web/edu2", "web/edu-none", "/edu-none",
    ]  # fmt: skip
    assert split.column("n").to_pylist() == list(range(6))


@pytest.mark.parametrize("text", ["edu", "edu=", "edu=3,1", "edu=1,1", "=1", "edu=a"])
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--by"):
        Buckets.parse(text)
