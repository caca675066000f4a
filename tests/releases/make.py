"""Make the fixtures of this release: what every later version must read, resume and know as done.

usage: python tests/releases/make.py [FOLDER]    (default: tests/releases/VERSION of the package)

A small crawl of a generated site goes through all stages to trained, quantized and evaluated
models; one run of each trainer is interrupted. `calls.json` lists the commands, with the versions
of their results, and `expected.json` what the readers and the resumed runs must give. Outputs of a
release are never made again: a version that reads them no longer, or that must give others, says so
in `tests/releases/test_releases.py`.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from interrupted import child  # noqa: E402
from release_reading import read_all  # noqa: E402

from sabia.core.results import RESULTS  # noqa: E402
from sabia.examples.little_web import build_site  # noqa: E402
from sabia.examples.little_web.records import demonstrations, exact_match_items, prompts  # noqa: E402
from sabia.examples.little_web.server import LittleWebServer  # noqa: E402

PAGES = 60
MOST_FILE, MOST_ALL = 500_000, 1_500_000
STEPS, STOPPED_AT = 6, 3
RUN = f"--steps {STEPS} --batch 4 --save-every 1 --keep-checkpoints 1"
ROLLOUTS = (
    f"--steps {STEPS} --save-every 1 --keep-checkpoints 1 --reward regex --prompts 2 --group 2 "
    "--max-new-tokens 3"
)
# the commands in order; runs whose directory begins with `stop-` are interrupted at STOPPED_AT
CALLS = [
    "crawl seeds.txt --contact me@example.org --allow-private --delay 0s --budget 14 --warc warc "
    "-o crawled",
    "crawl warc -o pages",
    "classify pages more.jsonl --where word_count>=40 --removed short.parquet -o scored",
    "dedup scored --removed copies -o unique",
    "rewrite unique -o rewritten",
    "tokenize rewritten --train-tokenizer --vocab-size 300 --length 64 -o tokens",
    "tokenize rewritten --tokenizer tokens/_tokenizer --length 64 --format arrow -o arrow",
    f"pretrain tokens --shape d=16,layers=1,heads=2 {RUN} -o base",
    f"pretrain arrow --shape d=16,layers=1,heads=2 {RUN} -o stop-pretrain",
    f"sft chats.jsonl --model base/final --length 64 --lora-rank 2 {RUN} -o adapted",
    f"sft chats.jsonl --model base/final --length 64 {RUN} -o stop-sft",
    f"grpo prompts.jsonl --model adapted/final {ROLLOUTS} -o rollouts",
    f"grpo prompts.jsonl --model adapted/final {ROLLOUTS} -o stop-grpo",
    "quantize chats.jsonl --model base/final --recipe w8 -o small",
    "eval --task sums.toml --model base=base/final -o scores.parquet",
]
TASK = """name = "sums"
kind = "exact_match"
data = "items.jsonl"
answer = "answer"
verifier = "exact"
max_new_tokens = 3
"""


def documents() -> Iterator[dict[str, str]]:
    """Documents with near duplicates, short texts and solved exercises."""
    for number in range(12):
        words = " ".join(f"word{number // 2} of line {line} and more" for line in range(12))
        solved = "Which number is it? The answer is 7. First take 3. Then add 4."
        text = "too short" if number % 5 == 4 else f"{words} {'again' * (number % 2)}.\n{solved}"
        yield {"text": text, "url": f"https://a.example/{number}", "source": "more"}


def write_inputs() -> None:
    """The records that no stage makes."""
    records = {"more": documents(), "chats": demonstrations(12, 0.2, 0),
               "prompts": prompts(6, 0), "items": exact_match_items(6)}  # fmt: skip
    for name, rows in records.items():
        lines = [json.dumps(row) + "\n" for row in rows]
        if name == "chats":
            lines.append(
                '{"id": "unanswered", "messages": [{"role": "user", "content": "1+1="}]}\n'
            )
        if name == "prompts":
            lines = [json.dumps(json.loads(one) | {"answer": "[0-9a-z]"}) + "\n" for one in lines]
        Path(f"{name}.jsonl").write_text("".join(lines))
    Path("sums.toml").write_text(TASK)


def run(words: list[str], stops: bool) -> None:
    """A command in a child process; it ends, or is interrupted with its state saved."""
    at = ("step", STOPPED_AT, "SIGTERM") if stops else None
    request = {"words": words, "at": at, "reads": "", "limit": 0, "folder": ".",
               "out": "../out", "err": "../err"}  # fmt: skip
    process = os.fork()
    if not process:
        child(request)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code != (75 if stops else 0):
        sys.exit(f"sabia {' '.join(words)}: {code}\n{Path('../err').read_text()}")


def make() -> None:
    """All outputs in the current directory, and complete runs of the interrupted ones beside it."""
    write_inputs()
    server = LittleWebServer(build_site(PAGES, 0)).start()
    Path("seeds.txt").write_text(f"{server.base_url}/\n")
    calls = [
        {"words": words, "result": RESULTS[words[0]], "out": words[-1],
         "stops": words[-1].startswith("stop-")}
        for words in map(str.split, CALLS)
    ]  # fmt: skip
    for call in calls:
        run(call["words"], call["stops"])
        if call["stops"]:
            run([*call["words"][:-1], f"../{call['out']}"], False)
    server.shutdown()
    Path("calls.json").write_text(json.dumps(calls, indent=1) + "\n")
    Path("expected.json").write_text(json.dumps(read_all(calls), indent=1) + "\n")


def check_sizes(folder: Path) -> None:
    """Exit if a file, or all together, are larger than a repository should hold."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    large = [f"{path} {size:,}" for path, size in sizes.items() if size > MOST_FILE]
    total = sum(sizes.values())
    if large or total > MOST_ALL:
        sys.exit(f"{total:,} bytes, of at most {MOST_ALL:,}; too large: {large}")
    print(f"{folder}: {len(sizes)} files, {total:,} bytes")


def main() -> None:
    """Make the outputs in a temporary folder and move them into place."""
    target = Path(sys.argv[1] if sys.argv[1:] else ROOT / "tests" / "releases" / version("sabia"))
    if target.exists():
        sys.exit(f"{target} exists: the fixtures of a release do not change")
    socket.gethostname = lambda: "release"  # no name of this machine
    os.environ.pop("SABIA_RUN_RECORD", None)
    target = target.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "release"
        work.mkdir()
        os.chdir(work)
        make()
        check_sizes(work)
        os.chdir(ROOT)
        shutil.copytree(work, target)


if __name__ == "__main__":
    main()
