"""WARC files as we write them, read by fastwarc and byte by byte: records, digests, rotation."""

import base64
import gzip
import hashlib
import io

from fastwarc.warc import ArchiveIterator

from sabia.core.web.archives.warc_reader import read_pages
from sabia.core.web.archives.warc_writer import Archive, Position, payload_digest
from sabia.core.web.fetch import Response
from sabia.core.web.frontier import Visit

HEADERS = (("Content-Type", "text/html"), ("Content-Encoding", "gzip"), ("Content-Length", "9"))
DIGEST = payload_digest(b"<p>text</p>")


def test_digests_are_those_of_the_standard():
    assert payload_digest(b"<p>text</p>") == "sha1:" + base64.b32encode(
        hashlib.sha1(b"<p>text</p>").digest()).decode()  # fmt: skip


def response(path, body=b"<p>text</p>", status=200, **more):
    asked = (("Host", "h"), ("User-Agent", "sabia/0 (+mailto:a@b)"))
    more = {"reason": "OK", "asked": asked, "address": "192.0.2.1", "took_s": 0.25} | more
    return Response(f"http://h/{path}", status, HEADERS, body, **more)


def archive(folder, position=None, limit=1 << 30):
    return Archive(str(folder), position or Position(), "sabia/0", limit)


def records(path):
    data = path.read_bytes()
    found = ArchiveIterator(io.BytesIO(data), parse_http=False)
    return [
        (dict(r.headers.astuples()), r.verify_block_digest(), r.reader.read()) for r in found
    ]  # fmt: skip


def test_a_fetch_is_three_records(tmp_path):
    file = archive(tmp_path)
    kept = file.add(response("a?b=1"), DIGEST, {"hopsFromSeed": "3"})
    file.close()
    (info, *fetch) = records(tmp_path / "pages-00000.warc.gz")
    assert info[0]["WARC-Type"] == "warcinfo"
    assert b"software: sabia/0" in info[2]
    assert [fields["WARC-Type"] for fields, _, _ in fetch] == ["response", "request", "metadata"]
    assert all(intact for _, intact, _ in [info, *fetch])
    answer, request, about = fetch
    assert answer[0]["WARC-Record-ID"] == kept.record == request[0]["WARC-Concurrent-To"]
    assert answer[0]["WARC-Payload-Digest"] == DIGEST
    assert answer[0]["WARC-IP-Address"] == "192.0.2.1"
    head, _, body = answer[2].partition(b"\r\n\r\n")
    assert body == b"<p>text</p>"
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 200 OK", b"Content-Type: text/html", b"X-Crawl-Content-Encoding: gzip",
        b"X-Crawl-Content-Length: 9", b"Content-Length: 11",
    ]  # fmt: skip
    assert request[2] == (
        b"GET /a?b=1 HTTP/1.1\r\nHost: h\r\nUser-Agent: sabia/0 (+mailto:a@b)\r\n\r\n"
    )
    assert about[2] == b"hopsFromSeed: 3\r\nfetchTimeMs: 250\r\n"


def test_each_record_is_a_member_of_its_own(tmp_path):
    file = archive(tmp_path)
    file.add(response("a"), DIGEST, {})
    file.close()
    data = (tmp_path / "pages-00000.warc.gz").read_bytes()
    whole = gzip.decompress(data)
    assert data.count(b"\x1f\x8b\x08\x00\x00\x00\x00\x00") == whole.count(b"WARC/1.1\r\n") == 4


def test_unchanged_pages_are_revisits(tmp_path):
    file = archive(tmp_path)
    first = file.add(response("a"), DIGEST, {})
    before = Visit(0.0, digest=DIGEST, record=first.record, date=first.date)
    file.add(response("a", b"", 304, reason="Not Modified"), DIGEST, {}, before)
    file.add(response("a"), DIGEST, {}, before)
    file.close()
    found = [r for r in records(tmp_path / "pages-00000.warc.gz")
             if r[0]["WARC-Type"] == "revisit"]  # fmt: skip
    profiles = [fields["WARC-Profile"].rsplit("/", 1)[1] for fields, _, _ in found]
    assert profiles == ["server-not-modified", "identical-payload-digest"]
    for fields, intact, block in found:
        assert intact
        assert fields["WARC-Refers-To"] == first.record
        assert fields["WARC-Refers-To-Date"] == first.date
        assert fields["WARC-Payload-Digest"] == DIGEST
        assert b"<p>" not in block


def test_what_was_not_committed_is_cut_off(tmp_path):
    file = archive(tmp_path)
    good = file.add(response("1", b"<p>one</p>"), DIGEST, {}).position
    file.add(response("lost", b"<p>never committed</p>"), DIGEST, {})
    file.close()
    assert Position.parse(str(good)) == good
    file = archive(tmp_path, good)
    file.add(response("2", b"<p>two</p>"), DIGEST, {})
    file.close()
    with open(tmp_path / "pages-00000.warc.gz", "rb") as data:
        found = [(page.url, page.body) for page in read_pages(data, 1000)]
    assert found == [("http://h/1", b"<p>one</p>"), ("http://h/2", b"<p>two</p>")]


def test_files_are_begun_anew_at_a_size(tmp_path):
    file = archive(tmp_path, limit=2_000)
    places = [file.add(response(str(n)), DIGEST, {}).position for n in range(6)]
    file.close()
    assert places[-1].file >= 2
    later = tmp_path / f"pages-{places[-1].file:05d}.warc.gz"
    assert records(later)[0][0]["WARC-Type"] == "warcinfo"
    archive(tmp_path, places[0]).close()
    assert [path.name for path in tmp_path.iterdir()] == ["pages-00000.warc.gz"]
