"""WARC: read what can be read and say where it ends."""

import gzip
import io
import os
import zlib
from pathlib import Path

import pytest

from sabia.core.errors import BadData
from sabia.core.web.archives.warc_reader import read_pages


def record(kind, url, block, content_type="application/http; msgtype=response", extra=""):
    head = (
        f"WARC/1.1\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\n{extra}"
        f"WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-{abs(hash(url)) % 10**12:012d}>\r\n"
        f"WARC-Date: 2026-01-02T03:04:05Z\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(block)}\r\n\r\n"
    )
    return head.encode() + block + b"\r\n\r\n"


def response(url, body, status=200, headers="Content-Type: text/html\r\n"):
    http = f"HTTP/1.1 {status} X\r\n{headers}\r\n".encode() + body
    return record("response", url, http)


def archive(pages=5, zipped=False):
    parts = [record("warcinfo", "", b"software: x\r\n", "application/warc-fields")]
    parts += [response(f"http://h/{n}", b"<p>page %d</p>" % n + b"." * 2_000) for n in range(pages)]
    return b"".join(gzip.compress(part) if zipped else part for part in parts)


def read(data, limit=1_000_000):
    found = []
    try:
        for page in read_pages(io.BytesIO(data), limit):
            found.append(page)
    except BadData as error:
        return found, str(error)
    return found, ""


@pytest.mark.parametrize("zipped", [False, True])
def test_whole_file(zipped):
    found, error = read(archive(zipped=zipped))
    assert [page.url for page in found] == [f"http://h/{n}" for n in range(5)]
    assert not error
    assert found[3].body.startswith(b"<p>page 3</p>")
    assert found[3].time.isoformat() == "2026-01-02T03:04:05+00:00"


def test_zstd():
    import zstandard

    found, error = read(zstandard.compress(archive()))
    assert (len(found), error) == (5, "")


def ends_of_members(parts_zipped):
    """Offsets where a gzip file may end without anyone being able to tell."""
    data, offsets, left = archive(2, zipped=True), set(), archive(2, zipped=True)
    while left:
        member = zlib.decompressobj(31)
        member.decompress(left)
        offsets.add(len(data) - len(member.unused_data))
        left = member.unused_data
    return offsets if parts_zipped else set()


@pytest.mark.parametrize("zipped", [False, True])
def test_every_cut_is_noticed_and_what_was_read_is_kept(zipped):
    whole, allowed = archive(2, zipped), ends_of_members(zipped)
    for end in range(1, len(whole), 1 if zipped else 7):
        found, error = read(whole[:end])
        assert error or end in allowed, end
        assert len(found) <= 2
    found, _ = read(whole[: len(whole) - 10])
    assert found[0].body.startswith(b"<p>page 0</p>")
    assert not found[0].cut


def test_cut_record_is_kept_and_marked():
    whole = archive(1)
    found, error = read(whole[:-1_000])
    assert "cut short in record 2" in error
    assert found[0].cut
    assert found[0].body.startswith(b"<p>page 0</p>")


def test_damage_in_the_middle_and_no_warc():
    whole = archive()
    middle = whole.index(b"WARC/1.1", len(whole) // 2)
    found, error = read(whole[:middle] + b"GARBAGE!" + whole[middle + 8 :])
    assert "damaged" in error
    assert 1 <= len(found) < 5
    assert read(b"<html>no archive</html>" * 9)[1]
    assert read(b"")[1] == "no WARC record in it"


def test_encodings_statuses_and_other_records():
    chunked = b"5\r\n<p>ab\r\n4\r\n</p>\r\n0\r\n\r\n"
    zipped = gzip.compress(b"<p>zip</p>")
    html = "Content-Type: text/html\r\n"
    data = b"".join(
        [
            response("http://h/chunked", chunked, headers=html + "Transfer-Encoding: chunked\r\n"),
            response("http://h/gzip", zipped, headers=html + "Content-Encoding: gzip\r\n"),
            response("http://h/404", b"gone", 404),
            response("http://h/large", b"x" * 5_000),
            record("request", "http://h/", b"GET / HTTP/1.1\r\n\r\n"),
            record("conversion", "http://h/wet", b"plain text", "text/plain"),
        ]
    )
    found, error = read(data, limit=4_000)
    assert not error
    assert {page.url: page.refused or page.body for page in found} == {
        "http://h/chunked": b"<p>ab</p>",
        "http://h/gzip": b"<p>zip</p>",
        "http://h/404": "HTTP 404",
        "http://h/large": "larger than 4000 bytes",
        "http://h/wet": b"plain text",
    }


def test_real_archives():
    data = os.environ.get("SABIA_TEST_DATA")
    if not data:
        pytest.skip("SABIA_TEST_DATA is not set: no real WARC files")
    folder = Path(data) / "web" / "warc"
    wanted = {
        "resiliparse/warcfile.warc.gz": (16, ""), "resiliparse/clipped.warc.gz": (1, "cut short"),
        "resiliparse/clueweb-quirk.warc.gz": (29, ""), "warcio/example.warc": (1, ""),
        "warcio/example-trunc.warc": (1, "damaged"), "warcio/post-test.warc.gz": (3, ""),
        "whirlwind/whirlwind.warc.gz": (1, ""), "whirlwind/whirlwind.warc.wet": (1, ""),
    }  # fmt: skip
    for name, (pages, said) in wanted.items():
        found, error = read((folder / name).read_bytes(), 8_000_000)
        assert len([page for page in found if not page.refused]) == pages, name
        assert said in error, name
        assert bool(said) == bool(error), name
