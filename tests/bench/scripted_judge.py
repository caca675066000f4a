"""A judge that costs nothing: an OpenAI-compatible server whose replies follow from the request.

    python tests/bench/scripted_judge.py --port-file FILE [--replay OAB_BENCH]

Asked for verdicts on rubric items, it calls an item met when the response holds at least half of
the item's words of five letters and more. Asked for points by a key, it repeats the published
judgment of that very answer (--replay), else it gives the same share of the key's words in points.
It measures nothing but that the way from answers to figures works.
"""

import argparse
import json
import re
import socket
import unicodedata
from collections import defaultdict
from pathlib import Path
from typing import Any

import oab_rows
from aiohttp import web

ENOUGH = 0.5


def words(text: str) -> set[str]:
    """Words of five letters and more, without case and accents."""
    plain = unicodedata.normalize("NFD", text.casefold())
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    return {word for word in re.findall(r"[^\W\d_]+", plain) if len(word) >= 5}


def overlap(wanted: str, text: str) -> float:
    """The share of the wanted words that the text holds; 0 where none are wanted."""
    needed = words(wanted)
    return len(needed & words(text)) / len(needed) if needed else 0.0


def part(text: str, name: str) -> str:
    """What stands between the tags of a name, whose opening may carry a mark: <answer-1f…>."""
    found = re.search(rf"<({name}(?:-[0-9a-f]+)?)>\n(.*)\n</\1>", text, re.DOTALL)
    return found[2] if found else ""


def folded(text: str) -> str:
    """White space aside, as texts are compared."""
    return " ".join(text.split())


def verdicts(text: str) -> str:
    """Verdicts on the items of a request."""
    response, found = part(text, "response"), []
    for name, wanted in re.findall(r'(?m)^- item ("(?:[^"\\]|\\.)*"): (.*)$', text):
        share = overlap(wanted, response)
        found.append({"item": json.loads(name), "evidence": f"{100 * share:.0f} % of the words",
                      "met": share >= ENOUGH})  # fmt: skip
    return json.dumps({"verdicts": found})


def points(text: str, published: dict[str, list[str]]) -> str:
    """Points for an answer: a published judgment of it, or the share of the key's words."""
    answer = part(text, "answer")
    if known := published.get(folded(answer)):
        return known[0] if len(known) == 1 else _nearest(known, part(text, "question"))
    maximum = float(re.findall(r"worth ([\d.]+) points", text)[-1])
    return f"Words of the key: [[{round(overlap(part(text, 'key'), answer) * maximum, 2):.2f}]]"


def _nearest(known: list[str], question: str) -> str:
    """Of judgments of equal answers, the one that speaks most of the question's words."""
    return max(known, key=lambda judgment: overlap(question, judgment))


def read_judgments(bench: Path) -> dict[str, list[str]]:
    """Published judgments of OAB-bench by the answer that each is about."""
    said = {
        (row["model"], f"{row['question_id']}/{row['turn']}"): row["judgment"]
        for path in sorted((bench / "model_judgment").glob("*.jsonl"))
        for row in oab_rows.read(path)
    }
    found = defaultdict[str, list[str]](list)
    for model in {model for model, _ in said}:
        for row in oab_rows.answers(bench, bench / "model_answer" / f"{model}.jsonl"):
            if judgment := said.get((model, row["id"])):
                found[folded(row["response"])].append(judgment)
    return dict(found)


async def _chat(request: web.Request) -> web.Response:
    body = await request.json()
    text = "\n\n".join(message["content"] for message in body["messages"])
    said = points(text, request.app[PUBLISHED]) if "</key>" in text else verdicts(text)
    message: dict[str, Any] = {"role": "assistant", "content": said}
    usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(said.split())}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return web.json_response({"model": "scripted", "choices": [choice], "usage": usage})


PUBLISHED = web.AppKey("published", dict)


def main() -> None:
    """Serve until killed; the port is written to --port-file once it listens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--replay", type=Path)
    given = parser.parse_args()
    app = web.Application(client_max_size=64 << 20)
    app[PUBLISHED] = read_judgments(given.replay) if given.replay else {}
    app.router.add_post("/v1/chat/completions", _chat)

    async def tell(_: web.Application) -> None:
        given.port_file.write_text(str(sock.getsockname()[1]))

    sock = socket.create_server(("127.0.0.1", 0))
    app.on_startup.append(tell)
    web.run_app(app, sock=sock, print=None)


if __name__ == "__main__":
    main()
