"""`sabia pretrain` from the shell: the run directory, stdout, what is refused, what is skipped."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training_cases import ENVIRONMENT, LENGTH, SHAPE, Commands, load, losses, make_tokens

from sabia.core.shards.atomic import read_json, write_json
from sabia.core.shards.inputs import from_path
from sabia.core.shards.outputs import open_file

WORDS = ("--shape", SHAPE, "--steps", "15", "--batch", "8", "--lr", "1e-2")


@pytest.fixture(scope="module")
def made(tmp_path_factory, sabia: Commands) -> Path:
    """A folder with token rows and a finished run with validation."""
    folder = tmp_path_factory.mktemp("made")
    tokens = make_tokens(folder / "tokens")
    done = sabia("pretrain", tokens, *WORDS, "--validation", tokens, "-o", folder / "run")
    assert done.returncode == 0, done.stderr
    (folder / "rows.parquet").write_bytes(done.stdout)
    (folder / "notes.txt").write_bytes(done.stderr)
    return folder


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_run_directory(made: Path) -> None:
    run = made / "run"
    assert sorted(p.name for p in run.iterdir() if p.name != ".lock") == [
        "checkpoints", "final", "metrics.jsonl", "run.json",
    ]  # fmt: skip
    assert json.loads((run / "run.json").read_text())["finished"] is True
    rows = metrics(run)
    validations = [
        (row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row
    ]
    assert [step for step, _ in validations] == [0, 15]
    assert validations[1][1] < validations[0][1] - 0.5
    assert set(rows[0]["validation_by_source"]) == {"web", "books"}
    first = rows[1]
    assert first["step"] == 1
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_s", "gemm_share", "seconds",
            "loss_by_source"} <= set(first)  # fmt: skip
    # 8 rows of two documents: the first token of each is not predicted, nor padding
    assert first["tokens"] <= 8 * (LENGTH - 2)
    # no data sheet gives the peak of a CPU
    assert 0 < first["gemm_share"] < 2 and "mfu" not in first


def test_metrics_are_rows_on_stdout(made: Path) -> None:
    table = pq.read_table(made / "rows.parquet")
    assert table.num_rows == 17
    assert table["loss"].drop_null().to_pylist() == list(losses(made / "run").values())
    assert dict(table["loss_by_source"][1].as_py()).keys() <= {"web", "books"}
    assert "measured by a matrix product here" in (made / "notes.txt").read_text()


def test_again_is_done_and_says_the_same(made: Path, sabia: Commands) -> None:
    before = (made / "run" / "final" / "model.safetensors").stat().st_mtime_ns
    done = sabia("pretrain", made / "tokens", *WORDS, "-o", made / "run")
    assert done.returncode == 0
    assert b"already finished" in done.stderr
    assert pq.read_table(io.BytesIO(done.stdout)) == pq.read_table(made / "rows.parquet")
    assert (made / "run" / "final" / "model.safetensors").stat().st_mtime_ns == before


def test_other_options_are_refused_and_force_starts_over(
    made: Path, tmp_path: Path, sabia: Commands
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    words = ("pretrain", made / "tokens", *WORDS, "-o", run, "--lr", "1e-3")
    refused = sabia(*words)
    assert refused.returncode == 2
    assert b"lr 0.01, now 0.001" in refused.stderr
    assert len(refused.stderr.splitlines()) == 2  # a note on files without digests before it
    assert losses(run) == losses(made / "run")
    forced = sabia(*words, "--force")
    assert forced.returncode == 0, forced.stderr
    assert losses(run) != losses(made / "run")


def test_how_often_to_save_is_not_another_run(made: Path, sabia: Commands) -> None:
    words = ("--save-every", "3", "--log-every", "2", "--micro-batch", "2", "--backend", "jax")
    done = sabia("pretrain", made / "tokens", *WORDS, *words, "-o", made / "run")
    assert b"already finished" in done.stderr


def test_transformers_loads_the_result(made: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the judge of the export")
    import numpy as np
    import torch

    place = made / "run" / "final"
    model, told = transformers.AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    text = "3 and 4 make 7, said the owl."
    assert tokenizer(text)["input_ids"] == load(made / "tokens").encode(text)
    # the validation loss again, document by document
    total = count = 0.0
    for row in pq.read_table(made / "tokens" / "part-00000.parquet").to_pylist():
        start = 0
        for length in row["document_lengths"]:
            ids = torch.tensor([row["input_ids"][start : start + length]])
            start += length
            with torch.no_grad():
                scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            total -= float(scores.gather(1, ids[0, 1:, None]).sum())
            count += length - 1
    wanted = [row for row in metrics(made / "run") if "validation_loss" in row][-1]
    assert wanted["validation_tokens"] == count
    assert np.isclose(total / count, wanted["validation_loss"], atol=1e-5)


def test_goes_on_from_a_model(made: Path, tmp_path: Path, sabia: Commands) -> None:
    tokens, final = made / "tokens", made / "run" / "final"
    words = ("--model", final, "--steps", "3", "--lr", "1e-4", "--validation", tokens,
             "--export-dtype", "bfloat16")  # fmt: skip
    done = sabia("pretrain", tokens, *words, "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    before = [row for row in metrics(made / "run") if "validation_loss" in row][-1]
    after = metrics(tmp_path / "run")[0]
    assert after["step"] == 0
    assert after["validation_loss"] == pytest.approx(before["validation_loss"], abs=1e-6)
    config = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))


def test_mix_and_config_json(made: Path, tmp_path: Path, sabia: Commands) -> None:
    config = made / "run" / "final" / "config.json"
    words = ("--config-json", config, "--steps", "4", "--batch-tokens", str(8 * LENGTH), "--mix",
             "books=1", "--log-every", "2")  # fmt: skip
    done = sabia("pretrain", made / "tokens", *words, "-o", tmp_path / "run", "--to", "jsonl")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 4]
    assert all(set(row["loss_by_source"]) == {"books"} for row in rows)


def test_stdin_and_dry_run(made: Path, tmp_path: Path) -> None:
    """The rows come through a real pipe; a dry run touches nothing and says the plan."""
    words = [sys.executable, "-m", "sabia.cli.main", "pretrain", *WORDS, "--dry-run", "-o",
             str(tmp_path / "run"), "--tokenizer", str(made / "tokens" / "_tokenizer")]  # fmt: skip
    with subprocess.Popen(
        ["cat", str(made / "tokens" / "part-00000.parquet")], stdout=subprocess.PIPE
    ) as cat:
        done = subprocess.run(
            words, stdin=cat.stdout, capture_output=True, env=ENVIRONMENT, text=True
        )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if ": " in line]
    said = dict(line.split(": ", 1) for line in lines)
    assert said["CPU time"].startswith("about ") and said["memory"].startswith("about ")
    assert said["steps"] == "15 of 8 rows (256 tokens)"
    assert said["tokens"] == f"{15 * 8 * LENGTH:,}"
    assert said["epochs"] == "web 1.88, books 1.88"
    from sabia.core.spec import from_config, new_config, parameter_count

    vocab = load(made / "tokens").vocab_size
    spec = from_config(new_config(hidden=32, layers=1, heads=2, vocab=vocab))
    assert said["parameters"] == f"{parameter_count(spec):,}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "--model: is missing (expected --model DIR, --config-json FILE or --shape d="),
        (("--shape", SHAPE, "--model", "base"), 2, "--model: not together with --shape"),
        (("--shape", SHAPE, "--mesh", "tensor=2"), 2, "needs 2 devices, there are 1 (torch runs"),
        (("--shape", SHAPE, "--mesh", "data=2"), 2, "torchrun --nproc-per-node 2"),
        (("--shape", SHAPE, "--steps", "3", "--tokens", "5"), 2, "--steps: not together with"),
        (("--shape", SHAPE, "--mix", "poems=1"), 2, "no rows of source 'poems'"),
        (("--shape", SHAPE + ",vocab=20"), 65, "expected below the model's vocabulary of 20"),
        (("--shape", SHAPE, "--warmup", "much"), 2, "--warmup: 'much'"),
        (("--shape", SHAPE, "--lr", "0"), 2, "--lr: 0 is out of range (expected above 0)"),
        (("--shape", SHAPE, "--balance", "0.01"), 2, "--balance: the model has no experts"),
        (("--shape", SHAPE, "--bias-rate", "0.001"), 2, "--bias-rate: the model has no expert bi"),
        (("--shape", SHAPE, "--context", "8k"), 2, "--context: only with --model"),
        (("--shape", SHAPE, "--rope-theta", "1e6"), 2, "--rope-theta: only with --context"),
        (("--shape", SHAPE, "--then", "decay:web=1"), 2, "--then: only with --mix"),
        (("--shape", SHAPE, "--eval-every", "5"), 2, "--eval-every: only with --validation"),
        (("--shape", SHAPE, "--mtbf", "8h"), 2, "--mtbf: only with --save-every auto"),
        (("--shape", SHAPE, "--schedule", "constant", "--decay", "20%"), 2,
         "--decay: only with --schedule wsd"),
        (("--shape", SHAPE, "--schedule", "constant", "--bf16-tail"), 2,
         "--bf16-tail: only with --schedule wsd or cosine"),
        (("--shape", SHAPE, "--precision", "bf16", "--bf16-tail"), 2,
         "--bf16-tail: not together with --precision bf16"),
        (("--shape", SHAPE, "--optimizer", "adafactor", "--betas", "0.9,0.9"), 2,
         "--betas: only with --optimizer adamw, muon, lion or soap"),
        (("--shape", SHAPE, "--betas", "0.9"), 2, "--betas: '0.9' (expected such as 0.9,0.95)"),
        (("--shape", SHAPE, "--betas", "0.9,1"), 2, "--betas: 1.0 (expected 0 to below 1)"),
        (("--shape", SHAPE, "--freeze", "("), 2, "--freeze: '(' is not a regular expression"),
        (("--shape", SHAPE, "--compile", "--backend", "jax"), 2, "--compile: only with --backend"),
        (("--shape", SHAPE, "--lora-alpha", "0"), 2, "--lora-alpha: only with --lora-rank"),
        (("--shape", SHAPE, "--warmup", "20", "--decay", "80", "--steps", "99"), 2,
         "--warmup: 20 steps of warm-up and 80 of decay in 99 steps"),
        (("--shape", SHAPE, "--tokenizer", "/nope"), 2, "--tokenizer: /nope has no tokenizer"),
        (("--model", "/nope"), 2, "--model: /nope: not a model directory"),
        (("--config-json", "/nope"), 2, "--config-json: /nope"),
        (("--shape", SHAPE, "--validation", "/nope"), 2, "--validation: /nope: No such file"),
        (("--shape", SHAPE, "--mix", "web=1", "--then", "3:no=1"), 2, "--then: no rows of source"),
        (("--shape", SHAPE, "--list-read", "--force"), 2, "--list-read: not together with --force"),
        (("--shape", SHAPE, "--lr", "1e30", "--steps", "9"), 1, "expected finite numbers"),
    ],
)  # fmt: skip
def test_refusals(made: Path, tmp_path: Path, sabia: Commands, words, code, said) -> None:
    done = sabia("pretrain", made / "tokens", *words, "-o", tmp_path / "run", "-q")
    assert done.returncode == code, done.stderr
    assert said in done.stderr.decode()
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run" / "final").exists()


def test_needs_a_run_directory(made: Path, sabia: Commands) -> None:
    for out in ((), ("-o", "run.parquet"), ("-o", "-")):
        done = sabia("pretrain", made / "tokens", *WORDS, *out)
        assert done.returncode == 2
        assert b"expected a local directory for the run" in done.stderr


def test_rows_of_another_kind(tmp_path: Path, sabia: Commands) -> None:
    pq.write_table(pa.table({"text": ["no tokens"]}), tmp_path / "documents.parquet")
    done = sabia("pretrain", tmp_path / "documents.parquet", *WORDS, "-o", tmp_path / "run")
    assert done.returncode == 65
    assert b"no column 'input_ids'" in done.stderr


def test_rows_without_tokens_are_rejected(made: Path, tmp_path: Path, sabia: Commands) -> None:
    table = pq.read_table(made / "tokens" / "part-00000.parquet")
    rows = table.to_pylist()
    rows[3]["input_ids"] = None
    pq.write_table(pa.Table.from_pylist(rows, table.schema), tmp_path / "rows.parquet")
    words = ("--tokenizer", made / "tokens" / "_tokenizer", "-o", tmp_path / "run")
    done = sabia("pretrain", tmp_path / "rows.parquet", *WORDS, *words)
    assert done.returncode == 0, done.stderr
    assert b"1 token rows rejected" in done.stderr
    (reject,) = pq.read_table(tmp_path / "run.rejects" / "part-00000.parquet").to_pylist()
    assert reject["reason"] == "input_ids is null"


def test_one_process_at_a_time(made: Path, tmp_path: Path, sabia: Commands) -> None:
    from sabia.core.train.run_directory import RunDirectory

    with RunDirectory(tmp_path / "run").locked():
        done = sabia("pretrain", made / "tokens", *WORDS, "-o", tmp_path / "run")
    assert done.returncode == 1
    assert b"another process is training in it" in done.stderr


def test_a_log_gets_no_binary(made: Path, tmp_path: Path) -> None:
    """stdout and stderr in one file, as in a batch job: a table, not Parquet."""
    words = [sys.executable, "-m", "sabia.cli.main", "pretrain", str(made / "tokens"), *WORDS,
             "-o", str(made / "run")]  # fmt: skip
    with open(tmp_path / "log", "wb") as log:
        subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT, check=True)
    text = (tmp_path / "log").read_bytes()
    assert b"PAR1" not in text
    assert "loss" in text.decode()


@pytest.fixture(scope="module")
def forms(tmp_path_factory, made: Path) -> Path:
    """The same rows with digests, compressed and as Arrow."""
    folder = tmp_path_factory.mktemp("forms")
    (source,) = from_path(str(made / "tokens" / "part-00000.parquet"), "tokens")
    batches = list(source.batches(rows=20))
    for form in ("parquet", "arrow"):
        with open_file(f"{folder}/rows.{form}", batches[0].schema) as writer:
            for batch in batches:
                writer.write(batch)
    return folder


def test_rows_in_place_and_unpacked_train_the_same(
    made: Path, forms: Path, tmp_path: Path, sabia: Commands
) -> None:
    words = (*WORDS, "--tokenizer", made / "tokens" / "_tokenizer")
    weights = []
    for form in ("parquet", "arrow"):
        run, cache = tmp_path / form, tmp_path / f"cache-{form}"
        done = sabia("pretrain", forms / f"rows.{form}", *words, "--row-cache", cache, "-o", run)
        assert done.returncode == 0, done.stderr
        # Arrow is read in place
        assert len(list(cache.glob("*.rows.arrow"))) == (form == "parquet")
        weights.append((run / "final" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_run_of_an_earlier_version_goes_on(
    made: Path, forms: Path, tmp_path: Path, sabia: Commands
) -> None:
    """Its inputs were recorded by a hash of all bytes of each shard, with digests too."""
    words = ("pretrain", forms / "rows.arrow", *WORDS,
             "--tokenizer", made / "tokens" / "_tokenizer", "-o", tmp_path / "run")  # fmt: skip
    assert sabia(*words).returncode == 0
    path = tmp_path / "run" / "run.json"
    (source,) = from_path(str(forms / "rows.arrow"), "tokens")
    record = read_json(path)
    assert record["identity"]["inputs"] != [source.fingerprint()]
    for inputs, code in (([source.fingerprint()], 0), (["of other rows"], 2)):
        record["identity"]["inputs"] = inputs
        write_json(path, record)
        done = sabia(*words)
        assert done.returncode == code
        assert (b"already finished" if code == 0 else b"holds another run") in done.stderr


EARLIER = """
from sabia.core.recipes import pretrain
pretrain.fingerprint = lambda source: source.fingerprint()
from sabia.cli.main import main
main()
"""


def test_checkpoints_of_an_earlier_version_at_a_url(
    made: Path, forms: Path, tmp_path: Path, sabia: Commands
) -> None:
    """The directory of the run is lost; the checkpoints know how it recorded its inputs."""
    words = ["pretrain", forms / "rows.arrow", *WORDS, "--checkpoint-url",
             f"file://{tmp_path}/store", "--tokenizer", made / "tokens" / "_tokenizer"]  # fmt: skip
    earlier = [sys.executable, "-c", EARLIER, *map(str, words), "-o", str(tmp_path / "lost")]
    subprocess.run(earlier, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    done = sabia(*words, "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    one, other = (tmp_path / name / "final" / "model.safetensors" for name in ("lost", "run"))
    assert one.read_bytes() == other.read_bytes()
    assert not [row for row in metrics(tmp_path / "run") if "loss" in row]  # no step again
    records = [read_json(tmp_path / name / "run.json")["identity"] for name in ("lost", "run")]
    assert records[0] == records[1]


def test_an_id_that_the_model_lacks(made: Path, tmp_path: Path, sabia: Commands) -> None:
    """In rows that are read in place it is seen when the row is read."""
    lists = pa.list_(pa.int32())
    schema = pa.schema([("input_ids", lists), ("document_lengths", lists)])
    ids = [[1, 2, 3]] * 40 + [[1, 999, 3]]
    batch = pa.RecordBatch.from_pydict({"input_ids": ids, "document_lengths": [[3]] * 41}, schema)
    with open_file(f"{tmp_path}/rows.arrow", schema) as writer:
        writer.write(batch)
    done = sabia("pretrain", tmp_path / "rows.arrow", "--shape", "d=32,layers=1,heads=2,vocab=300",
                 "-o", tmp_path / "run")  # fmt: skip
    assert done.returncode == 65
    assert b"token id 999 in the rows (expected below the model's vocabulary of 300" in done.stderr
