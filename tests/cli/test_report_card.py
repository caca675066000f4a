"""`sabia report --card`: figures of a pipeline counted again by plain loops; what is unknown."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file
from training_cases import ENVIRONMENT, Commands

from sabia.core.bench.score_rows import Score, schema, to_batches
from sabia.core.plan.compute import train_flops
from sabia.core.recipes.report import card_content
from sabia.core.recipes.report.card_content import content_of
from sabia.core.recipes.report.card_facts import Trained
from sabia.core.recipes.report.evaluation_results import read_results, section
from sabia.core.recipes.report.given_outputs import open_outputs
from sabia.core.recipes.report.training_summary import listed_domains
from sabia.core.shards.outputs import open_file

QUESTION = " ".join(f"question{n}" for n in range(40))
TASK = """name = "quiz"
kind = "exact_match"
data = "quiz.jsonl"
prompt = "{{ question }}"
answer = "answer"
"""
FEW = 12  # words of a document that is removed
SHAPE = ("--shape", "d=16,layers=1,heads=2", "--steps", "4", "--batch", "4")


def documents(count: int, seed: int) -> list[dict[str, Any]]:
    """Documents of many domains, with short texts, copies, and licences in two places."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        few = draw.random() < 0.2
        words = draw.integers(0, 900, draw.integers(1, FEW) if few else draw.integers(30, 90))
        text = f"Text {seed} {number}. " + " ".join(f"wörd{n}" for n in words)
        host = f"{'www.' if number % 2 else ''}Site{int(draw.zipf(1.6)) % 37}.example"
        meta = {"license": "cc0"} if number % 3 == 1 else {"title": "x"}
        row = {
            "text": text,
            "url": f"https://{host}:8080/{seed}/{number}",
            "source": f"s{number % 3}",
            "crawl_time": f"2025-0{1 + number % 9}-1{number % 10}T08:00:00+00:00",
            "license": ["cc-by", None, "mit"][number % 3],
            "meta": json.dumps(meta),
        }
        if number % 10 == 0:
            row |= {"url": None, "crawl_time": None}
        rows.append(row)
    planted = {"text": f"{QUESTION} {seed}", "url": "https://quiz.example/", "source": "s0"}
    unknown = {"crawl_time": None, "license": None, "meta": None}
    return [
        *rows,
        planted | unknown,
        *({**row, "url": "https://copies.example/"} for row in rows[:9]),
    ]


@pytest.fixture(scope="module")
def sabia(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory, sabia: Commands) -> Path:
    """A pipeline from documents to a fine-tuned model."""
    folder = tmp_path_factory.mktemp("made")
    for seed in range(2):
        lines = [json.dumps(row) + "\n" for row in documents(150, seed)]
        (folder / f"raw-{seed}.jsonl").write_text("".join(lines))
    (folder / "quiz.toml").write_text(TASK)
    (folder / "quiz.jsonl").write_text(json.dumps({"question": QUESTION, "answer": "7"}))
    chats = [
        {"messages": [{"role": role, "content": f"{role} {n}"} for role in ("user", "assistant")]}
        for n in range(9)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    calls = [
        f"classify raw-0.jsonl raw-1.jsonl --where word_count>{FEW + 3} --removed short -o long",
        "dedup long --method exact --removed copies.parquet -o unique",
        "dedup unique --decontaminate quiz.toml --removed dirty -o clean",
        "tokenize clean --train-tokenizer --vocab-size 300 --length 64 -o tokens",
        f"pretrain tokens {' '.join(SHAPE)} -o base",
        "sft chats.jsonl --model base/final --length 64 --lora-rank 2 --steps 3 --batch 2 -o tuned",
    ]
    for call in calls:
        done = sabia(*call.split(), folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


def card(sabia: Commands, folder: Path, *words: str) -> Any:
    done = sabia("report", "--card", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "--json" in words else done.stdout.decode()


def counted(rows: list[dict[str, Any]], name_of: Any) -> dict[str, list[int]]:
    """Documents and bytes by name."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        sums[name_of(row) or ""][0] += 1
        sums[name_of(row) or ""][1] += len(row["text"].encode())
    return dict(sums)


def host(row: dict[str, Any]) -> str:
    return (urlsplit(row["url"] or "").hostname or "").removeprefix("www.")


def test_figures_are_those_of_the_documents(made: Path, sabia: Commands) -> None:
    figures = card(sabia, made, "base", ".", "--json")
    raw = [row for seed in range(2) for row in documents(150, seed)]
    long = [row for row in raw if len(row["text"].split()) > FEW + 3]
    unique = list({row["text"]: row for row in reversed(long)}.values())  # the first of each text
    rows = [row for row in unique if QUESTION not in row["text"]]
    content = figures["content"]

    def shares(name: str) -> dict[str, list[int]]:
        return {key: [one["documents"], one["size"]] for key, one in content[name].items()}

    assert [content["total"]["documents"], content["total"]["size"]] == [
        len(rows), sum(len(row["text"].encode()) for row in rows)
    ]  # fmt: skip
    assert shares("domains") == counted(rows, host)
    assert len(content["domains"]) > 10
    assert shares("sources") == counted(rows, lambda row: row["source"])
    assert shares("licences") == counted(
        rows, lambda row: row["license"] or json.loads(row["meta"] or "{}").get("license")
    )
    times = sorted(row["crawl_time"][:10] for row in rows if row["crawl_time"])
    assert [content["first"][:10], content["last"][:10]] == [times[0], times[-1]]
    assert content["undated"] == sum(row["crawl_time"] is None for row in rows)
    classify, dedup, clean, tokenize = figures["stages"]
    assert classify["rows"]["rows_in"] == len(raw)
    assert classify["rows"]["removed"] == sum(classify["reasons"].values()) == len(raw) - len(long)
    assert dedup["rows"]["removed"] == sum(dedup["reasons"].values()) == len(long) - len(unique)
    assert clean["rows"]["removed"] == len(unique) - len(rows) == 2
    assert clean["reasons"] == {"contaminated: quiz/0": 2}
    assert tokenize["command"] == "tokenize" and tokenize["reasons"] is None
    lengths = pq.read_table(made / "tokens", columns=["document_lengths"])["document_lengths"]
    assert figures["tokens_of_documents"] == sum(map(sum, lengths.to_pylist()))
    given = {Path(one["path"]).name for one in figures["given"]}
    assert given == {"raw-0.jsonl", "raw-1.jsonl"} and not figures["missing"]


def test_compute_is_that_of_all_runs(made: Path, sabia: Commands) -> None:
    figures = card(sabia, made, "tuned", ".", "--json")
    base, tuned = figures["runs"]
    parameters = sum(one.size for one in load_file(made / "base/final/model.safetensors").values())
    assert base["parameters"] == base["active"] == parameters
    assert base["tokens"] == json.loads((made / "base/run.json").read_text())["tokens"]
    assert (
        base["flops"] == 6 * parameters * base["tokens"] == train_flops(parameters, base["tokens"])
    )
    assert tuned["flops"] == 4 * parameters * tuned["tokens"]
    assert figures["flops"] == base["flops"] + tuned["flops"]
    assert (base["device"], base["devices"], base["energy_kwh"]) == ("cpu", 1, None)
    assert figures["models"] == []
    assert "chats.jsonl" in {Path(one["path"]).name for one in figures["given"]}


def test_the_markdown_has_front_matter_and_both_documents(
    made: Path, sabia: Commands, tmp_path: Path
) -> None:
    text = card(sabia, made, "base", ".")
    done = sabia("report", "--card", "base", ".", "-o", tmp_path / "card.md", folder=made)
    assert done.returncode == 0 and (tmp_path / "card.md").read_text() == text
    hub = pytest.importorskip("huggingface_hub")
    data = hub.ModelCard(text).data
    assert data.library_name == "transformers" and "pretrain" in data.tags
    assert data.license is None and data.base_model is None
    titles = re.findall(r"^(?:## |### )(\d(?:\.\d)?)", text, re.MULTILINE)
    expected = "1 1.1 1.2 1.3 2 2.1 2.2 2.3 2.4 2.5 2.6 3 3.1 3.2 3.3"
    assert titles == expected.split()
    assert "\ndedup against quiz.toml: 2 documents removed.\n" in text
    assert "Crawlers of the provider were used: not recorded" in text
    figures = card(sabia, made, "base", ".", "--json")
    sizes = {name: one["size"] for name, one in figures["content"]["domains"].items() if name}
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    for share, words in ((0.1, ()), (0.05, ("--sme",))):
        count, text = math.ceil(share * len(order)), card(sabia, made, "base", ".", *words)
        section = text.partition("### 2.3")[2].partition("### 2.4")[0]
        assert re.findall(r"^\| (\S+\.example)", section, re.MULTILINE) == order[:count]


def test_results_and_contamination_are_those_of_the_score_rows(
    made: Path, sabia: Commands, tmp_path: Path
) -> None:
    rows = [
        Score("base", "quiz", str(n), 0, metric, value)
        for n in range(30)
        for metric, value in (("exact_match", float(n < 12)), ("min_k_nats", -n / 10))
    ]
    rows += [Score("base", "quiz", "30", 0, "no_answer", 1.0)]
    with open_file(str(tmp_path / "scores.parquet"), schema()) as writer:
        for batch in to_batches(rows):
            writer.write(batch)
    given = ("base", ".", "--scores", str(tmp_path / "scores.parquet"))
    evaluation = card(sabia, made, *given, "--json")["evaluation"]
    result = evaluation["results"][0]
    assert (result["task"], result["metric"], result["items"]) == ("quiz", "exact_match", 30)
    assert result["interval"]["value"] == 0.4
    text = card(sabia, made, *given).partition("## Evaluation")[2].partition("## Lim")[0]
    assert "| quiz | exact\\_match | 0.4 \\[0.2" in text and "| 30 | 1 | base |" in text
    assert "Min-K%" in text and "No item of these tasks was found in the documents" in text
    # documents that were marked and not removed
    marks = json.dumps([{"task": "quiz", "item": str(n), "level": "item"} for n in range(10)])
    pq.write_table(
        pa.table({"id": ["a"], "text": ["x"], "contamination": [marks]}), tmp_path / "d.parquet"
    )
    results = read_results([given[-1]], [str(tmp_path / "d.parquet")])
    (apart,) = results.parts
    assert (apart.inside[0], apart.inside[1].value) == (10, 1.0)
    assert (apart.outside[0], apart.outside[1].value) == (20, 0.1)
    assert results.figures[0].auc == 1.0
    shown = "\n".join(section(results))
    assert "| quiz | exact\\_match | 10 | 1 " in shown and "| 1.000 |" in shown
    done = sabia("report", "--card", *given[:-1], made / "tokens", folder=made)
    assert done.returncode != 0 and b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("count", "small", "listed"),
    [(0, False, 0), (1, False, 1), (101, False, 11), (101, True, 6), (50_000, True, 1_000)],
)
def test_the_number_of_listed_domains(count: int, small: bool, listed: int) -> None:
    assert listed_domains(count, small) == listed


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_documents_of_piped_stages_are_those_in_the_token_rows(
    made: Path, sabia: Commands, form: str
) -> None:
    """The output of classify is not kept; the rows that it removed do not count."""
    run = f"{sys.executable} -m sabia.cli.main"
    line = (
        f"{run} classify raw-0.jsonl raw-1.jsonl --where 'word_count>{FEW + 3}' --to {form} -q |"
        f"{run} tokenize - --tokenizer tokens/_tokenizer --length 64 -q -o piped-{form}"
    )
    subprocess.run(line, shell=True, check=True, cwd=made, env=ENVIRONMENT)
    done = sabia("pretrain", f"piped-{form}", *SHAPE, "-o", f"of-{form}", folder=made)
    assert done.returncode == 0, done.stderr
    figures = card(sabia, made, f"of-{form}", ".", "--json")
    assert figures["piped"] and [one["command"] for one in figures["stages"]] == [
        "classify", "tokenize"
    ]  # fmt: skip
    kept = {row["id"]: row for row in pq.read_table(made / "long").to_pylist()}
    given = [row for seed in range(2) for row in documents(150, seed)]
    assert len(kept) < len(given)
    long = [row for row in given if len(row["text"].split()) > FEW + 3]
    assert figures["content"]["total"]["documents"] == len(long)
    assert {name: one["documents"] for name, one in figures["content"]["domains"].items()} == {
        name: count for name, (count, _) in counted(long, host).items()
    }
    text = card(sabia, made, f"of-{form}", ".")
    assert "Later stages were joined by pipes" in text


def test_runs_without_records_have_cards_that_say_so(made: Path, tmp_path: Path) -> None:
    """As with SABIA_RUN_RECORD=0, and where the documents were deleted."""
    environment = os.environ | {"SABIA_RUN_RECORD": "0"}
    words = [sys.executable, "-m", "sabia.cli.main"]
    train = [*words, "pretrain", made / "tokens", *SHAPE, "-o", "run", "-q"]
    subprocess.run(train, check=True, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    show = [*words, "report", "--card", "run", "."]
    text = subprocess.run(show, check=True, cwd=tmp_path, capture_output=True, text=True).stdout
    for line in ("Documents: not recorded.", "Fetched: not recorded.", "- Size: not recorded",
                 "Domains: not recorded.", "### Domains\n\nnot recorded"):  # fmt: skip
        assert line in text, line


def test_deleted_documents_are_named(made: Path, sabia: Commands, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    shutil.rmtree(copy / "clean")
    text = card(sabia, copy, "base", ".")
    assert "Not there any more: clean." in text and "Documents: not recorded." in text
    assert "| dedup | " in text and "### Decontamination" in text


def test_energy_is_that_of_the_chips() -> None:
    """The H100 has 700 W in its data sheet; a chip of TPU v3 is two devices, without a power."""
    fields = {"path": "run", "command": "pretrain", "finished": True, "steps": 1, "tokens": 1,
              "sampled": 0, "parameters": 1, "active": 1, "config": {}, "options": {},
              "seconds": 7200.0, "devices": 16, "started": "", "ended": ""}  # fmt: skip
    assert Trained(**fields, device="NVIDIA H100 80GB HBM3").energy_kwh == pytest.approx(22.4)
    assert Trained(**fields, device="cpu").energy_kwh is None
    assert Trained(**fields, device="").energy_kwh is None


def test_sums_of_many_domains_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_content, "MERGED_ROWS", 100)
    draw = np.random.default_rng(1)
    rows = [
        {"text": "é" * n, "url": f"HTTP://user@{'WWW.' * (n % 2)}h{n % 977}.example:81?{n}"}
        for n in draw.integers(0, 5_000, 12_000).tolist()
    ]
    rows += [
        {"text": "none", "url": url} for url in ("relative/path", "", None, "mailto:a@b.example")
    ]
    rows += [{"text": "six", "url": "http://[::1]:8080/"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=500)
    content = content_of(open_outputs([str(tmp_path / "rows.parquet")])[0])
    expected = counted(rows, lambda row: {"::1": "[::1]"}.get(host(row), host(row)))
    assert {name: [one.documents, one.size] for name, one in content.domains.items()} == expected


def test_texts_of_models_and_found_items_are_counted(tmp_path: Path) -> None:
    names = (None, "writer", "other")
    rows = [
        {"text": "a" * n, "rewritten": n % 2 == 0, "rewrite_model": names[n % 3],
         "contamination": "[]" if n % 4 == 0 else None}
        for n in range(1, 60)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    content = content_of(open_outputs([str(tmp_path / "rows.parquet")])[0])
    of_models = [row for row in rows if row["rewritten"] and row["rewrite_model"]]
    assert {name: [one.documents, one.size] for name, one in content.synthetic.items()} == counted(
        of_models, lambda row: row["rewrite_model"]
    )
    assert content.contaminated == 14
