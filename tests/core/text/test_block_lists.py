"""Lists of URLs and of words: every format, what blocks what, and what must not match."""

import gzip
from pathlib import Path

import pytest

from sabia.core.errors import UsageError
from sabia.core.text.classify import bad_words, blocklist

LINES = """# comment
! comment
[Adblock Plus 2.0]
blocked.com
*.danger.org
badsub.nice.com
0.0.0.0 tracker.net
127.0.0.1	hosts.example # why
||adserver.io^
||third.io^$third-party
@@||fine.io^
##.banner
http://www.site.com/bad/
site.net/page?x=1
not a domain
"""
URLS = {
    "https://blocked.com/some?with=stuff": True,
    "http://www.blocked.com": True,
    "https://hey.danger.org:8080/x": True,
    "https://user@danger.org/": True,
    "https://notdanger.org/": False,
    "https://nice.com/badsub.nice.com": False,
    "https://BadSub.Nice.Com./x": True,
    "https://a.b.c.badsub.nice.com": True,
    "https://tracker.net/": True,
    "https://hosts.example/": True,
    "https://x.adserver.io/a.js": True,
    "https://third.io": True,
    "https://fine.io": False,
    "https://site.com/bad/page.html": True,
    "https://site.com/bad": True,
    "https://site.com/badly": False,
    "https://site.com/": False,
    "https://site.net/page?x=1": True,
    "https://site.net/page?x=2": False,
    "": False,
    "not a url": False,
    "https://[::1]/": False,
    "https://xn--80ak6aa92e.com/%E2%82%AC": False,
}


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_every_format_blocks_what_it_names(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine{suffix}"
    path.write_bytes(gzip.compress(LINES.encode()) if suffix.endswith("gz") else LINES.encode())
    lists = blocklist.load((str(path),))
    got = dict(zip(URLS, lists.look_up(list(URLS)) >= 0, strict=True))
    assert got == URLS
    assert lists.look_up([None]).tolist() == [-1]
    assert lists.reasons(["http://blocked.com"]) == ["blocked url: mine"]


def test_directories_of_categories(tmp_path: Path) -> None:
    for category, name, line in (("adult", "domains", "x.com"), ("games", "urls", "y.com/play")):
        (tmp_path / category).mkdir()
        (tmp_path / category / name).write_text(line + "\n")
        (tmp_path / category / "usage").write_text("black\n")
    lists = blocklist.load((str(tmp_path),))
    reasons = lists.reasons(["http://a.x.com/", "https://y.com/play/1", "https://y.com/"])
    assert reasons == ["blocked url: adult", "blocked url: games", ""]
    assert blocklist.digest([str(tmp_path)]) != blocklist.digest([str(tmp_path / "adult")])


def test_many_entries_take_nine_bytes_each(tmp_path: Path) -> None:
    path = tmp_path / "many"
    path.write_text("\n".join(f"host{i}.example{i % 7}.com" for i in range(50_000)))
    lists = blocklist.load((str(path),))
    assert lists.hashes.nbytes + lists.category.nbytes == 9 * 50_000
    assert lists.look_up(
        ["http://host77.example0.com/", "http://host78.example0.com"]
    ).tolist() == [
        0,
        -1,
    ]


def test_lists_that_will_not_do(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for path in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(UsageError):
            blocklist.load((str(path),))
    with pytest.raises(UsageError):
        bad_words.load((str(tmp_path / "none"),))


@pytest.fixture
def words(tmp_path: Path) -> bad_words.BadWords:
    (tmp_path / "pt.txt").write_text("# lista\nbobão\nfilho do vento\n")
    (tmp_path / "zh.txt").write_text("坏话\n")
    (tmp_path / "all.txt").write_text("Darn\nsuffering succotash\n")
    return bad_words.load((str(tmp_path),))


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("DARN! darned, darn-it", "en", 2),
        ("Que BOBAO, filho  do\nvento.", "pt", 2),
        ("Que bobão", "en", 0),
        ("Suffering, succotash", "und", 1),
        ("这是坏话坏话", "zh", 2),
        ("", None, 0),
        ("darn", None, 1),
        ("ｄａｒｎ da\u0301rn", "en", 2),
    ],
)
def test_matches(words: bad_words.BadWords, text: str, language: str, expected: int) -> None:
    assert words.count(text, language)[0] == expected
    scores = bad_words.scan(words, [text], [language])
    assert scores["bad_words"][0] == expected and 0 <= scores["bad_word_share"][0] <= 1
