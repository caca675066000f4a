"""own_data: what is held out, what its report says, and the whole script on a small folder."""

import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from waiting import HANG_S

from sabia.core.bench.score_rows import Score
from sabia.core.errors import BadData
from sabia.core.shards.schemas import document
from sabia.examples.little_web import prose

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import own_data_report  # noqa: E402
import own_data_split  # noqa: E402
from run_folder import RunFolder, aligned, markdown  # noqa: E402


def documents(path: Path, texts: dict[str, str]) -> Path:
    rows = [{"id": name, "text": text} for name, text in texts.items()]
    pq.write_table(pa.Table.from_pylist(rows, schema=document()), path)
    return path


def split(folder: Path, texts: dict[str, str], share=0.1):
    source = documents(folder / "d.parquet", texts)
    counts = own_data_split.split(source, folder / "t.parquet", folder / "h.parquet", share)
    train, held = (pq.read_table(folder / f"{n}.parquet").to_pylist() for n in "th")
    assert counts["train"] == len(train) and counts["held_out"] == len(held)
    return {r["id"]: r["text"] for r in train}, {r["id"]: r["text"] for r in held}


def test_each_document_is_on_one_side_and_stays_there(tmp_path):
    texts = {f"doc {n}": f"text {n}" for n in range(2000)}
    train, held = split(tmp_path, texts)
    assert train.keys() | held.keys() == texts.keys() and not train.keys() & held.keys()
    assert 140 < len(held) < 260  # a tenth, four standard deviations either way
    more_train, more_held = split(tmp_path, texts | {f"new {n}": "text" for n in range(500)})
    assert held.keys() < more_held.keys() and train.keys() < more_train.keys()


def test_long_documents_give_their_end(tmp_path):
    book = "".join(f"Line {n} of the book, which is long.\n" for n in range(3000))
    train, held = split(tmp_path, {"book": book, "b": "short", "c": "short too"})
    assert train["book"] + held["book-end"] == book
    assert train["book"].endswith("\n") and 0.09 < len(held["book-end"]) / len(book) < 0.11


@pytest.mark.parametrize("texts", [{"a": "one two three four"}, {"a": "x" * 30, "b": "y"}])
def test_neither_side_is_empty(tmp_path, texts):
    train, held = split(tmp_path, texts)
    assert all(train.values()) and all(held.values()) and train and held
    assert sum(map(len, train.values())) + sum(map(len, held.values())) == sum(
        map(len, texts.values())
    )


def test_nothing_to_split_is_said(tmp_path):
    with pytest.raises(BadData, match="no documents to split"):
        split(tmp_path, {})


def test_split_writes_the_same_bytes_again(tmp_path):
    texts = {f"doc {n}": f"text {n}" for n in range(50)}
    made = []
    for _ in range(2):
        split(tmp_path, texts)
        made.append([(tmp_path / f"{n}.parquet").read_bytes() for n in "th"])
    assert made[0] == made[1]  # so that the stages behind it find their work done


def test_files_are_counted_by_kind_without_eval(tmp_path):
    for name in ("a.WARC.GZ", "b.html", "deep/c.html.gz", "deep/eval/d.txt", "e.doc", "f.json",
                 "eval/g.txt", ".hidden.txt", "LICENSE"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    read, left = own_data_report.files_table(tmp_path).rows
    assert read[1] == 4 and "1 .warc.gz" in read[2] and "1 .txt" in read[2]
    assert left[1] == 3 and "1 (none)" in left[2] and "1 .json" in left[2]


def test_rejects_group_by_reason(tmp_path):
    reasons = ["cut after 3 of 9 bytes", "cut after 30 of 90 bytes", "no text"]
    pq.write_table(pa.table({"reason": reasons}), tmp_path / "pages.rejects.parquet")
    rows = own_data_report.rejects_table(RunFolder(tmp_path)).rows
    assert rows == [["cut after N of N bytes", 2], ["no text", 1]]


def test_guessing_is_the_mean_of_the_options():
    said = [[-1.0] * 5, [-1.0] * 4]
    scores = [Score("m", "t", str(n), 0, "acc", 1.0, {"loglikelihoods": nats})
              for n, nats in enumerate(said)]  # fmt: skip
    scores.append(Score("m", "t", "0", 0, "acc_norm", 1.0))
    assert own_data_report.guess_accuracy(scores) == {"t": pytest.approx((1 / 5 + 1 / 4) / 2)}


def test_tables_as_text_and_markdown():
    assert aligned([["a", 1], ["long", 22]]) == "a     1\nlong  22"
    assert markdown(["x"], [["a|b"]]) == "| x |\n| --- |\n| a\\|b |"


def warc(pages: dict[str, str]) -> bytes:
    records = []
    for url, body in pages.items():
        block = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n{body}".encode()
        head = (
            f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\n"
            "WARC-Date: 2026-01-01T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:1>\r\n"
            f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(block)}\r\n"
        )
        records.append(head.encode() + b"\r\n" + block + b"\r\n\r\n")
    return b"".join(records)


def article(language: str, seed: int) -> list[str]:
    """Paragraphs by the little web's grammar."""
    draw = random.Random(seed)
    topics = list(prose.lexicon(language)["topics"].values())
    return prose.paragraphs(topics[seed % len(topics)], language, draw)


def page(language: str, seed: int) -> str:
    text = "".join(f"<p>{part}</p>" for part in article(language, seed))
    return f"<html><body><article>{text}</article></body></html>"


@pytest.fixture
def small_folder(tmp_path):
    data = tmp_path / "my data"
    (data / "eval").mkdir(parents=True)
    (data / "eval" / "secret.txt").write_text("This must not be read as training text.\n" * 9)
    archive = {f"http://a.example/{n}": page("en", 0) for n in range(2)}
    (data / "a.warc").write_bytes(warc(archive))
    (data / "b.html").write_text(page("pt", 1))
    (data / "c.txt").write_text("\n".join(article("pt", 2)))
    good = json.dumps({"id": "d1", "text": "\n".join(article("en", 3))})
    (data / "d.jsonl").write_text(f"{good}\n{{broken\n")
    (data / "e.txt").write_bytes(bytes(range(256)))
    (data / "task.toml").write_text(
        'name = "rivers"\nkind = "multiple_choice"\ndata = "eval/rivers.jsonl"\n'
        'prompt = "{{ q }}"\nchoices = "options"\nanswer = "a"\n'
    )
    item = {"q": "The river rises in", "options": ["spring", "x"], "a": 0}
    (data / "eval" / "rivers.jsonl").write_text(json.dumps(item) + "\n")
    return data


@pytest.fixture
def environment(tmp_path):
    """The interpreter of the tests under the name that environment.sh looks for, so no pip runs."""
    venv = tmp_path / "venv"
    venv.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        if (Path(sys.prefix) / name).exists():
            (venv / name).symlink_to(Path(sys.prefix) / name)
    made_from = (ROOT / "pyproject.toml", ROOT / "tests" / "constraints.txt")
    mark = subprocess.run(["cksum"], input=b"".join(path.read_bytes() for path in made_from),
                          capture_output=True, check=True)  # fmt: skip
    (venv / ".sabia-setup").write_text(f"made\n{mark.stdout.split()[0].decode()} index \n")
    return os.environ | {"SABIA_VENV": str(venv), "OMP_NUM_THREADS": "1"}


def own_data(environment, *words):
    line = ["bash", str(ROOT / "examples" / "own_data.sh"), *map(str, words)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.slow
def test_the_whole_script_and_again(small_folder, environment, tmp_path):
    work = tmp_path / "work"
    words = ("--tokens", "4k", "--work", work, small_folder)
    done = own_data(environment, *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "$ sabia crawl" in done.stdout and "not text" in done.stdout
    rejects = pq.read_table(work / "pages.rejects.parquet").to_pylist()
    assert len(rejects) == 2 and any("not JSON" in row["reason"] for row in rejects)
    texts = [row["text"] for row in pq.read_table(work / "pages.parquet").to_pylist()]
    assert len(texts) == 5 and not any("must not be read" in text for text in texts)
    assert "1 exact and" in done.stdout  # the two pages of the archive are one
    assert "rivers" in done.stdout and "0.500" in done.stdout
    for name in ("report.html", "eval.html", "run/final/model.safetensors", "small/config.json"):
        assert (work / name).stat().st_size
    _again(environment, words, work)


def _again(environment, words, work):
    kept = ("pages.parquet", "tokens/part-00000.parquet", "run/final/model.safetensors",
            "small/model.safetensors", "scores.parquet", "tokenize.json")  # fmt: skip
    before = {name: ((work / name).stat().st_mtime_ns, _crc(work / name)) for name in kept}
    again = own_data(environment, *words)
    assert again.returncode == 0, again.stderr[-2000:]
    assert before == {n: ((work / n).stat().st_mtime_ns, _crc(work / n)) for n in kept}


def _crc(path: Path) -> int:
    return zlib.crc32(path.read_bytes())


def test_refusals_come_before_any_work(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "data").mkdir()
    for words, said in (
        ((), "no folder given"),
        (("--work", tmp_path / "full", tmp_path / "data"), "has other files in it"),
        (("--work", tmp_path / "data" / "w", tmp_path / "data"), "would be read"),
        (("--tokens",), "--tokens needs a value"),
        (("--frobnicate", tmp_path), "unknown option"),
        ((tmp_path / "absent",), "is no folder"),
    ):
        refused = own_data(os.environ, *words)
        assert refused.returncode == 2 and said in refused.stderr, (words, refused.stderr)
    assert os.listdir(tmp_path / "full") == ["thesis.txt"]
