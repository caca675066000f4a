"""The WARC record of each document: from the network, from archives, replayed, and in reports."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastwarc.warc import ArchiveIterator

from sabia.examples.little_web import build_site
from sabia.examples.little_web.server import LittleWebServer

NETWORK = (
    "--contact",
    "test@example.org",
    "--delay",
    "0s",
    "--backoff",
    "0.05s",
    "--allow-private",
)


def sabia(*words, **settings):
    command = [sys.executable, "-m", "sabia.cli.main", *map(str, words)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120, **settings)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.fixture(scope="module")
def crawled(tmp_path_factory) -> Path:
    """A crawl with its archive, in several files."""
    folder = tmp_path_factory.mktemp("crawled")
    server = LittleWebServer(build_site(60, 0)).start()
    (folder / "seeds.txt").write_text(f"{server.base_url}/\n")
    sabia("crawl", folder / "seeds.txt", *NETWORK, "--warc", folder / "warc", "--warc-size", "20KB",
          "-o", folder / "pages")  # fmt: skip
    server.shutdown()
    return folder


def archived(folder: Path) -> dict[tuple[str, str], str]:
    """The URL of each response by file and record, read by fastwarc alone."""
    urls = {}
    for path in sorted(folder.glob("*.warc.gz")):
        with path.open("rb") as file:
            for record in ArchiveIterator(file):
                if record.headers["WARC-Type"] == "response":
                    name = record.headers["WARC-Record-ID"].removeprefix("<").removesuffix(">")
                    urls[path.name, name] = record.headers["WARC-Target-URI"]
    return urls


def named(path: Path) -> dict[str, tuple[str, str]]:
    rows = pq.read_table(path).to_pylist()
    return {row["url"]: (row["warc_file"], row["warc_record"]) for row in rows}


def test_a_document_names_the_record_of_its_page(crawled, tmp_path):
    urls = archived(crawled / "warc")
    pages = named(crawled / "pages")
    assert len(pages) > 40 and len({file for file, _ in pages.values()}) > 1
    assert all(urls[record] == url for url, record in pages.items())
    sabia("crawl", crawled / "warc", "-o", tmp_path / "read")
    assert named(tmp_path / "read") == pages
    sabia("crawl", crawled / "seeds.txt", "--replay", crawled / "warc", "-o", tmp_path / "replayed")
    replayed = named(tmp_path / "replayed")
    assert replayed and replayed.items() <= pages.items()


def test_a_stream_has_records_without_a_file(crawled):
    path = sorted((crawled / "warc").glob("*.warc.gz"))[0]
    lines = sabia("crawl", "--to", "jsonl", input=path.read_bytes()).splitlines()
    expected = {url: name for (file, name), url in archived(crawled / "warc").items()
                if file == path.name}  # fmt: skip
    rows = [json.loads(line) for line in lines]
    assert rows and all(row["warc_record"] == expected[row["url"]] for row in rows)
    assert {row["warc_file"] for row in rows} == {None}


def test_records_are_in_meta_where_the_directory_has_no_columns(crawled, tmp_path):
    """Of an earlier release, or of files that are no archives."""
    (tmp_path / "page.html").write_text("<p>A page with some words.</p>")
    sabia("crawl", tmp_path / "page.html", "-o", tmp_path / "out", "--append")
    path = sorted((crawled / "warc").glob("*.warc.gz"))[0]
    sabia("crawl", path, "-o", tmp_path / "out", "--append")
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert "warc_record" not in rows[0]
    urls = archived(crawled / "warc")
    records = [json.loads(row["meta"]) for row in rows if row["url"].startswith("http")]
    assert records and all((one["warc_file"], one["warc_record"]) in urls for one in records)


def test_later_stages_and_reports_keep_the_record(crawled, tmp_path):
    """Together with documents of a release without the columns."""
    before = pa.table({"text": ["a document of an earlier release"], "url": ["http://earlier/"]})
    pq.write_table(before, tmp_path / "before.parquet")
    sabia("dedup", crawled / "pages", tmp_path / "before.parquet", "-o", tmp_path / "kept")
    pages, kept = named(crawled / "pages"), named(tmp_path / "kept")
    assert kept.pop("http://earlier/") == (None, None)
    assert kept and kept.items() <= pages.items()
    url, (file, record) = next(iter(kept.items()))
    answer = json.loads(sabia("report", "--document", url, crawled / "pages", "--json"))
    (use,) = answer["documents"][0]["outputs"]
    assert (use["warc_file"], use["warc_record"]) == (file, record)
