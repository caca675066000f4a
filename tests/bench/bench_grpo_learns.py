"""grpo on two tasks: reward of the first step and of the last ten, and CPU time, by seed.

    OMP_NUM_THREADS=1 python tests/bench/bench_grpo_learns.py QUICKSTART [--seeds 0,1,2]
        [--cases sums,reversed,rank-8,judge,jax,served] [--work DIR]

QUICKSTART is the folder of a finished `examples/quickstart.sh`: its model before and after `sft`,
and its prompts. `reversed` is another task, for the model before sft: four digits are written
backwards, learnt from demonstrations of which 65 % have a wrong digit. rank-8, judge, jax and
served are the sums again: adapters of rank 8; right answers told by a judge behind a server that
fails a tenth of its calls; --backend jax; samples from `sabia serve`. CPU time is that of grpo
and, for `served`, of the server.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from sabia.core.train.telemetry import metrics_path, read_rows

SABIA = [sys.executable, "-m", "sabia.cli.main"]
GRPO = "--steps 80 --prompts 32 --group 16 --lr 2e-4 --schedule wsd --decay 30 --max-new-tokens 8"
SFT = "--no-pack --batch 32 --steps 1400 --lr 8e-4"
CORRUPT, DEMONSTRATIONS, LAST = 0.65, 32_000, 10
FAILING = 0.1  # of the judge's calls


def spent() -> float:
    """CPU seconds of the processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def sabia(*words: object) -> None:
    """Run a command without its output."""
    subprocess.run([*SABIA, *map(str, words)], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)  # fmt: skip


class Judge(BaseHTTPRequestHandler):
    """A response is right if it is the number that its item names."""

    draw = random.Random(0)

    def do_POST(self) -> None:
        """A reply, or status 500."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = "\n".join(turn["content"] for turn in asked["messages"])
        given = re.search(r"<response-[^>]*>\n(.*?)\n</response-", text, re.DOTALL)
        wanted = re.search(r"the answer is (\d+)", text)
        met = bool(given and wanted and given[1].strip() == wanted[1])
        verdict = {"verdicts": [{"item": "right", "evidence": "", "met": met}]}
        message = {"role": "assistant", "content": json.dumps(verdict)}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        body = json.dumps({"choices": choices, "usage": usage}).encode()
        self.send_response(500 if self.draw.random() < FAILING else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def reversed_task(work: Path, base: Path) -> tuple[Path, Path]:
    """(model, prompts) of the second task."""
    draw = random.Random(7)
    numbers = [f"{n:04}" for n in range(10_000)]
    draw.shuffle(numbers)
    demos, prompts = [], []
    for number in (draw.choice(numbers[:8000]) for _ in range(DEMONSTRATIONS)):
        answer = [*number[::-1]]
        if draw.random() < CORRUPT:
            answer[draw.randrange(4)] = str(draw.randrange(10))
        turns = [("user", f"{number} back"), ("assistant", "".join(answer))]
        demos.append({"id": f"d{len(demos)}",
                      "messages": [{"role": r, "content": c} for r, c in turns]})  # fmt: skip
    for number in numbers[2000:]:
        turn = {"role": "user", "content": f"{number} back"}
        prompts.append({"id": number, "messages": [turn], "answer": number[::-1]})
    for name, rows in (("demos", demos), ("prompts", prompts)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sabia("sft", work / "demos.jsonl", "--model", base, *SFT.split(), "-o", work / "reversed-sft")
    return work / "reversed-sft/final", work / "prompts.jsonl"


def judged(work: Path, prompts: Path) -> Path:
    """The prompts with a rubric instead of an answer."""
    rows = pq.read_table(prompts).to_pylist()
    for row in rows:
        answer = row.pop("answer")
        row["rubric"] = [{"id": "right", "text": f"the answer is {answer}"}]
    path = work / "judged.jsonl"
    keys = ("id", "messages", "rubric")
    path.write_text("".join(json.dumps({k: row[k] for k in keys}) + "\n" for row in rows))
    return path


def served(work: Path, model: Path) -> tuple[subprocess.Popen[bytes], list[object]]:
    """A server of the model, and the options to sample from it."""
    updates, log = work / "updates", work / "serve.log"
    updates.mkdir(exist_ok=True)
    words = [*SABIA, "serve", "--model", str(model), "--port", "0", "--updates", str(updates)]
    with open(log, "wb") as err:
        server = subprocess.Popen(words, stderr=err)
    while not (found := re.search(r"http://\S+/v1", log.read_text())):
        if server.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.1)
    return server, ["--sampler-url", found[0], "--sampler-folder", updates]


def main() -> None:
    """Print a line per case and seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("quickstart", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--cases", default="sums,reversed,rank-8,judge,jax,served")
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=(judge := ThreadingHTTPServer(("127.0.0.1", 0), Judge)).serve_forever,
                     daemon=True).start()  # fmt: skip
    ours = given.quickstart / "sft/final", given.quickstart / "prompts.parquet"
    for case in given.cases.split(","):
        model, prompts = ours
        if case == "reversed":
            model, prompts = reversed_task(work, given.quickstart / "base/final")
        for seed in given.seeds.split(","):
            out, server = work / f"{case}-{seed}", None
            more: list[object] = {"rank-8": ["--lora-rank", 8, "--lr", "2e-3"],
                                  "jax": ["--backend", "jax"]}.get(case, [])  # fmt: skip
            if case == "judge":
                prompts = judged(work, ours[1])
                url = f"http://127.0.0.1:{judge.server_address[1]}/v1"
                more = ["--reward", "rubric", "--judge-url", url, "--judge-model", "judge",
                        "--judge-cache", work / f"calls-{seed}"]  # fmt: skip
            before = spent()
            if case == "served":
                server, more = served(work, model)
            sabia(
                "grpo", prompts, "--model", model, *GRPO.split(), "--seed", seed, *more, "-o", out
            )
            if server is not None:
                server.terminate()
                server.wait()
            rewards = [row["reward"] for row in read_rows(metrics_path(out))]
            first, last = rewards[0], float(np.mean(rewards[-LAST:]))
            print(f"{case}, seed {seed}: {first:.3f} in the first step, {last:.3f} in the last "
                  f"{LAST}, gain {last - first:.3f}, {spent() - before:.0f} CPU s",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
