"""The graph of outputs, what is wrong in it, and the commands that make outputs again."""

import hashlib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sabia.core.digests import run_span, text_of_run
from sabia.core.file_hashes import content_hash
from sabia.core.results import RESULTS
from sabia.core.shards.job import Job
from sabia.core.shards.lineage import defects, graph_report, run_record
from sabia.core.shards.lineage.defects import Defect, diagnose, known_defects
from sabia.core.shards.lineage.graph import (
    Graph,
    commands_for,
    commands_to_rebuild,
    descendants,
    read_graph,
)
from sabia.core.shards.outputs import open_file
from tests.support.in_process import sabia

BIN = str(Path(sys.executable).parent)
LINES = (
    "sabia classify pages/ --quality --where 'word_count > 20' --removed short.parquet"
    " --stats classify.json -o good/ -q",
    "sabia dedup good/ --method exact --removed copies/ -o unique.parquet -q",
    "sabia classify unique.parquet --quality --to arrow -q |"
    " sabia rewrite -o rewritten.parquet --stats rewrite.json -q",
    "sabia tokenize rewritten.parquet --vocab-size 300 --length 64 --save-tokenizer tokenizer/ -q"
    " > tokens.parquet",
    "sabia tokenize rewritten.parquet --tokenizer tokenizer/ --length 32 --format arrow -o arrow/"
    " -q",
    "sabia rewrite unique.parquet -o rewritten.jsonl -q",
    "sabia classify train good/ --positive 'word_count > 30' -o long.bin -q",
    "sabia classify rewritten.parquet --model long.bin -o scored/ -q",
    "sabia classify lines.jsonl --quality -o lines.parquet -q",
)
EDGES = {
    "good": set(), "short.parquet": set(), "unique.parquet": {"good"}, "copies": {"good"},
    "rewritten.parquet": {"unique.parquet"}, "tokens.parquet": {"rewritten.parquet"},
    "arrow": {"rewritten.parquet", "tokens.parquet"}, "rewritten.jsonl": {"unique.parquet"},
    "long.bin": {"good"}, "scored": {"rewritten.parquet", "long.bin"},
    "lines.parquet": set(), "lines.rejects.parquet": set(),
}  # fmt: skip

PARTS = ("good/part-00001.parquet", "copies/part-00001.parquet", "arrow/data-00000.arrow",
         "classify.json", "rewrite.json", "tokenizer")  # fmt: skip


def run(line: str, folder: Path) -> None:
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    environment.pop("SABIA_RUN_RECORD", None)
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", line], cwd=folder, env=environment,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs of data stages, through files, directories and pipes."""
    folder, draw = tmp_path_factory.mktemp("lineage"), random.Random(3)
    (folder / "pages").mkdir()
    words = ["some", "words", "of", "a", "page", "that", "are", "drawn", "at", "random"]
    for shard in range(3):
        texts = [" ".join(draw.choices(words, k=draw.randrange(5, 80))) for _ in range(60)]
        pq.write_table(pa.table({"text": [*texts, texts[0]]}), folder / f"pages/{shard}.parquet")
    (folder / "lines.jsonl").write_text('{"text": "a line of text"}\nno JSON\n')
    for line in LINES:
        run(line, folder)
    return folder


@pytest.fixture
def tree(made: Path, tmp_path: Path) -> Path:
    """A copy of them in another place."""
    shutil.copytree(made, tmp_path / "moved" / made.name)
    return tmp_path / "moved" / made.name


@pytest.fixture
def kept(made: Path, tmp_path: Path) -> Iterator[Path]:
    """The outputs themselves, which are put back after the test."""
    shutil.copytree(made, tmp_path / "kept")
    yield made
    shutil.rmtree(made)
    shutil.copytree(tmp_path / "kept", made)


def graph_of(folder: Path) -> Graph:
    return read_graph([str(folder)])


def edges(graph: Graph, folder: Path) -> dict[str, set[str]]:
    return {os.path.relpath(path, folder): {os.path.relpath(one, folder) for one in node.sources}
            for path, node in graph.items()}  # fmt: skip


def rows(path: Path) -> str:
    """A hash of the rows of an output, or of the bytes of files that are not rows."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.name.startswith((".", "_manifest")) or file.is_dir():
            continue
        digest.update(file.name.encode())
        if file.suffix == ".parquet":
            digest.update(repr(pq.read_table(file).to_pylist()).encode())
        elif file.suffix == ".json":
            keys = ("rows", "rows_out", "labels", "fingerprint")  # of the last call are the others
            stored = json.loads(file.read_text())
            digest.update(repr([stored.get(key) for key in keys]).encode())
        else:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def all_rows(folder: Path) -> dict[str, str]:
    return {path.name: rows(path) for path in folder.iterdir() if not path.name.startswith(".")}


def test_all_edges(made: Path) -> None:
    graph = graph_of(made)
    assert edges(graph, made) == EDGES
    assert {node.state for node in graph.values()} == {"current"}, graph
    assert commands_to_rebuild(graph) == []
    inputs = {str(made / f"pages/{shard}.parquet") for shard in range(3)}
    assert graph[str(made / "good")].leaves == inputs


def test_a_tree_that_was_moved(tree: Path) -> None:
    graph = graph_of(tree)
    assert edges(graph, tree) == EDGES
    assert {node.state for node in graph.values()} == {"current"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EDGES, *PARTS])
def test_the_commands_restore_what_was_deleted(name: str, kept: Path) -> None:
    before, path = all_rows(kept), kept / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    commands = commands_to_rebuild(graph_of(kept))
    assert commands
    for line in commands:
        run(line, kept)
    assert all_rows(kept) == before
    graph = graph_of(kept)
    assert commands_to_rebuild(graph) == [], [(n.reasons, n.side) for n in graph.values()]


def test_a_changed_input_makes_what_came_of_it_stale(tree: Path) -> None:
    table = pq.read_table(tree / "pages/1.parquet")
    pq.write_table(table.slice(1), tree / "pages/1.parquet")
    graph = graph_of(tree)
    states = {os.path.relpath(path, tree): node.state for path, node in graph.items()}
    own = {"good", "short.parquet"}
    assert states.pop("lines.parquet") == states.pop("lines.rejects.parquet") == "current"
    assert all(state == ("stale" if name in own else "after") for name, state in states.items())
    assert "has changed" in graph[str(tree / "good")].reasons[0]


def test_a_run_whose_rows_changed_is_told_to_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose rows were deleted and made again is complete as it is."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 40), ("b", 60)):
        texts = [f"{number} and {number + 1} are numbers of a page" for number in range(count)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet")
    rows_of = "tokenize {}.parquet -o tokens/ --vocab-size 280 --length 32 -q"
    train = "pretrain tokens/ --shape d=16,layers=1,heads=2,ffn=32 --steps 2 --batch 2 -o run -q"
    monkeypatch.setenv("SABIA_RUN_RECORD", "1")
    for line in (rows_of.format("a"), train):
        assert sabia(*shlex.split(line)).exit_code == 0
    shutil.rmtree("tokens")
    assert not any("--force" in line for line in commands_to_rebuild(graph_of(tmp_path)))
    assert sabia(*shlex.split(rows_of.format("b"))).exit_code == 0
    (line,) = commands_to_rebuild(graph_of(tmp_path))
    assert line.startswith("sabia pretrain --force ")
    run(line, tmp_path)
    assert commands_to_rebuild(graph_of(tmp_path)) == []


def test_results_of_another_version_are_stale(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RESULTS, "rewrite", RESULTS["rewrite"] + 1)
    states = {os.path.relpath(p, tree): n.state for p, n in graph_of(tree).items()}
    assert {name for name, state in states.items() if state == "stale"} == {
        "rewritten.parquet", "rewritten.jsonl",
    }  # fmt: skip
    assert {name for name, state in states.items() if state == "after"} == {
        "tokens.parquet", "arrow", "scored",
    }  # fmt: skip


def test_defects_and_what_was_made_from_them(tree: Path) -> None:
    graph = graph_of(tree)

    def found(*defects_: Defect) -> dict[str, set[str]]:
        return {os.path.relpath(one.path, tree): {os.path.relpath(p, tree)
                                                  for p in one.made_from_it}
                for one in diagnose(graph, defects_)}  # fmt: skip

    assert found(Defect("dedup", (2,), "…")) == {}
    assert found(Defect("dedup", (1,), "…", {"method": "minhash"})) == {}
    later = {"rewritten.parquet", "rewritten.jsonl", "tokens.parquet", "arrow", "scored"}
    assert found(Defect("dedup", (1,), "…", {"method": "exact"})) == {
        "unique.parquet": later, "copies": set(),
    }  # fmt: skip
    # a stage in a pipe: its rows are those of the output that the pipe ends in
    piped = found(Defect("classify", (1,), "…", {"where": ""}))
    lines = {"lines.parquet", "lines.rejects.parquet"}
    assert piped.keys() == {"rewritten.parquet", "scored"} | lines


def test_doctor(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_defects() is not None  # the package's file can be read
    done = sabia("doctor", tree)
    assert (done.exit_code, "none of which" in done.stdout) == (0, True)
    text = '[[defect]]\nstage = "dedup"\nresults = [1]\nwrong = "pages were lost"\n'
    monkeypatch.setattr(defects, "known_defects", lambda: known_defects(text))
    done = sabia("doctor", tree, "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 3
    assert {one["wrong"] for one in report["defects"]} == {"pages were lost"}
    assert len(report["defects"]) == 2 and len(report["commands"]) == 6
    assert "sabia dedup" in report["commands"][0]
    assert sabia("doctor", tree / "pages.nothing").exit_code == 2


def test_defective_outputs_are_made_again_and_no_others(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of doctor, after the number of the stage was raised."""
    graph = graph_of(tree)
    affected = [one.path for one in diagnose(graph, [Defect("tokenize", (1,), "…")])]
    lines = commands_for(graph, {*affected, *descendants(graph, affected)})
    assert len(lines) == 2 and all("sabia tokenize" in line for line in lines)
    assert {os.path.basename(path) for path in affected} == {"tokens.parquet", "arrow"}


@pytest.mark.slow
def test_ten_thousand_shards_are_judged_in_five_cpu_seconds(made: Path, tmp_path: Path) -> None:
    count = 10_000
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    manifest = json.loads((made / "good/_manifest.json").read_text())
    shards = []
    for number in range(count):
        shard = dict(manifest["shards"][number % 3], name=f"part-{number:05d}.parquet")
        content = shard["inputs"][0] | {"name": str(tmp_path / f"in/{number}.parquet")}
        os.link(made / f"good/part-0000{number % 3}.parquet", tmp_path / "out" / shard["name"])
        os.link(made / f"pages/{number % 3}.parquet", content["name"])
        shards.append(shard | {"inputs": [content]})
    manifest["shards"] = shards
    manifest.pop("xxh3")
    (tmp_path / "out/_manifest.json").write_text(json.dumps(manifest))
    started = time.process_time()
    graph = read_graph([str(tmp_path)])
    spent = time.process_time() - started
    node = graph[str(tmp_path / "out")]
    assert node.state == "current" and len(node.output.shards) == count and spent <= 5, spent
    os.unlink(tmp_path / "out/part-07000.parquet")
    pq.write_table(pq.read_table(made / "pages/0.parquet").slice(3), tmp_path / "in/new.parquet")
    os.replace(tmp_path / "in/new.parquet", tmp_path / "in/8000.parquet")
    node = read_graph([str(tmp_path)])[str(tmp_path / "out")]
    changed = f"{tmp_path / 'in/8000.parquet'} has changed"
    assert node.reasons == ["part-07000.parquet is missing", changed]


def test_metadata_at_the_end_gives_the_same_bytes(tmp_path: Path) -> None:
    """Rows from a stream, whose provenance is known at its end, and rows from a file."""
    schema = pa.schema([("a", pa.int64()), ("s", pa.struct([("x", pa.float64())]))])
    made, batch = {"command": "rewrite", "z": "é"}, {"a": 1, "s": {"x": 1.0}}
    for name, metadata in (("known.parquet", made), ("at_end.parquet", lambda _ended: made)):
        with open_file(str(tmp_path / name), schema, metadata) as writer:
            writer.write(pa.RecordBatch.from_pylist([batch], schema))
    known, at_end = ((tmp_path / name).read_bytes() for name in ("known.parquet", "at_end.parquet"))
    assert known == at_end


def test_the_record_does_not_count_for_hashes(tree: Path, tmp_path: Path) -> None:
    """Also not for files in which it begins or ends at the border of a block."""
    path = tree / "unique.parquet"
    with open(path, "rb") as file:
        start, end = run_span(file)
        record = json.loads(text_of_run(file))
    assert record["command"] == "dedup" and record["cpu_seconds"] > 0 and record["host"]
    assert record["rows"]["rows_in"] == record["rows"]["rows_out"] + record["rows"]["removed"]
    stored = path.read_bytes()
    bare, damaged = tmp_path / "bare.parquet", tmp_path / "damaged.parquet"
    bare.write_bytes(stored[:start] + stored[end:])
    damaged.write_bytes(stored[: start + 30] + b"?" + stored[start + 31 :])
    assert content_hash(str(bare)) == content_hash(str(damaged)) == content_hash(str(path))
    assert pq.read_table(bare).equals(pq.read_table(path))
    with open(damaged, "rb") as file:
        assert text_of_run(file) == ""


def test_the_report_shows_the_graph(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph_report.run(Job("report", (str(tree),)))
    text = capsys.readouterr().out
    assert f"{len(EDGES)} outputs, 0 to make again" in text and "make them again" not in text
    assert "183 in 143 out 40 removed, 3 shards" in text and "classify | rewrite ←" in text
    (tree / "unique.parquet").unlink()
    graph_report.run(Job("report", (str(tree),)))
    text = capsys.readouterr().out
    assert "missing: deleted" in text and f"{len(EDGES)} outputs, 1 to make again" in text
    assert "sabia dedup -o unique.parquet --method exact --removed copies/ good/" in text
    graph_report.run(Job("report", (str(tree),), json=True))
    report = json.loads(capsys.readouterr().out)
    states = {os.path.basename(one["path"]): one["state"] for one in report["outputs"]}
    assert states.pop("unique.parquet") == "missing" and set(states.values()) == {"current"}
    record = next(one["record"] for one in report["outputs"] if one["path"].endswith("jsonl"))
    for name in (
        "host",
        "start",
        "end",
        "cpu_seconds",
        "commit",
        "version",
        "options",
        "arguments",
    ):
        assert name in record, name


def test_report_without_a_question(tree: Path) -> None:
    done = sabia("report", tree)
    assert done.exit_code == 0 and f"{len(EDGES)} outputs, 0 to make again" in done.stdout
    assert sabia("report", tree / "nothing").exit_code == 2


def test_the_commit_is_that_of_the_source_tree() -> None:
    root = Path(__file__).parents[3]
    words = ["git", "-C", str(root), "rev-parse", "HEAD"]
    git = subprocess.run(words, capture_output=True, text=True, check=False)
    if git.returncode:
        pytest.skip("no git repository")
    run_record.package_commit.cache_clear()
    assert run_record.package_commit() == git.stdout.strip()
