"""HTML to text: encodings, links, robots meta, the sandbox, and F1 on labelled pages."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from sabia.core.web import sandbox as sandbox_module
from sabia.core.web.extract import decode, extract, tidy
from sabia.core.web.sandbox import Sandbox, Unextractable

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
    ],
)
def test_encodings(encoding, header, head):
    text = "A lição é pão, maçã e coração. " * 5
    assert text.strip() in decode(page(f"<p>{text}</p>", head).encode(encoding), header)


def test_article_without_furniture():
    menu = "<nav><ul>" + "<li><a href=/x>Menu entry</a></li>" * 20 + "</ul></nav>"
    body = f"{menu}<main><article>{ARTICLE}</article></main><footer>All rights reserved</footer>"
    found = extract(page(body).encode(), "text/html", "http://h/")
    assert "Sentence 29 tells" in found.text
    assert "Menu entry" not in found.text
    assert (found.title, found.language) == ("A title", "pt-br")


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
def test_robots_meta(said, index, links):
    body = page("<a href=/x>x</a>", f"<meta name=robots content='{said}'>")
    found = extract(body.encode(), "text/html", "http://h/")
    assert (found.index, len(found.links)) == (index, links)


def test_plain_text_and_odd_pages():
    assert extract(b"one  two\n\n\n three\0", "text/plain", "u").text == "one two\nthree"
    assert extract(b"", "text/html", "http://h/").text == ""
    assert extract(b"\xff\xfe\x00<", "text/html", "http://h/").links == ()
    assert tidy("a\u00a0 b \n\n c\ud800") == "a b\nc?"


def test_sandbox_survives_hang_and_death():
    with Sandbox(time_s=60) as sandbox:
        good = page(f"<main>{ARTICLE}</main>").encode()
        assert "Sentence 3 " in sandbox.extract(good, "text/html", "http://h/", True)["text"]
        for body in (good, good * 2_000):  # the second is more than a pipe takes
            os.kill(sandbox._child.pid, signal.SIGSTOP)  # it hangs
            sandbox.time_s = 0.3
            started = time.monotonic()
            with pytest.raises(Unextractable, match=r"more than 0\.3 s"):
                sandbox.extract(body, "text/html", "http://h/", True)
            assert time.monotonic() - started < 5
            sandbox.time_s = 60
            assert sandbox.extract(b"fine", "text/plain", "u", False)["text"] == "fine"
        sandbox._child.kill()
        sandbox._child.wait()
        assert sandbox.extract(b"fine", "text/plain", "u", False)["text"] == "fine"


def test_sandbox_says_how_the_child_died_and_replaces_it():
    with Sandbox(time_s=60) as sandbox:
        child = sandbox._running()
        os.kill(child.pid, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (child.pid, signal.SIGKILL)).start()
        with pytest.raises(Unextractable, match=r"died \(signal 9\)"):
            sandbox.extract(b"a", "text/plain", "u", False)
        assert sandbox.extract(b"fine", "text/plain", "u", False)["text"] == "fine"
        sandbox._pages = sandbox_module.PAGES_PER_CHILD
        old = sandbox._child.pid
        assert sandbox.extract(b"fine", "text/plain", "u", False)["text"] == "fine"
        assert sandbox._child.pid != old


def test_sandbox_limits_memory():
    nested = b"<div>" * 3_000_000
    with Sandbox(time_s=60, memory_bytes=24 << 20) as sandbox:
        with pytest.raises(Unextractable, match=r"Memory|died"):
            sandbox.extract(nested, "text/html", "http://h/", True)
        assert sandbox.extract(b"fine", "text/plain", "u", False)["text"] == "fine"


def test_sandbox_ends_with_its_parent():
    script = (
        "import os; from sabia.core.web.sandbox import Sandbox; box = Sandbox();"
        "box.extract(b'a', 'text/plain', 'u', False); print(box._child.pid, flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    for _ in range(100):
        if not os.path.exists(f"/proc/{int(said)}/cmdline"):
            return
        time.sleep(0.1)
    raise AssertionError("the child outlives its parent")


def shingles(text):
    words = re.findall(r"\w+", text)
    return Counter(tuple(words[i : i + 4]) for i in range(max(1, len(words) - 3)))


def test_f1_on_labelled_pages():
    """Macro precision and recall of word 4-grams, as article-extraction-benchmark counts them."""
    data = os.environ.get("SABIA_TEST_DATA")
    if not data:
        pytest.skip("SABIA_TEST_DATA is not set: no labelled pages")
    folder = Path(data) / "web" / "article-extraction"
    truth = json.loads((folder / "ground-truth.json").read_text())
    precision, recall = [], []
    for path in sorted((folder / "html").glob("*.html.gz")):
        wanted = shingles(truth[path.name.removesuffix(".html.gz")]["articleBody"])
        found = shingles(extract(gzip.decompress(path.read_bytes()), "text/html", "http://h/").text)
        common = sum((wanted & found).values())
        precision.append(common / max(1, sum(found.values())))
        recall.append(common / max(1, sum(wanted.values())))
    p, r = sum(precision) / len(precision), sum(recall) / len(recall)
    assert len(precision) >= 90
    assert 2 * p * r / (p + r) >= 0.95
