"""Rows that trainers, eval and the planner write are data sets to every reader, too."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from readers import read_by_all

from sabia.core.bench.score_rows import schema as score_schema
from sabia.core.bench.score_rows import scores_of, to_batches
from sabia.core.generate.requests import Completion
from sabia.core.judge.verdict import Grade, Verdict
from sabia.core.recipes.grpo.sample_journal import Journal
from sabia.core.recipes.row_outputs import write_metric_rows
from sabia.core.shards.job import Job
from sabia.core.shards.outputs import open_output


def completion(step: int, sample: int) -> Completion:
    return Completion(f"{step}:a", sample, [1, 2, 3], "text", [-0.5] * 3, [-0.25] * 3, "stop")


def test_samples_are_a_data_set_also_while_a_step_is_sampled(tmp_path: Path) -> None:
    journals = [Journal(tmp_path / "samples", rank) for rank in range(3)]
    for step in (1, 2):
        grade = Grade(0.5 * step, (("r", Verdict.MET, 1.0),))
        for journal in journals:
            journal.add(step, completion(step, 0))
            journal.finish(step, 7, ["p"], [(completion(step, 0), grade)], [{}])
    for journal in journals:
        journal.add(3, completion(3, journal.rank))
        journal.close()
    assert len(read_by_all(tmp_path / "samples", tmp_path / "cache")) == 6
    assert set(Journal(tmp_path / "samples").sampled(3)) == {("3:a", n) for n in range(3)}


def test_finished_samples_of_an_earlier_version_are_found_and_cleared(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "samples")
    journal.add(1, completion(1, 0))
    journal.close()
    (now,) = (tmp_path / "samples").iterdir()
    former = tmp_path / "samples" / "step-00000001-0000.partial.jsonl"
    now.rename(former)
    assert set(journal.sampled(1)) == {("1:a", 0)}
    journal.finish(1, 7, ["p"], [(completion(1, 0), Grade(1.0, (("r", Verdict.MET, 1.0),)))], [{}])
    assert [path.name for path in (tmp_path / "samples").iterdir()] == [
        "step-00000001-0000.parquet"
    ]


@pytest.mark.parametrize("sources", [("web", "books"), ()])
def test_metrics_are_a_data_set(tmp_path: Path, capfdbinary, sources: tuple[str, ...]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    out.mkdir()
    rows = [{"step": step, "loss": 2.0} for step in range(1, 4)]
    for row, name in zip(rows, sources, strict=False):
        row["loss_by_source"] = {name: row["loss"]}
    rows[0]["mfu"] = 0.4  # an earlier version's, which had no gemm_share
    rows[1]["gemm_share"] = 0.7
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_metric_rows(Job("pretrain"), run)
    (out / "part-00000.parquet").write_bytes(capfdbinary.readouterr().out)
    found = read_by_all(out, tmp_path / "cache")
    assert [row["step"] for row in found] == [1, 2, 3]
    shares = [(row["mfu"], row["gemm_share"]) for row in found]
    assert shares == [(0.4, None), (None, 0.7), (None, None)]
    for row, name in zip(found, sources, strict=False):
        assert row["loss_by_source"] == {n: 2.0 if n == name else None for n in sorted(sources)}
    assert all(row["validation_by_source"] in (None, dict.fromkeys(sources)) for row in found)


def test_metrics_as_json_lines_are_rows_in_a_log_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    code = (
        "import sys; from pathlib import Path; from sabia.core.shards.job import Job;"
        "from sabia.core.recipes.row_outputs import write_metric_rows;"
        "write_metric_rows(Job('sft', to='jsonl'), Path(sys.argv[1]))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert json.loads(shown.stdout)["loss"] == 2.0


def test_scores_of_items_are_a_data_set(tmp_path: Path) -> None:
    rows = scores_of("m", "t", "i", 0, {"exact": 1.0, "f1": 0.5}, {"answer": "x"})
    with open_output(Job("eval", out=str(tmp_path / "out")), score_schema()) as writer:
        for batch in to_batches(rows):
            writer.write(batch)
    found = read_by_all(tmp_path / "out", tmp_path / "cache")
    assert [row["value"] for row in found] == [1.0, 0.5]
    assert pq.read_table(tmp_path / "out").num_rows == 2
