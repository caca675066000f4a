"""Signatures as datasketch's MinHash objects and back: the same numbers, and nothing mixed up."""

from dataclasses import replace

import numpy as np
import pytest
from datasketch import LeanMinHash, MinHash, MinHashLSH

from sabia.core.errors import BadData, UsageError
from sabia.core.text.dedup.datasketch_signatures import from_datasketch, to_datasketch
from sabia.kernels.minhash.definitions import SketchConfig
from sabia.kernels.minhash.interface import signatures as document_signatures
from sabia.kernels.minhash.interface import sketch

TEXTS = ["one two three four five six seven", "one two three four five six eight", "", "oito"]
WHOLE = SketchConfig(2, 1, 64, 3, "datasketch")
BANDED = SketchConfig(2, 10, 6, 3, "datasketch", 64)


def buffers() -> tuple[np.ndarray, np.ndarray]:
    raw = [text.encode() for text in TEXTS]
    bounds = np.concatenate(([0], np.cumsum([len(one) for one in raw])))
    return np.frombuffer(b"".join(raw), np.uint8), bounds.astype(np.int64)


def signatures(config: SketchConfig) -> np.ndarray:
    return document_signatures(*buffers(), config)


def theirs(**given: object) -> list[MinHash]:
    """Objects that datasketch itself updated with the shingles."""
    plain = sketch(*buffers(), SketchConfig(2, 0))
    sets = np.split(plain.shingles, np.cumsum(plain.counts)[:-1])
    made = [MinHash(**{"num_perm": 64, "seed": 3, "hashfunc": int} | given) for _ in sets]
    for one, shingles in zip(made, sets, strict=True):
        one.update_batch(shingles.tolist())
    return made


def test_ours_become_the_objects_that_datasketch_makes() -> None:
    made = list(to_datasketch(signatures(WHOLE), WHOLE))
    assert made == theirs()
    assert made[0].jaccard(made[1]) == theirs()[0].jaccard(made[1]) > 0
    assert made[2].is_empty()
    index = MinHashLSH(num_perm=64, params=(10, 6))
    index.insert("one", made[0])
    assert index.query(theirs()[0]) == ["one"]
    made[0].update(7)  # each object is one of its own and goes on by the same permutations
    other = theirs()[0]
    other.update(7)
    assert made[0] == other
    assert list(to_datasketch(signatures(WHOLE), WHOLE)) == theirs()


def test_theirs_become_our_signatures() -> None:
    assert np.array_equal(from_datasketch(theirs(), WHOLE), signatures(WHOLE))
    got = from_datasketch(iter(theirs()), BANDED)
    assert np.array_equal(got, signatures(BANDED))
    assert got.dtype == np.uint32
    lean = [LeanMinHash(one) for one in theirs()]
    assert np.array_equal(from_datasketch(lean, BANDED), signatures(BANDED))
    assert from_datasketch([], BANDED).shape == (0, 60)
    negative = replace(WHOLE, seed=-1)
    there_and_back = from_datasketch(to_datasketch(signatures(negative), negative), negative)
    assert np.array_equal(there_and_back, signatures(negative))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seed": 4}, r"MinHash 1: seed 4 \(expected 3\)"),
        ({"num_perm": 60}, r"MinHash 1: num_perm 60 \(expected 64\)"),
        ({"scheme": "legacy"}, "MinHash 1: scheme 'legacy'"),
        ({"permutations": MinHash(64, 5).permutations, "scheme": "affine32"}, "that do not follow"),
    ],
)
def test_objects_of_other_parameters_are_refused(given: dict, said: str) -> None:
    with pytest.raises(BadData, match=said):
        from_datasketch([theirs()[0], theirs(**given)[1]], BANDED)


def test_signatures_that_are_no_objects_are_refused() -> None:
    with pytest.raises(UsageError, match=r"60 hashes \(expected all 64"):
        to_datasketch(signatures(BANDED), BANDED)
    with pytest.raises(UsageError, match="signatures: 'sabia'"):
        to_datasketch(signatures(WHOLE), replace(WHOLE, signatures="sabia"))
    with pytest.raises(UsageError, match="signatures: 'sabia'"):
        from_datasketch(theirs(), SketchConfig())
