"""Content encodings: each undone, damage and bombs refused, limits kept."""

import gzip
import random
import tracemalloc
import zlib

import brotli
import pytest
import zstandard

from sabia.core.web.bodies import Undecodable, decoded

TEXT = " ".join(random.Random(0).choices(["one", "two", "three", "four"], k=20_000)).encode()
RAW = zlib.compressobj(6, zlib.DEFLATED, -15)
PACKED = {
    "gzip": gzip.compress(TEXT), "x-gzip": gzip.compress(TEXT[:9]) + gzip.compress(TEXT[9:]),
    "deflate": zlib.compress(TEXT), "br": brotli.compress(TEXT), "zstd": zstandard.compress(TEXT),
    "identity": TEXT, "": TEXT, "gzip, br": brotli.compress(gzip.compress(TEXT)),
    "zstd ": zstandard.compress(TEXT[:9]) + zstandard.compress(TEXT[9:]),
    "Deflate ": RAW.compress(TEXT) + RAW.flush(),
}  # fmt: skip
BIG = 96 << 20


@pytest.mark.parametrize("encoding", PACKED)
def test_each_encoding_is_undone(encoding):
    assert decoded(PACKED[encoding], encoding, 1 << 20) == TEXT
    assert decoded(b"", encoding, 100) == b""


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, br"])
def test_no_more_is_unpacked_than_the_limit(encoding):
    assert len(decoded(PACKED[encoding], encoding, 500)) in (500, 501)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, br"])
def test_damage_is_refused(encoding):
    with pytest.raises(Undecodable, match="damaged"):
        decoded(PACKED[encoding][: len(PACKED[encoding]) // 2], encoding, 1 << 20)
    with pytest.raises(Undecodable, match="damaged"):
        decoded(b"no such thing at all", encoding, 1 << 20)


@pytest.mark.parametrize("encoding", ["compress", "gzip, gzip, gzip", "x" * 1_000])
def test_unknown_encodings_are_refused(encoding):
    with pytest.raises(Undecodable, match="content encoding"):
        decoded(b"x", encoding, 100)


def bomb(encoding):
    if encoding == "br":
        return brotli.compress(b"\0" * BIG, quality=1)
    if encoding == "zstd":
        return zstandard.compress(b"\0" * BIG)
    packer = zlib.compressobj(1, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    return b"".join(packer.compress(b"\0" * (1 << 20)) for _ in range(BIG >> 20)) + packer.flush()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_bombs_are_refused_before_they_unfold(encoding):
    packed = bomb(encoding)
    tracemalloc.start()
    if len(packed) < 40_000:
        with pytest.raises(Undecodable, match="bomb"):
            decoded(packed, encoding, 8 << 20)
    else:
        assert len(decoded(packed, encoding, 8 << 20)) == (8 << 20) + 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 48 << 20
