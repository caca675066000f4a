"""HTML to text: encodings, links, robots meta, the sandbox, and F1 on labelled pages."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from waiting import HANG_S, until

from sabia.core.sandbox import limits
from sabia.core.web.extraction import block_features
from sabia.core.web.extraction.extract import decode, extract, tidy
from sabia.core.web.extraction.sandbox import Sandbox, Unextractable
from sabia.kernels.html.interface import scan

ARTICLE = (
    "<p>"
    + "</p><p>".join(f"Sentence {n} tells something about rivers." for n in range(30))
    + "</p>"
)


def page(body, head=""):
    return (
        f"<html lang='pt-BR'><head><title> A  title </title>{head}</head><body>{body}</body></html>"
    )


@pytest.mark.parametrize(
    ("encoding", "header", "head"),
    [
        ("utf-8", "text/html; charset=utf-8", ""),
        ("utf-8", "text/html", ""),
        ("latin-1", "text/html; charset=ISO-8859-1", ""),
        ("latin-1", "text/html", "<meta charset=iso-8859-1>"),
        ("windows-1252", "text/html", ""),
        ("utf-8", "text/html; charset=no-such-thing", ""),
        ("utf-16", "text/html", ""),
        ("utf-16-be", "text/html; charset=UTF-16BE", ""),
        ("utf-8-sig", "text/html; charset=latin-1", ""),
        ("utf-8", "text/html", "<meta charset=utf-16>"),
        ("utf-8", "text/html", "<meta charset=iso-8859-1>"),
        ("utf-8", "text/html; charset=iso-8859-1", ""),
        ("windows-1252", "text/html; charset=utf-8", ""),
    ],
)
def test_encodings(encoding, header, head):
    text = "A lição é pão, maçã e coração. " * 5
    assert text.strip() in decode(page(f"<p>{text}</p>", head).encode(encoding), header)


def test_japanese_in_the_encoding_it_declares_or_none():
    text = page("<p>日本語のテキストです。これは川についての長い文章で、漢字と仮名を含みます。</p>")
    for header in ("text/html; charset=x-sjis", "text/html; charset=Shift_JIS", "text/html"):
        assert decode(text.encode("shift_jis"), header) == text
    assert decode(text.encode("euc_jp"), "text/html; charset=euc-jp") == text


def test_a_page_cut_inside_a_character_is_still_utf8():
    assert decode("coração é".encode()[:-1], "text/html") == "coração \ufffd"


def test_article_without_furniture():
    menu = "<nav><ul>" + "<li><a href=/x>Menu entry</a></li>" * 20 + "</ul></nav>"
    body = f"{menu}<main><article>{ARTICLE}</article></main><footer>All rights reserved</footer>"
    found = extract(page(body).encode(), "text/html", "http://h/")
    assert "Sentence 29 tells" in found.text
    assert "Menu entry" not in found.text
    assert (found.title, found.language) == ("A title", "pt-br")


def test_lines_of_tables_lists_and_code():
    source = (
        "<p>One &amp; two<br>three</p><table><tr><td>a<td>b<tr><td>c<td>d</table>"
        "<ul><li>e<li>f</ul>"
        "<pre>if x:\n    y  = 1\n</pre><p>\0g&#0;\u200b</p>"
    )
    found = scan(np.frombuffer(source.encode(), np.uint8))
    text = block_features.text_of(found, np.ones(len(found.blocks), bool))
    expected = ["One & two", "three", "a | b", "c | d", "e", "f", "if x:", "    y  = 1"]
    assert text.split("\n")[:-1] == expected
    assert text.split("\n")[-1].startswith("g") and "\0" not in text


@pytest.mark.parametrize(
    ("head", "date"),
    [
        ("<meta property='article:published_time' content='2022-05-04T10:00:00-03:00'>",
         "2022-05-04T10:00:00-03:00"),
        ('<script type=application/ld+json>{"datePublished": "2021-01-31"}</script>', "2021-01-31"),
        ("<time datetime='2020-02-03'>3 Feb</time>", "2020-02-03"),
        ("<meta name=date content='yesterday'>", ""),
        ("<META NAME=DCTERMS.Created CONTENT=2020-01-02><time datetime=2021-01-01>", "2020-01-02"),
        ("<meta name='p&#117;bdate' content=2020-01-02>", "2020-01-02"),
    ],
)  # fmt: skip
def test_date(head, date):
    assert extract(page("<p>a</p>", head).encode(), "text/html", "http://h/").date == date


def test_in_doubt_the_careful_tier_speaks(monkeypatch):
    body = page(f"<main><article>{ARTICLE}</article></main>").encode()
    assert extract(body, "text/html", "http://h/").extractor == "blocks"
    monkeypatch.setattr("sabia.core.web.extraction.extract.DOUBT", -1.0)
    careful = extract(body, "text/html", "http://h/")
    assert careful.extractor == "trafilatura"
    assert "Sentence 29 tells" in careful.text


def test_links():
    body = (
        "<base href='/base/'><a href='one.html#x'> One\n page</a><a href='one.html'>again</a>"
        "<a href='two' rel='nofollow ugc'>no</a><a href='mailto:a@b'>mail</a><a>none</a>"
        "<a href='HTTP://H:80/3?utm_source=q'>three</a>"
    )
    found = extract(page(body).encode(), "text/html", "http://h/dir/page")
    assert found.links == (("http://h/base/one.html", "One page"), ("http://h/3", "three"))
    assert extract(page(body).encode(), "text/html", "http://h/", want_links=False).links == ()


@pytest.mark.parametrize(
    ("said", "index", "links"),
    [("noindex", False, 1), ("nofollow", True, 0), ("NONE", False, 0), ("all", True, 1)],
)
@pytest.mark.parametrize("name", ["robots", "ROBOTS", "sabia", "robot&#115;"])
def test_robots_meta(name, said, index, links):
    body = page("<a href=/x>x</a>", f"<meta name='{name}' content='{said}'>")
    found = extract(body.encode(), "text/html", "http://h/")
    assert (found.index, len(found.links)) == (index, links)


def test_plain_text_and_odd_pages():
    assert extract(b"one  two\n\n\n three\0", "text/plain", "u").text == "one two\nthree"
    assert extract(b"", "text/html", "http://h/").text == ""
    assert extract(b"\xff\xfe\x00<", "text/html", "http://h/").links == ()
    assert tidy("a\u00a0 b \n\n c\ud800") == "a b\nc?"


def test_sandbox_survives_hang_and_death():
    with Sandbox() as sandbox:
        good = page(f"<main>{ARTICLE}</main>").encode()
        assert "Sentence 3 " in sandbox.extract(good, "text/html", "http://h/", True)["text"]
        for body in (good, good * 2_000):  # the second is more than a pipe takes
            os.kill(sandbox.process.pid, signal.SIGSTOP)  # it hangs
            sandbox.wait_s = 0.3
            with pytest.raises(Unextractable, match=r"did not end within 0\.3 s"):
                sandbox.extract(body, "text/html", "http://h/", True)
            sandbox.wait_s = HANG_S
            assert sandbox.extract(b"fine", "text/plain", "u", False)["text"] == "fine"
        sandbox.process.kill()
        sandbox.process.wait()
        assert sandbox.extract(b"fine", "text/plain", "u", False)["text"] == "fine"


def test_sandbox_limits_cpu_time_and_not_the_time_that_others_take():
    short, long = (page(f"<main>{ARTICLE}</main>" * n).encode() for n in (100, 5_000))
    with Sandbox(time_s=0.1) as sandbox:
        with pytest.raises(Unextractable, match=r"more than 0\.1 s of CPU time"):
            sandbox.extract(long, "text/html", "http://h/", True)
        child = sandbox.running()
        os.kill(child.pid, signal.SIGSTOP)  # another process has the processor for a while
        threading.Timer(0.2, os.kill, (child.pid, signal.SIGCONT)).start()
        assert sandbox.extract(b"fine", "text/plain", "u", False)["text"] == "fine"
        for _ in range(12):  # together more than the limit, which is that of a page
            assert sandbox.extract(short, "text/html", "http://h/", True)["text"]
        assert sandbox.process is child


def test_sandbox_says_how_the_child_died_and_replaces_it(monkeypatch):
    def dying(child, *given):
        child.kill()
        return exchange(child, *given)

    exchange = limits.exchange
    with Sandbox() as sandbox:
        sandbox.running()
        monkeypatch.setattr(limits, "exchange", dying)
        with pytest.raises(Unextractable, match=r"died \(signal 9\)"):
            sandbox.extract(b"a", "text/plain", "u", False)
        monkeypatch.undo()
        assert sandbox.extract(b"fine", "text/plain", "u", False)["text"] == "fine"
        sandbox.asked = sandbox.requests
        old = sandbox.process.pid
        assert sandbox.extract(b"fine", "text/plain", "u", False)["text"] == "fine"
        assert sandbox.process.pid != old


def test_sandbox_limits_memory():
    nested = b"<div>" * 3_000_000
    with Sandbox(memory_bytes=24 << 20) as sandbox:
        with pytest.raises(Unextractable, match=r"Memory|died"):
            sandbox.extract(nested, "text/html", "http://h/", True)
        assert sandbox.extract(b"fine", "text/plain", "u", False)["text"] == "fine"


def test_sandbox_ends_with_its_parent():
    script = (
        "import os; from sabia.core.web.extraction.sandbox import Sandbox; box = Sandbox();"
        "box.extract(b'a', 'text/plain', 'u', False); print(box.process.pid, flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    until(lambda: not os.path.exists(f"/proc/{int(said)}/cmdline"))


def test_odd_bytes_give_no_traceback():
    png = bytes(range(256)) * 500
    for body in (
        b"",
        b"\0" * 1000,
        png,
        b"\xff\xfe" + png,
        b"<html",
        b"<table><td colspan=9999999>",
    ):
        found = extract(body, "text/html", "http://h/")
        found.text.encode()
        assert "\0" not in found.text


def test_f1_on_labelled_pages():
    """Mean F1 of word 3-grams on the half of the pages that nothing was chosen on."""
    data = os.environ.get("SABIA_TEST_DATA")
    if not data:
        pytest.skip("SABIA_TEST_DATA is not set: no labelled pages")
    folder = Path(data) / "web" / "article-extraction"
    truth = json.loads((folder / "ground-truth.json").read_text())
    scores = []
    for path in sorted((folder / "html").glob("*.html.gz")):
        if int(path.name[0], 16) % 2:
            found = extract(gzip.decompress(path.read_bytes()), "text/html", "http://h/").text
            scores.append(f1(found, truth[path.name.removesuffix(".html.gz")]["articleBody"]))
    assert len(scores) >= 40
    assert sum(scores) / len(scores) >= 0.95


def f1(found, true):
    a, b = (
        Counter(zip(words, words[1:], words[2:], strict=False))
        for words in (re.findall(r"\w+", text.lower()) for text in (found, true))
    )
    return 2 * (a & b).total() / (a.total() + b.total())
