"""What an output tells about the run that made it: command line, inputs, host, times, rows.

Parquet files hold it as a text between the rows and the footer (`digests.text_of_run`), and Arrow
streams, without host and times, in the metadata of their schema. `_manifest.json` has it for all
shards of a directory. `.NAME.sabia.json` beside an output, which remains when that is deleted, has
the call that made it. It has no influence on rows, fingerprints or hashes of content. With
SABIA_RUN_RECORD=0 it is left out.

`call_of`: the command line that gives the options of a call again, and the files that its options
name. Options that only say how the result is computed (workers, slices, phases, messages) are left
out, and those of a configuration file or a variable are written out.

`identity_of`: what a file or directory contains, known without reading much of it. Two files with
equal identities have equal rows or weights: a Parquet file by its digests, a small file by its
bytes, a directory by the records of the run that made it or by its files. A file which is large and
has no digests is only known by its size.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import resource
import socket
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, BinaryIO

from sabia.core.errors import BadData
from sabia.core.options.option import FALSE, Option
from sabia.core.options.table import Options
from sabia.core.results import result_version
from sabia.core.shards.atomic import read_json, write_json
from sabia.core.shards.job import Job

HOW = {"jobs", "shard", "executor", "phase", "force", "dry_run", "json", "quiet", "debug", "config"}
# options that name files which a command writes besides its output
WRITTEN = {"removed", "stats", "report", "plot", "save_tokenizer", "replaced", "index", "warc"}
READ = {"focus", "lm", "decontaminate", "model"}  # besides those whose metavar names a file
OTHER_PLACES = {"out", "rejects", "state", "scratch", "cache", "row_cache", "judge_cache",
                "checkpoint_url"}  # fmt: skip


def call_of(options: Options) -> dict[str, object]:
    """arguments: words after the name of the command; folder: where it runs; reads, writes: files
    that options name, without the inputs and the output, as absolute paths; out: the absolute path
    of the output, '' for stdout."""
    given = {o.name: _texts(o, options) for o in options.table.values() if _is_given(o, options)}
    words = [word for name, texts in given.items() for word in _words(options.table[name], texts)]
    other = WRITTEN | OTHER_PLACES | {"inputs"}
    reads = {path for name, texts in given.items()
             if name not in other and may_be_file(options.table[name])
             for text in texts for path in _files(text)}  # fmt: skip
    writes = {text if "://" in text else os.path.abspath(text)
              for name, texts in given.items() if name in WRITTEN
              for text in texts if text != "-"}  # fmt: skip
    inputs, out = given.get("inputs", []), str(options.values().get("out") or "-")
    written = out if "://" in out else os.path.abspath(out)
    return {
        "arguments": [*words, *(["--"] if any(i.startswith("-") for i in inputs) else []), *inputs],
        "folder": os.getcwd(),
        "reads": sorted(reads),
        "writes": sorted(writes),
        "out": "" if out == "-" else written,
    }


def _is_given(option: Option, options: Options) -> bool:
    named = option.name in options.given or option.name in options.texts
    if option.name == "to" and options.values().get("out") not in (None, "-"):
        return False  # from a variable: the format of stdout
    return named and option.name not in HOW and getattr(options, option.name) not in (None, ())


def may_be_file(option: Option) -> bool:
    """Whether a value of an option may be the path of a file or directory that the call reads."""
    return option.name in READ or re.search("DIR|FILE|PATH", option.metavar) is not None


def _texts(option: Option, options: Options) -> list[str]:
    """The values of an option as they were given, else as texts."""
    value = options.texts.get(option.name, getattr(options, option.name))
    return [str(one) for one in (value if isinstance(value, list | tuple) else [value])]


def _words(option: Option, texts: list[str]) -> Iterator[str]:
    if option.positional:
        return
    flag = option.short if option.name == "out" else option.flag
    if option.kind == "flag":
        given = texts[-1].lower() not in FALSE
        if given or option.negative:
            yield flag if given else f"--no-{option.key}"
        return
    for text in texts:
        yield from (flag, text) if text and text[:1] != "-" else (f"{flag}={text}",)


def _files(text: str) -> Iterator[str]:
    """Absolute paths of files and directories that a value names: PATH, NAME=PATH, PATH,PATH."""
    for part in {text, text.partition("=")[2], *text.split(",")}:
        if part and "://" not in part and os.path.exists(part):
            yield os.path.abspath(part)
            if part.endswith(".toml"):
                yield from _named_in(Path(part))


def _named_in(path: Path) -> Iterator[str]:
    """Existing files that a TOML file names, relative to the current folder or to its own."""
    try:
        values = tomllib.loads(path.read_text("utf-8")).values()
    except (OSError, ValueError):
        return
    for value in values:
        for base in (Path(), path.parent):
            if isinstance(value, str) and 0 < len(value) < 1000 and (base / value).is_file():
                yield os.path.abspath(base / value)
                break


# file in a directory → its entries that decide what the directory contains
RECORDS = {
    "run.json": ("fingerprint", "result", "finished"),
    "quantization.json": ("fingerprint",),
    "_manifest.json": ("command", "options", "seed"),
}
SHARDS = "_manifest.json"
MOST_FILES = 1000


def identity_of(path: str) -> str:
    """The identity of a local file or directory; '' for a URL or where there is nothing to read."""
    try:
        if "://" in path or not os.path.exists(path):
            return ""
        return _of_directory(Path(path)) if os.path.isdir(path) else _of_file(path)
    except (OSError, BadData):
        return ""


def _of_file(path: str) -> str:
    # they load pyarrow, which not every command needs
    from sabia.core.digests import footer_digest
    from sabia.core.file_hashes import CACHED_BYTES, content_hash

    with open(path, "rb") as file:
        if digest := footer_digest(file, path):
            return f"digests {digest}"
    size = os.path.getsize(path)
    return f"bytes {content_hash(path)}" if size < CACHED_BYTES else f"size {size}"


def _of_directory(folder: Path) -> str:
    """By the record of the run, here or (for the `final` of a run) above; else by its files."""
    for directory in (folder, folder.parent) if folder.name == "final" else (folder,):
        for name, entries in RECORDS.items():
            with contextlib.suppress(OSError, ValueError):
                record = read_json(directory / name)
                values = [record.get(entry) for entry in entries]
                if name == SHARDS:
                    values += [one.get("fingerprint") for one in record.get("shards", ())]
                return f"record {_hash(repr(values))}"
    listed = sorted(p for p in folder.iterdir() if p.is_file() and p.name[:1] not in "._")
    return f"files {_hash(repr([(p.name, _of_file(str(p))) for p in listed[:MOST_FILES]]))}"


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


RUN = "run_record"  # the key of a provenance with a RunRecord, which is not part of its JSON
KEY = b"sabia.run"  # of the schema metadata of an Arrow stream
ROWS = ("rows_in", "rows_out", "removed", "rejected")


def enabled() -> bool:
    """Whether outputs tell of their runs."""
    return os.environ.get("SABIA_RUN_RECORD", "") not in FALSE


@dataclass
class _Clock:
    """The CPU time and the time of day of this process when it last finished an output."""

    cpu: float = 0.0
    at: float = field(default_factory=time.time)


_clock = _Clock()


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@dataclass
class RunRecord:
    """The record of one output. `call`: see call_of. summary: an object with the
    counts of rows (shards.summary.Summary), read when the output ends."""

    made: Mapping[str, Any]
    call: Mapping[str, Any]
    inputs: Sequence[Mapping[str, Any]]
    jobs: int = 1
    summary: Any = None

    def stable(self) -> dict[str, object]:
        """What is the same for each run of the same call."""
        call = {name: value for name, value in self.call.items() if name != "jobs"}
        made = {
            name: value for name, value in self.made.items() if name not in ("inputs", "origins")
        }
        return {
            **made,
            "result": result_version(str(self.made.get("command"))),
            **call,
            "inputs": list(self.inputs),
        }

    def ended(self, rows: int | None, beside: bool = False) -> dict[str, object]:
        """The whole record of an output that is complete. beside: rows beside the output, whose CPU
        time counts for the output."""
        now, cpu, start = time.time(), cpu_seconds(), _clock.at
        spent = None if beside else round(cpu - _clock.cpu, 3)
        if not beside:
            _clock.cpu, _clock.at = cpu, now
        counts: dict[str, Any] = {"rows_out": rows}
        if self.summary is not None and not beside:
            counts |= {"rows_in": self.summary.rows_in, "rejected": self.summary.rejected}
            if self.made.get("kind") == "document" and rows is not None:
                counts["removed"] = self.summary.rows_in - rows - self.summary.rejected
        return self.stable() | {
            "commit": package_commit(),
            "host": socket.gethostname(),
            "jobs": self.jobs,
            "start": _iso(start),
            "end": _iso(now),
            "cpu_seconds": spent,
            "rows": {name: counts[name] for name in ROWS if counts.get(name) is not None},
        }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def text(record: Mapping[str, Any]) -> str:
    """A record as it is stored."""
    return json.dumps(record, sort_keys=True, ensure_ascii=True, default=str)


def split(made: Mapping[str, Any] | None) -> tuple[dict[str, Any], RunRecord | None]:
    """A provenance without the record of its run, and that record."""
    plain = dict(made or {})
    run = plain.pop(RUN, None)
    return plain, run if isinstance(run, RunRecord) and enabled() else None


@functools.cache
def package_commit() -> str:
    """The git commit of the package: of its source tree, or that pip installed; '' if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return _commit_of(Path(__file__).resolve().parents[3])
    with contextlib.suppress(PackageNotFoundError, ValueError, TypeError):
        direct = json.loads(distribution("sabia").read_text("direct_url.json") or "{}")
        return str(direct.get("vcs_info", {}).get("commit_id", ""))
    return ""


def _commit_of(tree: Path) -> str:
    """The commit of HEAD in a source tree; raises OSError or ValueError if there is none."""
    git = tree / ".git"
    if git.is_file():  # a worktree
        git = Path(git.read_text().split("gitdir: ")[1].strip())
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    common = git / "commondir"
    base = (git / common.read_text().strip()).resolve() if common.exists() else git
    name = head.removeprefix("ref: ")
    for folder in (git, base):
        with contextlib.suppress(FileNotFoundError):
            return (folder / name).read_text().strip()
    lines = (base / "packed-refs").read_text().splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")


OF_SHARD = ("inputs", "host", "start", "end", "cpu_seconds")  # the rest is shared: a call


def summed(shards: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """The shards of a manifest with what they tell about their runs: `calls`, to which each shard
    refers by number, and `totals`."""
    calls: dict[str, dict[str, Any]] = {}
    listed, records = [], [one[RUN] for one in shards if RUN in one]
    for shard in shards:
        entry = {name: value for name, value in shard.items() if name != RUN}
        if RUN in shard:
            record = dict(shard[RUN])
            own = {name: record.pop(name, None) for name in (*OF_SHARD, "fingerprint")}
            counts = record.pop("rows", {})
            number = list(calls).index(key) if (key := text(record)) in calls else len(calls)
            calls.setdefault(key, record)
            entry |= {"call": number, "counts": counts}
            entry |= {name: own[name] for name in OF_SHARD}
        listed.append(entry)
    if not records:
        return {"shards": listed}
    totals: dict[str, Any] = {
        name: sum(one["rows"].get(name, 0) for one in records)
        for name in ROWS
        if any(name in one["rows"] for one in records)
    }
    totals["cpu_seconds"] = round(sum(one["cpu_seconds"] or 0 for one in records), 3)
    totals |= {"start": min(one["start"] for one in records)}
    totals |= {"end": max(one["end"] for one in records)}
    totals["hosts"] = sorted({one["host"] for one in records})
    return {"shards": listed, "calls": list(calls.values()), "totals": totals}


def beside(path: str) -> str:
    """The file, or the object at a URL, that keeps the record of an output."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.sabia.json"


def keep_beside(path: str, record: Mapping[str, Any], stdout: bool = False) -> None:
    """Write a record beside its output; a folder that cannot be written is left as it is. stdout:
    the file is what the command wrote to stdout."""
    path = os.path.abspath(path)
    with contextlib.suppress(OSError):
        write_json(beside(path), {RUN: {**record, "path": path, "stdout": stdout}})


def of_parquet(file: BinaryIO) -> dict[str, Any] | None:
    """The record in a Parquet file."""
    from sabia.core.digests import text_of_run  # loads pyarrow

    with contextlib.suppress(ValueError):
        return json.loads(text_of_run(file) or "null")
    return None


def keep_script(program: Sequence[str], outputs: Sequence[str], inputs: Sequence[str] = ()) -> None:
    """Keep the call of a program that is no command of sabia, with the arguments of this process,
    beside each of the files that it has written. program: its words before the arguments."""
    if not enabled():
        return
    call = {"arguments": sys.argv[1:], "folder": os.getcwd(), "reads": [], "writes": []}
    made = {"command": os.path.basename(program[-1]), "program": list(program)}
    named = [_named(one) for one in inputs]
    for path in map(os.path.abspath, outputs):
        record = RunRecord(made, call | {"out": path}, named)
        keep_beside(path, record.ended(None, beside=True))


def of_process(made: Mapping[str, Any], job: Job) -> dict[str, object]:
    """The record of what a command makes that is no file of rows, at its end."""
    return run_metadata(job, {"version": version("sabia"), **made})[RUN].ended(None)


def run_metadata(job: Job, made: Mapping[str, Any]) -> dict[str, RunRecord]:
    """The entry of a provenance with the record of the job's run."""
    return {RUN: RunRecord(made, call_of_job(job), inputs_of_job(job), job.jobs)}


def call_of_job(job: Job) -> dict[str, object]:
    """The call of a job with the content that the files named by its options have now."""
    return {**job.call, "reads": [_named(path) for path in job.call.get("reads", ())]}


def inputs_of_job(job: Job) -> list[dict[str, Any]]:
    """The inputs of a job as it names them, for stages that do not list their shards."""
    return [_named(one) for one in job.inputs if one != "-"]


def _named(name: str) -> dict[str, object]:
    """A file or directory with its content, see `identity_of`."""
    path = name if "://" in name else os.path.abspath(name)
    return {"name": path, "content": identity_of(path)}


def inputs_of(sources: Sequence[Any]) -> list[dict[str, Any]]:
    """Names of sources, and for streams the record of the run that wrote them. Their fingerprints
    are in the provenance, in the same order."""
    return [_input_of(source) for source in sources]


def _input_of(source: Any) -> dict[str, object]:
    if source.origin:
        return _named(source.name)
    known: dict[str, Any] = {"name": source.name}
    with contextlib.suppress(OSError, ValueError):
        form, writer = getattr(source, "form", ""), None  # archives of pages have none
        if form == "parquet":
            with source.open() as file:
                writer = of_parquet(file)
        elif form == "arrow":
            writer = json.loads((source.stored_schema().metadata or {}).get(KEY, b"null"))
        if writer is not None:
            known["made"] = writer
    return known
