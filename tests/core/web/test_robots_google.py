"""Our rules beside Google's: the assertions of its parser's own test file, where one is given.

SABIA_ROBOTS_TEST is the path of `robots_test.cc` of google/robotstxt. Of its assertions those
are read whose file, agent and URL are string literals, or names of strings that are never changed.
"""

import os
import re
from pathlib import Path

import pytest

from sabia.core.web.robots import RobotsFile, Rules

LITERALS = r'(?:"(?:[^"\\]|\\.)*"\s*)+'
TOKENS = re.compile(
    r"^TEST\((?P<test>\w+, \w+)\)"
    rf"|(?:string_view|string)\s+(?P<name>\w+)\s*=\s*(?P<value>{LITERALS});"
    r"|StrAppend\(&(?P<changed>\w+)"
    r"|EXPECT_(?P<wanted>TRUE|FALSE)\(\s*IsUserAgentAllowed\("
    rf"\s*(?P<file>\w+|{LITERALS})\s*,\s*(?P<agent>{LITERALS})\s*,"
    rf"\s*(?P<url>\w+|{LITERALS})\s*\)\)",
    re.MULTILINE,
)


def literal(written):
    parts = re.findall(r'"((?:[^"\\]|\\.)*)"', written)
    return "".join(parts).encode().decode("unicode_escape").encode("latin-1").decode("utf-8")


def assertions(source):
    """(robots.txt, agent, URL, allowed) of each assertion that is literal."""
    names = {}
    for found in TOKENS.finditer(source):
        if found["name"]:
            names[found["name"]] = literal(found["value"])
        elif found["changed"]:
            names.pop(found["changed"], None)
        elif found["wanted"]:
            said = [
                literal(part) if part.startswith('"') else names.get(part)
                for part in (found["file"], found["agent"], found["url"])
            ]
            if None not in said:
                yield (*said, found["wanted"] == "TRUE")


def test_assertions_are_read():
    source = (
        'TEST(A, B) {\n  const absl::string_view robotstxt =\n      "user-agent: X\\n"\n'
        '      "disallow: /\\n";\n  EXPECT_FALSE(\n      IsUserAgentAllowed(robotstxt, "X",\n'
        '      "http://h/"));\n  EXPECT_TRUE(IsUserAgentAllowed("", "X", ""));\n'
        '  absl::StrAppend(&robotstxt, "a");\n'
        '  EXPECT_TRUE(IsUserAgentAllowed(robotstxt, "X", ""));\n}\n'
    )
    assert list(assertions(source)) == [
        ("user-agent: X\ndisallow: /\n", "X", "http://h/", False),
        ("", "X", "", True),
    ]


def test_google_agrees():
    path = os.environ.get("SABIA_ROBOTS_TEST")
    if not path:
        pytest.skip("SABIA_ROBOTS_TEST is not set: no robots_test.cc")
    found = list(assertions(Path(path).read_text("utf-8")))
    assert len(found) >= 140
    for text, agent, url, wanted in found:
        kept = RobotsFile(text.encode().decode("latin-1"))
        assert Rules(kept, agent).allowed(url) is wanted, (text, agent, url, wanted)
    print(f"{len(found)} of {len(found)} assertions hold")
