"""The scanner: blocks and marks against the rules of browsers; linear time on hostile pages."""

import html
import random
import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from sabia.kernels.html.definitions import (
    COLUMNS,
    ELEMENT_COLUMNS,
    FLAG_NAMES,
    HINT_NAMES,
    MAX_BLOCKS,
    MAX_MARKS,
    TAG_NAMES,
)
from sabia.kernels.html.interface import scan as scan_page


def scan(source):
    return scan_page(np.frombuffer(source.encode(), np.uint8))


def lines(source):
    page = scan(source)
    raw = page.text.tobytes()
    return [raw[s:e].decode() for s, e in page.blocks[:, :2]]


def column(page, name):
    return page.blocks[:, COLUMNS.index(name)].tolist()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<p>a <b>b</b>c\n\t d<p>e", ["a bc d", "e"]),
        ("a<br>b<br/><br>c", ["a\nb\nc"]),
        ("<ul><li>a<li>b<ul><li>c</ul><li>d</ul>", ["a", "b", "c", "d"]),
        ("<table><tr><td>a<td>b<tr><th>c</table>", ["a", "b", "c"]),
        ("<script>if (a<b) '</p>'</script>x<style>y</style>", ["x"]),
        ("<script>never ended <p>x", []),
        ("a<!-- <p>no --> b<!-->c<!--->d<!-- e --!>f", ["a bcdf"]),
        ("1 < 2 <3 & x</ >y</>z<?php p ?>w", ["1 < 2 <3 & xyzw"]),
        ("<a title='>' href=x>in</a><p class=\"a>b\">c", ["in", "c"]),
        ("<p hidden>a</p><p style='display : none'>b</p><p aria-hidden=true>c</p>d", ["d"]),
        ("<noscript>a</noscript><select><option>b</select><svg><title>c</title></svg>d", ["d"]),
        ("a&nbsp;&#160;\u00a0b &amp; c", ["a b &amp; c"]),
        ("<pre>a\n  b\n\n c</pre>", ["a\n  b\n\n c"]),
        ("<p>a</div></span></p>b", ["a", "b"]),
        ("<table><tr><td>a</div>b</table></div>c", ["ab", "c"]),
        ("<h1>a<h2>b</h2>c", ["a", "b", "c"]),
        ("<TITLE>no</TITLE><BODY><P>a</P>", ["a"]),
        ("<p", []), ("<", ["<"]), ("</", ["</"]), ("<!", []), ("<!--", []), ("", []),
        ("<p a='", []), ("a<p b=\"c>d", ["a"]), ("<a href", []), ("&", ["&"]),
        ("x\u00e9\u3002", ["x\u00e9\u3002"]),
    ],
)  # fmt: skip
def test_blocks(source, expected):
    assert lines(source) == expected


def test_counts():
    page = scan("<p class=lead>The <a href=x>big Dog</a>, is 10. Ok!</p>")
    facts = {name: column(page, name)[0] for name in COLUMNS}
    assert (facts["bytes"], facts["words"], facts["link_bytes"], facts["links"]) == (23, 6, 8, 1)
    assert (facts["commas"], facts["sentences"], facts["digits"]) == (1, 2, 2)
    assert (facts["capitals"], facts["stop_words"]) == (3, 2)
    assert facts["own"] == 1 << HINT_NAMES.index("lead")
    assert facts["flags"] == 1 << FLAG_NAMES.index("paragraph")


@pytest.mark.parametrize(
    ("value", "hint", "has"),
    [("header", "advert", False), ("ad", "advert", True), ("top-ad-1", "advert", True),
     ("topAdBox", "advert", True), ("articleBody", "body", True),
     ("Related-Posts", "related", True), ("sharing", "social", True), ("load", "advert", False)],
)  # fmt: skip
def test_hints(value, hint, has):
    page = scan(f"<div id='{value}'><p>a")
    bit = HINT_NAMES.index(hint)
    assert bool(column(page, "ancestors")[0] >> bit & 1) is has
    assert bool(column(page, "parent")[0] >> bit & 1) is has


def test_elements_gather_what_is_below_them():
    prose = "A sentence, long enough to be counted as prose, is what this paragraph holds. "
    page = scan(f"<div><div><p>{prose}</div><p>{prose}<a href=x>link</a></div><p>x")
    table = {name: page.elements[:, i].tolist() for i, name in enumerate(ELEMENT_COLUMNS)}
    assert table["up"] == [0, 0, 1, 2, 1, 0]
    assert table["bytes"][1] == sum(column(page, "bytes")[:2]) == table["prose"][0]
    assert table["bytes"][0] - table["bytes"][1] == 1
    assert table["link_bytes"][:3] == [5, 5, 0]


class Plain(HTMLParser):
    """The standard library's reader, for pages whose tags are all closed."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.words = []

    def handle_data(self, data):
        self.words.append(data)

    def handle_starttag(self, tag, attrs):
        self.words.append(" " if tag in ("p", "div", "li", "ul", "td", "tr", "table", "br") else "")

    handle_endtag = lambda self, tag: self.handle_starttag(tag, [])  # noqa: E731


def test_words_are_those_of_the_standard_parser():
    random.seed(5)
    names = ["p", "div", "b", "span", "a", "ul", "i"]
    for _ in range(200):
        parts, opened = [], []
        for _ in range(random.randint(1, 60)):
            choice = random.random()
            if choice < 0.35:
                shut = {"p", "div", "ul"} if "p" in opened else set()
                shut |= {"a"} if "a" in opened else set()
                name = random.choice([n for n in names if n not in shut])
                parts.append(f"<{name} class='x{random.randint(0, 9)}' data-a=\"<>\">")
                opened.append(name)
            elif choice < 0.6 and opened:
                parts.append(f"</{opened.pop()}>")
            else:
                parts.append(random.choice(["word", " ", "two words ", "&lt;", "\n", "é", "<br>",
                                            "<!-- c -->", "日本", "5.", "&#233;"]))  # fmt: skip
        source = "".join(parts) + "".join(f"</{name}>" for name in reversed(opened))
        plain = Plain()
        plain.feed(source)
        plain.close()
        assert html.unescape(" ".join(lines(source))).split() == "".join(plain.words).split(), (
            source
        )


def seconds(source):
    data = np.frombuffer(source, np.uint8)
    scan_page(data)
    started = time.process_time()
    page = scan_page(data)
    return time.process_time() - started, page


@pytest.mark.parametrize(
    "unit",
    [b"<div>", b"<span>", b"</x>", b"</div>", b"<p><b>", b"<li>", b"<table><tr><td>", b"<a href=x>",
     b"<svg>", b"<!--", b"<", b"&", b"\0", b"<p class='article body'>t", b"<title>", b"</",
     b"<a b='", b"<option>x", b"<td colspan=99999>x", b"<span><p>", b"x<hr>", b"&#1;",
     b"<meta name=robots>", b"<script><!--", b"--", b"<div hidden>x", b"\xff\xfe", b"<dd><span>"],
    ids=repr,
)  # fmt: skip
def test_time_grows_no_faster_than_the_page(unit):
    small, large = (unit * (size // len(unit)) for size in (100_000, 800_000))
    least = min(seconds(small)[0] for _ in range(2))
    spent, page = seconds(large)
    assert spent < 20 * least + 0.1  # eight times the bytes
    assert len(page.blocks) <= MAX_BLOCKS
    assert len(page.marks) <= MAX_MARKS


def test_any_bytes_are_read():
    random.seed(7)
    words = b"< > / p div = ' a href !-- --> & ; script table td </ title br svg".split()
    pieces = [*words, b'"', b" ", b"\0", b"\xc3", b"\xa9"]
    for _ in range(2_000):
        source = b"".join(random.choices(pieces, k=random.randint(0, 60)))
        page = scan_page(np.frombuffer(source, np.uint8))
        spans = page.blocks[:, :2]
        assert (spans[:, 0] < spans[:, 1]).all() and (spans[1:, 0] >= spans[:-1, 1]).all()
        assert spans.max(initial=0) <= len(page.text) <= len(source) + 8
        assert page.marks[:, 1:7].max(initial=0) <= len(source) + 1
        known = re.sub(rb"\s", b"", source)
        assert all(byte in known + b" \n" for byte in page.text.tobytes())


def test_blocks_and_elements_say_where_they_are_in_the_source():
    rng = random.Random(3)
    tags = ("div", "p", "b", "ul", "li", "table", "tr", "td", "pre", "blockquote", "span")
    for _ in range(200):
        source = "".join(
            rng.choice((f"<{rng.choice(tags)}>", f"</{rng.choice(tags)}>", "a&amp;b ", "é<br>"))
            for _ in range(rng.randint(1, 60))
        )
        data, page = source.encode(), scan(source)
        raw = page.text.tobytes()
        names = ("start", "end", "source", "source_end")
        starts, ends, since, until = (column(page, name) for name in names)
        for start, end, first, last in zip(starts, ends, since, until, strict=True):
            inside = re.sub(rb"<br>|\s", b"", re.sub(rb"<(?!br)[^>]*>", b"", data[first:last]))
            assert inside == re.sub(rb"\s", b"", raw[start:end])
        assert since == sorted(since) and all(
            a <= b for a, b in zip(until, since[1:], strict=False)
        )
        up, tag, begin, stop = (page.elements[:, ELEMENT_COLUMNS.index(name)].tolist()
                                for name in ("up", "tag", "source", "source_end"))  # fmt: skip
        assert begin == sorted(begin) and stop[0] == len(data)
        for e in range(1, len(up)):
            assert data[begin[e] :].startswith(f"<{TAG_NAMES[tag[e] - 1]}>".encode())
            assert begin[up[e]] <= begin[e] < stop[e] <= stop[up[e]]
        for element, first, last in zip(column(page, "element"), since, until, strict=True):
            assert begin[element] <= first < last <= stop[element]
