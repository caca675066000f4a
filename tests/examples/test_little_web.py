"""The little web: determinism, promised proportions, held-out sums, the faults it serves."""

import http.client
import json
import re
import subprocess
import sys

import pytest
from waiting import HANG_S

from sabia.examples.little_web import build_site, records, sums
from sabia.examples.little_web.pages import render
from sabia.examples.little_web.server import LittleWebServer


def shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def jaccard(a: str, b: str) -> float:
    left, right = shingles(a), shingles(b)
    return len(left & right) / len(left | right)


@pytest.fixture(scope="module")
def site():
    return build_site(400, 0)


@pytest.fixture
def server(site):
    server = LittleWebServer(site).start()
    yield server
    server.shutdown()


def get(server: LittleWebServer, path: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=HANG_S)
    connection.request("GET", path)
    response = connection.getresponse()
    try:
        return response, response.read()
    except http.client.IncompleteRead as error:
        return response, error.partial
    finally:
        connection.close()


def test_same_seed_same_site_and_another_seed_another(site):
    again, other = build_site(400, 0), build_site(400, 1)
    assert [render(p) for p in again.pages.values()] == [render(p) for p in site.pages.values()]
    assert {p.text for p in other.pages.values() if p.kind == "prose"}.isdisjoint(
        p.text for p in site.pages.values()
    )


def test_site_has_every_kind_and_enough_text(site):
    kinds = [page.kind for page in site.pages.values()]
    for kind in ("exercise", "prose", "near-duplicate", "copy", "spam", "private", "broken"):
        assert kinds.count(kind) >= 8, kind
    assert abs(len(site.pages) - 400) <= 40
    size = sum(len(p.text.encode()) for p in site.pages.values() if p.relevant)
    assert 500_000 < size < 2_000_000


def test_duplicates_are_near_and_originals_are_far(site):
    pages = site.pages
    near = [p for p in pages.values() if p.kind == "near-duplicate"]
    similar = [jaccard(p.text, pages[p.duplicate_of].text) for p in near]
    assert min(similar) > 0.8
    assert max(similar) < 1
    for page in pages.values():
        if page.kind == "copy":
            assert page.text == pages[page.duplicate_of].text
    prose = [p for p in pages.values() if p.kind == "prose" and "/trem/" in p.path]
    assert max(jaccard(a.text, b.text) for a in prose for b in prose if a is not b) < 0.4


def test_no_static_link_is_dead(site):
    for page in site.pages.values():
        for target, _anchor in page.links:
            path = re.split(r"[?#]", target)[0]
            dynamic = path.startswith(("/calendar/", "/go/", "/offers/list", "http"))
            assert dynamic or path in site.pages, (page.path, target)


@pytest.mark.parametrize(
    ("a", "b", "units", "tens", "end"),
    [
        (37, 58, "7+8=15, write 5 and carry 1", "3+5+1=9, write 9 and carry 0", "hundreds: 0."),
        (99, 7, "9+7=16, write 6 and carry 1", "9+0+1=10, write 0 and carry 1", "hundreds: 1."),
    ],
)
def test_exercise_states_answer_then_correct_steps(a, b, units, tens, end):
    import random

    text = sums.worked_exercise(a, b, "en", random.Random(0))
    stated = text.index(sums.answer(a, b))
    assert stated < text.index(units) < text.index(tens) < text.index(end)


def test_number_words():
    assert sums.words(95, "en") == "ninety-five"
    assert sums.words(95, "pt") == "noventa e cinco"
    assert [sums.words(n, "pt") for n in (100, 116, 198)] == [
        "cem", "cento e dezesseis", "cento e noventa e oito",
    ]  # fmt: skip


def test_held_out_sums_appear_nowhere_else(site):
    hidden = {sums.expression(a, b) for a, b in sums.held_out_sums()}
    assert len(hidden) >= 2_500
    assert {f"{e[3:]}+{e[:2]}" for e in hidden} == hidden  # commuted sums are hidden too
    shown = set()
    for page in site.pages.values():
        shown |= set(re.findall(r"\d\d\+\d\d", page.text))
    for record in (*records.demonstrations(9_000, 0.6, 0), *records.prompts(9_000, 0)):
        shown.add(record["messages"][0]["content"].rstrip("="))
    assert len(shown) == 10_000 - len(hidden)
    assert shown.isdisjoint(hidden)
    items = list(records.exact_match_items())
    assert {item["messages"][0]["content"].rstrip("=") for item in items} == hidden


def test_corrupt_share_and_single_digit():
    rows = list(records.demonstrations(4_000, 0.6, 3))
    wrong = [r for r in rows if r["messages"][1]["content"] != r["meta"]["answer"]]
    assert 0.50 < len(wrong) / len(rows) < 0.58  # 0.6, of which a tenth hit the same digit
    for row in wrong:
        given, true = row["messages"][1]["content"], row["meta"]["answer"]
        assert sum(x != y for x, y in zip(given, true, strict=True)) == 1
    clean = records.demonstrations(500, 0.0, 3)
    assert all(r["messages"][1]["content"] == r["meta"]["answer"] for r in clean)


def test_multiple_choice_has_one_right_option():
    for item in records.multiple_choice_items(300):
        a, b = (int(part) for part in item["question"].rstrip("=").split("+"))
        assert len(set(item["choices"])) == 4
        assert item["choices"][item["answer"]] == f"{a + b:03d}"


def test_server_faults(server, site):
    first, _ = get(server, "/library/archive/throttled.html")
    second, body = get(server, "/library/archive/throttled.html")
    assert (first.status, first.getheader("Retry-After"), second.status) == (429, "1", 200)
    assert site.pages["/library/archive/throttled.html"].title.encode() in body
    cut, part = get(server, "/library/archive/truncated.html")
    assert len(part) < int(cut.getheader("Content-Length"))
    assert get(server, "/library/archive/status-500.html")[0].status == 500
    assert get(server, "/go/round")[0].getheader("Location") == "/go/and-round"
    assert b"Disallow: /private/" in get(server, "/robots.txt")[1]
    assert b"/calendar/2032/01" in get(server, "/calendar/2031/12")[1]
    assert b"page=20001" in get(server, "/offers/list?page=10000")[1]
    assert [status for _, path, status in server.requests if "throttled" in path] == [429, 200]


def test_command_writes_records_and_serves(tmp_path):
    names = {n: tmp_path / n for n in ("sft.jsonl", "p.parquet", "e.parquet", "t.jsonl", "port")}
    command = [
        sys.executable, "-m", "sabia.examples.little_web", "--pages", "80", "--n", "50",
        "--sft", names["sft.jsonl"], "--prompts", names["p.parquet"], "--eval", names["e.parquet"],
        "--truth", names["t.jsonl"], "--serve", "--port-file", names["port"],
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert "serving" in process.stderr.readline()
    process.terminate()
    assert process.wait(HANG_S) == 0
    import pyarrow.parquet as pq

    from sabia.core.shards import schemas

    assert pq.read_schema(names["p.parquet"]).equals(schemas.KINDS["prompt"])
    assert pq.read_metadata(names["e.parquet"]).num_rows == len(sums.held_out_sums())
    rows = [json.loads(line) for line in names["t.jsonl"].read_text().splitlines()]
    assert all(row["url"].startswith(f"http://127.0.0.1:{names['port'].read_text().strip()}/")
               for row in rows)  # fmt: skip
    assert len(names["sft.jsonl"].read_text().splitlines()) == 50
