"""Options whose values are URLs: what is read is copied here, what is written is copied there."""

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from sabia.core import notes
from sabia.core.errors import Failed, Infeasible, Interrupted, UsageError
from sabia.core.options.dedup import DedupOptions
from sabia.core.options.eval import EvalOptions
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.shards.job import Job
from sabia.core.shards.stores import mirrors, objects

RUN = "memory://bucket/run"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()
    notes._named.clear()


def there(url: str = "memory://bucket") -> dict[str, bytes]:
    return {name: objects.read_object(f"{url}/{name}") for name in objects.objects_below(url)}


def test_what_is_written_is_uploaded_at_the_end() -> None:
    with mirrors.spool(RUN, "-o") as local:
        Path(local, "final").mkdir(parents=True)
        Path(local, "final", "config.json").write_text("{}")
        Path(local, "checkpoints", "step-1").mkdir(parents=True)
        Path(local, "checkpoints", "step-1", "state").write_text("large")
        assert not there()
    assert there() == {"run/final/config.json": b"{}"}
    assert not Path(local).exists()
    with mirrors.spool(RUN, "-o") as local:
        assert Path(local, "final", "config.json").read_text() == "{}"
        Path(local, "final", "config.json").unlink()
        Path(local, "run.json").write_text("new")
    assert there() == {"run/run.json": b"new"}


def test_a_url_with_checkpoints_alone() -> None:
    objects.put(f"{RUN}/checkpoints/step-1/COMMITTED", b"x")
    with mirrors.spool(RUN, "-o") as local:
        assert not Path(local).exists()
        Path(local).mkdir()
    assert there() == {"run/checkpoints/step-1/COMMITTED": b"x"}


@pytest.mark.parametrize("error", [Interrupted("stop"), Infeasible("gate")])
def test_an_interrupted_call_uploads_what_it_has(error: Exception) -> None:
    with pytest.raises(type(error)), mirrors.spool(RUN, "-o") as local:
        Path(local).mkdir()
        Path(local, "metrics.jsonl").write_text("1\n")
        raise error
    assert there() == {"run/metrics.jsonl": b"1\n"}
    with mirrors.spool(RUN, "-o") as local:
        assert Path(local, "metrics.jsonl").read_text() == "1\n"


def test_a_call_that_fails_shows_nothing_and_its_files_are_kept_here() -> None:
    objects.put(f"{RUN}/a", b"old")
    with pytest.raises(ZeroDivisionError), mirrors.spool(RUN, "-o") as local:
        Path(local, "a").write_text("mine")
        Path(local, "b").write_text("new")
        raise ZeroDivisionError
    assert there() == {"run/a": b"old"}
    with mirrors.spool(RUN, "-o") as local:
        assert Path(local, "a").read_text() == "mine"
        assert Path(local, "b").read_text() == "new"
    assert there() == {"run/a": b"mine", "run/b": b"new"}


def test_what_changed_at_the_url_replaces_what_is_here() -> None:
    objects.put(f"{RUN}/a", b"old")
    with pytest.raises(ZeroDivisionError), mirrors.spool(RUN, "-o") as local:
        raise ZeroDivisionError
    objects.put(f"{RUN}/a", b"of another machine")
    with mirrors.spool(RUN, "-o") as local:
        assert Path(local, "a").read_bytes() == b"of another machine"


def test_one_file_and_those_beside_it() -> None:
    with mirrors.spool("memory://bucket/m/spam.bin", "-o") as local:
        Path(local).write_bytes(b"model")
        Path(f"{local}.json").write_bytes(b"report")
    assert there() == {"m/spam.bin": b"model", "m/spam.bin.json": b"report"}
    with mirrors.spool("memory://bucket/m/spam.bin", "-o") as local:
        assert Path(local).read_bytes() == b"model"


def test_two_calls_on_one_machine() -> None:
    with mirrors.spool(RUN, "-o"):
        with (
            pytest.raises(Failed, match="-o: another process of this machine writes to"),
            mirrors.spool(RUN, "-o"),
        ):
            pass
        with mirrors.spool(RUN, "--scratch", shared=True) as local:
            Path(local, "sketch").write_bytes(b"1")
    assert there() == {"run/sketch": b"1"}


def test_options_get_local_paths(tmp_path: Path, capsys) -> None:
    objects.put("memory://bucket/model/config.json", b"{}")
    options = PretrainOptions(
        inputs=("memory://bucket/tokens",), out=RUN, model="memory://bucket/model",
        validation="memory://bucket/held", tokenizer=f"file://{tmp_path}/a%20b",
    )  # fmt: skip
    job = Job("pretrain", inputs=options.inputs, out=options.out, options=options.recorded())
    with mirrors.local_paths(job, options) as (local, used):
        assert json.loads(Path(used.model, "config.json").read_text()) == {}
        assert used.tokenizer == f"{tmp_path}/a b"
        assert used.validation == "memory://bucket/held"
        assert local.inputs == ("memory://bucket/tokens",)
        assert used.checkpoint_url == f"{RUN}/checkpoints"
        assert local.out == used.out
        assert Path(str(local.out)).name == "run"
        notes.say(f"{local.out}/final of {used.model}")
    assert capsys.readouterr().err.endswith(f": {RUN}/final of memory://bucket/model\n")
    assert options.model == "memory://bucket/model"


def test_rows_are_written_at_their_url_and_scratch_is_copied() -> None:
    options = DedupOptions(out="memory://bucket/o", scratch="memory://bucket/s")
    job = Job("dedup", out=options.out, scratch=options.scratch)
    with mirrors.local_paths(job, options) as (local, used):
        assert local.out == "memory://bucket/o"
        assert local.scratch == used.scratch
        Path(used.scratch).mkdir()
        Path(used.scratch, "x").write_text("1")
    assert there() == {"s/x": b"1"}


def test_several_values_with_labels_and_servers(tmp_path: Path) -> None:
    objects.put("memory://bucket/m/config.json", b"{}")
    given = ("a=memory://bucket/m", "b=http://host:1/v1#m", "here")
    options = EvalOptions(model=given, task=("t.toml",), inputs=())
    with mirrors.local_paths(Job("eval"), options) as (_, used):
        assert used.model[1:] == given[1:]
        assert used.model[0].startswith(f"a={tmp_path}/cache/sabia/objects/")


def test_what_cannot_be_at_a_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = PretrainOptions(row_cache="memory://bucket/rows", model="m", inputs=("x",), out="o")
    with (
        pytest.raises(UsageError, match=r"--row-cache: memory://bucket/rows .expected a local"),
        mirrors.local_paths(Job("pretrain", out="o"), options),
    ):
        pass
    options = PretrainOptions(model="memory://bucket/none", inputs=("x",), out="o")
    with (
        pytest.raises(UsageError, match="--model: memory://bucket/none: no such object"),
        mirrors.local_paths(Job("pretrain", out="o"), options),
    ):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = PretrainOptions(model="m", inputs=("x",), out=RUN)
    with mirrors.local_paths(Job("pretrain", out=RUN), options) as (local, _):
        assert local.out == RUN  # which the run refuses
