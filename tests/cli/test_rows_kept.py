"""Generated calls, as a shell runs them: inputs of many forms, found in many ways, into outputs of
every form. Every row that goes in comes out, is a removed row or a counted reject, or the call is
refused with an exit code that says so."""

import gzip
import json
import os
import random
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard
from forked import Command

from sabia.core.shards.outputs import open_file

SABIA = Command("classify", "--no-quality")
REFUSED = (2, 65, 69, 123)  # 123: xargs, of which a call was refused
REASONS = (  # why a generated call may be refused
    "rows of other inputs", "rows cannot be added", "--append: ", "slice of the shards",
    "one of the tasks of a Slurm step", "expected a file ending in",
    "empty input (its producer failed?)",  # `cat` of a folder
)  # fmt: skip
LONG = 'len(text) > 14'  # fmt: skip


def table_of(rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def by_polars(rows: list[dict], path: Path, form: str) -> None:
    import polars

    frame = polars.DataFrame(rows)
    {"parquet": frame.write_parquet, "ipc": frame.write_ipc, "json": frame.write_ndjson}[form](path)


def by_duckdb(rows: list[dict], path: Path, options: str) -> None:
    import duckdb

    records = table_of(rows)  # noqa: F841 - DuckDB finds it by its name
    duckdb.sql(f"COPY (SELECT * FROM records) TO '{path}' ({options})")


def by_pandas(rows: list[dict], path: Path, lines: bool) -> None:
    import pandas

    pandas.DataFrame(rows).to_json(path, orient="records", lines=lines, force_ascii=lines)


def by_datasets(rows: list[dict], path: Path, form: str) -> None:
    import datasets

    data = datasets.Dataset.from_list(rows)
    {"parquet": data.to_parquet, "json": data.to_json, "disk": data.save_to_disk}[form](str(path))


def by_sabia(rows: list[dict], path: Path) -> None:
    table = table_of(rows)
    with open_file(str(path), table.schema) as writer:
        for batch in table.to_batches():
            writer.write(batch)


def text_file(path: Path, text: str) -> None:
    data = text.encode()
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# how a file is written: the ending of its name, and a function of rows and path
WRITERS = [
    (".parquet", lambda r, p: pq.write_table(table_of(r), p)),
    (".PARQUET", lambda r, p: pq.write_table(table_of(r), p)),
    (".parquet", lambda r, p: by_polars(r, p, "parquet")),
    (".parquet", lambda r, p: by_duckdb(r, p, "FORMAT parquet")),
    (".parquet", lambda r, p: by_datasets(r, p, "parquet")),
    (".arrow", lambda r, p: by_polars(r, p, "ipc")),
    (".feather", lambda r, p: pyarrow.feather.write_feather(table_of(r), str(p))),
    ("", lambda r, p: by_datasets(r, p, "disk")),
    (".jsonl", lambda r, p: by_datasets(r, p, "json")),
    (".ndjson", lambda r, p: by_polars(r, p, "json")),
    (".json", lambda r, p: by_duckdb(r, p, "FORMAT json")),
    (".json", lambda r, p: by_duckdb(r, p, "FORMAT json, ARRAY true")),
    (".json", lambda r, p: by_pandas(r, p, False)),
    (".jsonl", lambda r, p: by_pandas(r, p, True)),
    (".jsonl.gz", lambda r, p: text_file(p, lines(r))),
    (".JSONL.zst", lambda r, p: p.write_bytes(zstandard.compress(lines(r).encode()))),
    (".json.gz", lambda r, p: text_file(p, json.dumps(r, indent=1))),
    (".json", lambda r, p: text_file(p, "".join(json.dumps(x, indent=2) + "\n" for x in r))),
    (".json", lambda r, p: text_file(p, "".join(map(json.dumps, r)))),
    *[(end, by_sabia) for end in (".parquet", ".arrow", ".jsonl", ".jsonl.gz", ".jsonl.zst")],
]


class Case:
    """One generated call: its files, its command line, and the rows that go in."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.folder = random.Random(seed), folder
        self.texts, self.bad, self.files = Counter[str](), 0, list[str]()
        self.column = self.draw.choice(["text"] * 4 + ["content"])
        self.partitioned = self.draw.random() < 0.4
        for number in range(self.draw.randint(1, 7)):
            self.add_file(number)

    def add_file(self, number: int) -> None:
        draw = self.draw
        ending, write = draw.choice(WRITERS)
        below = draw.choice(["", "a", "a/b", "language=pt", "language=en/day=2"])
        place = self.folder / "in" / (below if self.partitioned else "")
        place.mkdir(parents=True, exist_ok=True)
        rows = [{self.column: f"{number} {i} {'x' * draw.randint(0, 12)}", "n": i,
                 "meta": {"k": i, "l": ["é"]}} for i in range(draw.choice([1, 3, 40]))]  # fmt: skip
        path = place / f"f{number}{ending}"
        write(rows, path)
        if ending == ".jsonl.gz" and draw.random() < 0.5:
            path.write_bytes(path.read_bytes() + gzip.compress(b"{broken\n[1]\n"))
            self.bad += 2
        self.texts.update(row[self.column] for row in rows)
        self.files.append(str(path.relative_to(self.folder)))

    def flags(self) -> str:
        return f"--text-column {self.column}" * (self.column != "text")

    def line(self) -> str:
        """The shell line. It writes to `out…`, and removed rows to `removed…`."""
        draw = self.draw
        quoted = " ".join(map(shlex.quote, self.files))
        listed = f"printf '%s\\n' {quoted}"
        flags, out = self.flags(), draw.choice(OUTPUTS)
        if draw.random() < 0.3:
            removed = "removed" if out == "-o out" else "removed.parquet"
            flags += f" --where '{LONG}' --removed {removed}"
        if draw.random() < 0.3:
            flags += " -j 2"
        ways = ["files", "folder", "folder", "glob", "list", "xargs", "append", "array", "own",
                "step", "substitution", *["cat"] * (len(self.files) == 1)]  # fmt: skip
        way = draw.choice(ways)
        if way == "xargs":  # several files in one pipe are refused by who reads them, not here
            out = "> out.parquet" if "| cat" in out or ">(" in out else out
            return f"{listed} | xargs -n {draw.randint(1, 4)} {SABIA} {flags} {out}"
        if way == "append":
            many = f"xargs -n {draw.randint(1, 3)} -P {draw.randint(1, 2)}"
            return f"{listed} | {many} {SABIA} {flags} --append {out}"
        if way in ("array", "own", "step"):
            return self.tasks(way, flags, out)
        given = {
            "files": f"{SABIA} {quoted}", "folder": f"{SABIA} in", "list": f"{listed} | {SABIA}",
            "glob": f"{SABIA} 'in/**/*'", "cat": f"cat {quoted} | {SABIA}",
            "substitution": f"{SABIA}" + "".join(f" <(cat {shlex.quote(f)})" for f in self.files),
        }[way]  # fmt: skip
        return f"{given} {flags} {out}"

    def tasks(self, way: str, flags: str, out: str) -> str:
        """Tasks of an array that share the inputs, or have their own; or of a step, unsliced."""
        count = self.draw.randint(2, 4)
        calls = []
        for task in range(count):
            array = (f"SLURM_ARRAY_TASK_ID={task} SLURM_ARRAY_TASK_COUNT={count}"
                     " SLURM_ARRAY_TASK_MIN=0 SLURM_ARRAY_TASK_STEP=1")  # fmt: skip
            step = f"SLURM_PROCID={task} SLURM_STEP_NUM_TASKS={count}"
            own = " ".join(map(shlex.quote, self.files[task::count]))
            if way == "own" and own:
                calls.append(f"{array} {SABIA} {own} --shard all --append {flags} {out}")
            elif way != "own":
                slicing = "--shard auto" if way == "array" else ""
                variables = step if way == "step" else array
                calls.append(f"{variables} {SABIA} in {slicing} {flags} {out}")
        return " && ".join(calls)


OUTPUTS = ["-o out", "-o out", "-o out/", "-o out.parquet", "-o out.arrow", "-o out.jsonl",
           "-o out.jsonl.gz", "-o out.jsonl.zst", "> out.parquet", "| cat > out.parquet",
           "--to jsonl > out.jsonl", "--to arrow | cat > out.arrows",
           "-o /dev/stdout > out.parquet",
           "--to jsonl -o >(cat > out.jsonl)", "-o out.csv"]  # fmt: skip


# files of `save_to_disk` that a glob names too: one reject each
DESCRIPTIONS = ("/dataset_info.json", "/state.json")


def rows_in(path: Path) -> list[dict]:
    """The rows of an output, as libraries without sabia read them."""
    if path.is_dir():
        return [row for part in sorted(path.glob("*.parquet")) for row in rows_in(part)]
    data = path.read_bytes()
    if path.suffix == ".parquet":
        return pq.read_table(pa.BufferReader(data)).to_pylist()
    if path.suffix in (".arrow", ".arrows"):
        opened = pa.ipc.open_file if path.suffix == ".arrow" else pa.ipc.open_stream
        return opened(data).read_all().to_pylist()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return [json.loads(line) for line in data.decode().split("\n") if line]


def check(seed: int, folder: Path) -> int:
    """Run a generated call and compare its rows; returns its exit code."""
    folder.mkdir()
    case = Case(seed, folder)
    line = case.line()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    words = ["bash", "-o", "pipefail", "-c", f"{line}; code=$?; wait; sleep 0.2; exit $code"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300,
                          env=environment | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    about = f"seed {seed}: {line}\n{done.stderr}"
    assert "internal error" not in done.stderr and "Traceback" not in done.stderr, about
    if done.returncode:
        assert done.returncode in REFUSED and any(r in done.stderr for r in REASONS), about
        return done.returncode
    out = next(p for p in folder.glob("out*") if ".rejects" not in p.name)
    removed = [row for p in folder.glob("removed*") for row in rows_in(p)]
    texts = Counter(row["text"] for row in [*rows_in(out), *removed])
    rejects = [row for p in folder.glob("[!.]*.rejects*") for row in rows_in(p)]
    bad = sum(not row["shard"].endswith(DESCRIPTIONS) for row in rejects)
    assert texts == case.texts and bad == case.bad, about
    return 0


@pytest.mark.parametrize("seed", [36])
def test_rows_are_kept(seed: int, tmp_path: Path) -> None:
    assert check(seed, tmp_path / "case") == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_rows_of_generated_calls_are_kept(seed: int, tmp_path: Path) -> None:
    codes = [check(100 + 10 * seed + i, tmp_path / str(i)) for i in range(10)]
    assert codes.count(0) >= 2, codes


@pytest.mark.parametrize(("way", "form"), [(">", "parquet"), (">>", "arrow"), (">>", "jsonl")])
def test_calls_that_share_a_file_on_stdout(way: str, form: str, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(lines([{"text": name}]))
    each = ">> out" if way == ">>" else ""
    calls = " && ".join(f"{SABIA} {name}.jsonl --to {form} {each}" for name in "ab")
    line = calls if each else f"({calls}) > out"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    if form == "jsonl":
        assert done.returncode == 0 and len((tmp_path / "out").read_text().splitlines()) == 2
    else:
        assert done.returncode == 2 and "stdout: the file has" in done.stderr


def test_a_file_of_removed_rows_of_other_inputs_is_not_replaced(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(lines([{"text": name}, {"text": name * 20}]))
    line = f"{SABIA} %s --where '{LONG}' --removed removed.parquet --to jsonl"
    codes = [
        subprocess.run(["bash", "-c", line % name], cwd=tmp_path, capture_output=True).returncode
        for name in ("a.jsonl", "a.jsonl", "b.jsonl", "b.jsonl --force")
    ]
    assert codes == [0, 0, 2, 0]
    assert [row["text"] for row in rows_in(tmp_path / "removed.parquet")] == ["b"]


def run_lines(folder: Path, *lines_of_shell: str) -> list[int]:
    """The exit codes of shell lines."""
    return [
        subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True).returncode
        for line in lines_of_shell
    ]


@pytest.mark.slow
@pytest.mark.parametrize("out", ["-o {}.parquet -j 2", "-o {}/", "> {}.parquet"])
def test_removed_rows_and_rejects_of_other_calls_are_not_replaced(tmp_path: Path, out: str) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(
            lines([{"text": name}, {"text": name * 20}]) + "[broken\n"
        )
    rejects = "bad/" if out.endswith("/") else "bad.parquet"
    line = f"{SABIA} %s.jsonl --where '{LONG}' %s {out}"
    first, removed = line % ("a", "%s"), "--removed removed"
    codes = run_lines(tmp_path, *[
        text.format(name) for text, name in [
            (first % removed, "x"), (first % removed, "x"),
            (line % ("b", removed), "y"), (line % ("b", f"{removed} --force"), "y"),
            (first % f"--rejects {rejects}", "p"), (first % f"--rejects {rejects}", "p"),
            (line % ("b", f"--rejects {rejects}"), "q"),
        ]
    ])  # fmt: skip
    assert codes == [0, 0, 2, 0, 0, 0, 2]
    assert [row["text"] for row in rows_in(tmp_path / "removed")] == ["b"]
    if not out.startswith(">"):
        line = first % f"--rejects {rejects}"
        others = line.format("same"), line.replace("> 14", "> 5").format("other")
        assert run_lines(tmp_path, *others) == [0, 2]


@pytest.mark.parametrize("out", ["x.parquet", "x/", "x.jsonl.gz"])
def test_a_format_that_contradicts_the_output_is_refused(tmp_path: Path, out: str) -> None:
    (tmp_path / "a.jsonl").write_text(lines([{"text": "a"}]))
    form = "jsonl" if "jsonl" in out else "parquet"
    calls = [f"{SABIA} a.jsonl -o {out} --to {to}" for to in ("arrow", form)]
    calls.append(f"SABIA_PIPE=arrow {SABIA} a.jsonl --force -o {out}")
    calls.append(f"{Command()} plan-cluster --params 7B -o {out} --to arrow")
    assert run_lines(tmp_path, *calls) == [2, 0, 0, 2]
