"""Outputs, run directories and checkpoints of every release are read, resumed and known as done.

`make.py` makes the folder of a release, which then stays as it is. A column that a later version
names otherwise on purpose belongs in RENAMED.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from release_reading import KINDS, MODELS, figures, read_model, read_rows
from training_cases import Commands

from sabia.core.results import RESULTS
from sabia.core.shards.lineage.graph import read_graph

RELEASES = sorted(
    path for path in Path(__file__).parent.iterdir() if (path / "calls.json").exists()
)
RENAMED: dict[str, str] = {}  # column of an earlier release → its name now
MOST_FILE = 500_000
DATA = (".parquet", ".arrow", ".safetensors", ".jsonl")


@pytest.fixture(scope="module")
def sabia(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="module", params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a release, whose commands were called in its directory."""
    return Path(shutil.copytree(request.param, tmp_path_factory.mktemp("release") / "copy"))


@pytest.fixture
def calls(release: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.chdir(release)
    return json.loads(Path("calls.json").read_text())


@pytest.fixture
def expected(calls: list[dict[str, Any]]) -> dict[str, Any]:
    return json.loads(Path("expected.json").read_text())


def test_there_is_a_release_and_its_files_are_small() -> None:
    assert RELEASES
    files = [path for folder in RELEASES for path in folder.rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in files) <= MOST_FILE


@pytest.mark.parametrize("path", KINDS)
def test_rows_are_those_of_the_release(path: str, expected: dict[str, Any]) -> None:
    before, now = expected["rows"][path], read_rows(path)
    assert now["rows"] == before["rows"] > 0
    for name in before["columns"]:
        new = RENAMED.get(name, name)
        assert now["columns"].get(new) == before["columns"][name], name
        assert new in now["known"] or name not in before["known"], f"{name} is no known column"


@pytest.mark.parametrize("path", MODELS)
def test_models_and_adapters_are_those_of_the_release(path: str, expected: dict[str, Any]) -> None:
    assert read_model(path) == expected["models"][path]


def times(*paths: str) -> dict[str, int]:
    """When each file with rows or weights was written."""
    files = [one for path in paths for one in (Path(path), *Path(path).rglob("*"))]
    return {str(path): path.stat().st_mtime_ns for path in files if path.suffix in DATA}


def test_outputs_of_current_results_are_done(
    release: Path, calls: list[dict[str, Any]], sabia: Commands
) -> None:
    """The calls of the release again, but for the crawl of a site that is not there any more."""
    again = [call for call in calls if not call["stops"] and call["result"] ==
             RESULTS[call["words"][0]] and call["words"][1] != "seeds.txt"]  # fmt: skip
    before = times(*(call["out"] for call in again))
    for call in again:
        done = sabia(*call["words"], folder=release)
        assert done.returncode == 0, done.stderr
    assert before and times(*(call["out"] for call in again)) == before


def test_a_crawl_goes_on_from_its_state(
    release: Path, calls: list[dict[str, Any]], expected: dict[str, Any], sabia: Commands
) -> None:
    """Its budget is spent, so nothing is fetched."""
    crawl = next(call for call in calls if call["words"][1] == "seeds.txt")
    shutil.rmtree(crawl["out"])
    done = sabia(*crawl["words"], folder=release)
    assert done.returncode == 0, done.stderr
    before, now = expected["rows"][crawl["out"]], read_rows(crawl["out"])
    assert now["rows"] == before["rows"]
    if crawl["result"] == RESULTS["crawl"]:
        assert now == before


def test_runs_resume_from_their_checkpoints(
    release: Path, calls: list[dict[str, Any]], expected: dict[str, Any], sabia: Commands
) -> None:
    stopped = [call for call in calls if call["stops"]]
    assert {call["words"][0] for call in stopped} == {"pretrain", "sft", "grpo"}
    for call in stopped:
        done = sabia(*call["words"], folder=release)
        assert done.returncode == 0, done.stderr
        assert b"resuming at step" in done.stderr
        made, whole = figures(Path(call["out"])), expected["resumed"][call["out"]]
        assert list(made) == list(whole)
        if call["result"] == RESULTS[call["words"][0]]:
            for step, one in whole.items():
                assert made[step] == pytest.approx(one, rel=1e-4, abs=1e-6), (call["out"], step)


@pytest.mark.parametrize(
    ("run", "given"),
    [("base", "rewritten"), ("adapted", "chats.jsonl"), ("rollouts", "prompts.jsonl")],
)
def test_a_token_of_a_run_is_found(
    run: str, given: str, calls: list[dict[str, Any]], sabia: Commands
) -> None:
    """In its row, document and text, from the records of a run and its checkpoint."""
    paths = (".", given) if given.endswith(".jsonl") else (".",)
    done = sabia("report", "--token", f"{run}:2:1:1", *paths, "--json", folder=Path.cwd())
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    found = answer if run == "rollouts" else answer["document"]
    assert given in {stage["output"] for stage in found["stages"]}
    assert run == "rollouts" or found["text_of"]


def test_the_card_of_a_run_is_filled(calls: list[dict[str, Any]], sabia: Commands) -> None:
    done = sabia("report", "--card", "rollouts", ".", "--json", folder=Path.cwd())
    assert done.returncode == 0, done.stderr
    card = json.loads(done.stdout)
    assert [Path(run["path"]).name for run in card["runs"]] == ["base", "adapted", "rollouts"]
    assert card["content"]["total"]["documents"] == read_rows("rewritten")["rows"]
    assert all(stage["rows"] for stage in card["stages"]) and card["tokens_of_documents"] > 0


def test_the_graph_of_a_release_is_whole(calls: list[dict[str, Any]]) -> None:
    """Each output names what it was made from, also where the release has been moved."""
    graph = read_graph(["."])
    here = {str(Path(path).relative_to(Path.cwd())): node for path, node in graph.items()}
    assert {call["out"] for call in calls} <= here.keys()
    names = {Path(source).name for source in here["tokens"].sources}
    assert names == {"rewritten"}
