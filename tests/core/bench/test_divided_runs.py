"""Shards of an evaluation: their rows together are those of an undivided run."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from in_process import sabia
from training_cases import sabia as run_processes
from training_cases import torchrun

pytest.importorskip("torch")
from hybrid_models import hybrid

from sabia.core.model.init import init_params
from sabia.core.model.storage import hub
from sabia.core.parallel.build_ops import load_ops
from sabia.core.quant.export import export
from sabia.core.quant.quantize import quantize
from sabia.core.quant.recipe import load_recipe
from sabia.core.spec import from_config, load_spec, new_config

from ..model.conftest import CONFIGS, perturbed


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    rows = [
        {"id": f"s{i}", "a": i, "text": f"{i} mais {i} são", "page": i // 3,
         "options": [str(i), f"{2 * i} são"], "gold": i % 2, "answer": str(i % 10),
         "asked": [f"{i}?", f"{i} mais {i}?"][: 1 + i % 2]}
        for i in range(17)
    ]  # fmt: skip
    few = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "rows.jsonl").write_text(few)
    (root / "two.jsonl").write_text("".join(few.splitlines(keepends=True)[:2]))
    asked = 'prompt = "{{a}} mais {{a}}?"\n'
    choice = f'kind = "multiple_choice"\nchoices = "options"\nanswer = "gold"\n{asked}'
    for name, text in {
        "mc": f'data = "rows.jsonl"\nshots = 2\ncluster = "page"\n{choice}',
        "few": f'data = "two.jsonl"\n{choice}',
        "said": 'data = "rows.jsonl"\nkind = "exact_match"\nverifier = "contains"\nsamples = 2\n'
        f"temperature = 1\nmax_new_tokens = 3\n{asked}",
        "prose": 'data = "rows.jsonl"\nkind = "perplexity"\n',
        "talk": 'data = "rows.jsonl"\nkind = "exact_match"\nverifier = "contains"\n'
        'turns = "asked"\nmax_new_tokens = 3\nchat = true\nprompt = "{{turn}}"\n'
        'answer = "answer"\n',
    }.items():
        (root / f"{name}.toml").write_text(f'name = "{name}"\n{text}')
    return root


def report(*words: object) -> dict:
    """The --json report, without times."""
    done = sabia("eval", *words, "--json")
    assert done.exit_code == 0, done.output
    return {key: value for key, value in json.loads(done.stdout).items() if key != "wall_s"}


def close(a: object, b: object) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == pytest.approx(b, rel=1e-6) if isinstance(a, float) else a == b


def test_the_rows_of_all_shards_give_the_report_of_the_whole_run(
    tasks: Path, tiny_model: Path, tmp_path: Path
) -> None:
    asked = [word for path in sorted(tasks.glob("*.toml")) for word in ("--task", path)]
    asked += ["--model", tiny_model, "--judge-cache", tmp_path / "c"]
    whole = report(*asked, "-o", tmp_path / "whole.parquet")
    parts = [tmp_path / f"part-{i}.parquet" for i in range(4)]
    for i, part in enumerate(parts):
        report(*asked, "--shard", f"{i}/4", "-o", part)
    joined = report(*parts)
    assert [key for key in whole if not close(joined.get(key), whole[key])] == []

    answers = {
        (row["task"], row["item_id"], row["sample"]): json.loads(row["detail"])["response"]
        for row in pq.read_table(tmp_path / "whole.parquet").to_pylist()
        if row["task"] == "talk" and row["detail"]
    }
    for part in parts:  # the second turns follow the answers to the first ones
        for row in pq.read_table(part).to_pylist():
            if row["task"] == "talk" and row["detail"]:
                key = (row["task"], row["item_id"], row["sample"])
                assert json.loads(row["detail"])["response"] == answers.pop(key)
    assert not answers

    def rows(*paths: Path) -> list[tuple]:
        every = [row for path in paths for row in pq.read_table(path).to_pylist()]
        return sorted((r["task"], r["item_id"], r["sample"], r["metric"]) for r in every)

    assert rows(*parts) == rows(tmp_path / "whole.parquet")
    counts = [len({r[:2] for r in rows(part)}) for part in parts]
    assert max(counts) - min(counts) <= 5  # of five tasks
    # a shard that is given is not computed again, and one that is missing is named
    again = sabia("eval", *asked, "--shard", "1/4", "-o", parts[1])
    assert "holds these scores already" in again.output
    lacking = sabia("eval", parts[0], parts[2], parts[3], "--json")
    assert lacking.exit_code == 1 and json.loads(lacking.stdout)["results"]
    for task in ("mc", "said", "prose", "few"):
        assert f"{task}, tiny: no rows of shard 1/4" in lacking.output
    # two items have no third shard
    last = sabia("eval", *parts[:3], "--json")
    assert "no rows of shard 3/4" in last.output and "few, tiny: no rows" not in last.output
    other = tmp_path / "other.parquet"
    report(*asked, "--shard", "0/3", "-o", other)
    mixed = sabia("eval", *parts, other, "--json")
    assert mixed.exit_code == 1 and "rows of several divisions" in mixed.output


def test_slurm_tasks_take_their_slice(
    tasks: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"ID": "6", "MIN": "4", "STEP": "1", "COUNT": "5"}
    for name, value in names.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    out, words = tmp_path / "s.parquet", ("--task", tasks / "prose.toml", "--model", tiny_model)
    assert "give --shard auto" in sabia("eval", *words, "-o", out).output
    report(*words, "--shard", "auto", "-o", out)
    made = pq.read_table(out).to_pylist()
    assert {row["item_id"] for row in made} == {"s2", "s7", "s12"}
    assert {row["shard"] for row in made} == {"2/5 of 17"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shard", "4/4"], "--shard: '4/4'"),
        (["--shard", "0/2", "--gate", "gate.toml"], "--gate: not with --shard"),
        (["--shard", "0/2", "--answers", "a.jsonl"], "--answers: not with --shard"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], said: str, tasks: Path) -> None:
    done = sabia("eval", "--task", tasks / "said.toml", "--model", "m", *words)
    assert done.exit_code == 2 and said in done.output


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True])
def test_processes_of_a_mesh_give_the_rows_of_one(
    tasks: Path, tiny_model: Path, tmp_path: Path, force: bool
) -> None:
    asked = [word for path in sorted(tasks.glob("*.toml")) for word in ("--task", path)]
    asked = ["eval", *asked, "--model", tiny_model, "--min-k", "20%"]
    more = ["--force"] if force else []
    whole, ours = tmp_path / "whole.parquet", tmp_path / "ours.parquet"
    assert sabia(*asked, "--judge-cache", tmp_path / "a", "-o", whole).exit_code == 0
    cache = tmp_path / ("a" if force else "b")
    written = [*asked, "--judge-cache", cache, "-o", ours, "--mesh", "data=3", *more]
    done = run_processes(*written, launcher=torchrun(3))
    assert done.returncode == 0, done.stderr.decode()
    if not force:  # each process has kept results of its own
        assert len(list((cache / "models").glob("calls-*.log"))) >= 3
    for one, two in zip(*(pq.read_table(path).to_pylist() for path in (whole, ours)), strict=True):
        value, other = one.pop("value"), two.pop("value")
        assert other == pytest.approx(value, rel=1e-6, abs=1e-6)
        details = [json.loads(row.pop("detail") or "{}") for row in (one, two)]
        assert close(*details) and one == two
    before = ours.stat().st_mtime_ns
    again = run_processes(*written[: len(written) - len(more)], launcher=torchrun(3))
    assert again.returncode == 0 and ours.stat().st_mtime_ns == before


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A model of three gated delta nets to one attention, with experts, and the tokenizer."""
    root = tmp_path_factory.mktemp("mixture")
    sizes = {"vocab_size": load_spec(tiny_model).vocab_size, "num_experts": 4,
             "linear_num_value_heads": 4}  # fmt: skip
    spec, params = hybrid("qwen3-next", **sizes)
    hub.save_model(root / "mixture", spec, params, tokenizer_from=tiny_model)
    return root / "mixture"


def scores_of_mesh(
    tasks: Path, model: Path, folder: Path, *mesh: str, processes: int,
    kinds: str = "mc few prose", more: Sequence[object] = (),
) -> None:  # fmt: skip
    """Compare the rows of a mesh with those of one device, both with `more` words."""
    asked = [word for name in kinds.split() for word in ("--task", tasks / f"{name}.toml")]
    (folder / "greedy.yaml").write_text(
        "task: greedy\ndataset_path: json\ndataset_kwargs: {data_files: {test: "
        f"{tasks / 'rows.jsonl'}}}}}\ntest_split: test\noutput_type: loglikelihood\n"
        "doc_to_text: text\ndoc_to_target: answer\n"
        "metric_list: [{metric: acc}, {metric: perplexity}]\n"
    )
    asked = ["eval", *asked, "--task", folder / "greedy.yaml", "--model", model, *more]
    one, ours = folder / "one.parquet", folder / "ours.parquet"
    done = sabia(*asked, "--judge-cache", folder / "a", "-o", one)
    assert done.exit_code == 0, done.output
    words = [*asked, "--judge-cache", folder / "b", "-o", ours, *mesh]
    launcher = {"launcher": torchrun(processes)} if processes > 1 else {}
    done = run_processes(*words, **launcher)
    assert done.returncode == 0, done.stderr.decode()
    for row, other in zip(*(pq.read_table(path).to_pylist() for path in (one, ours)), strict=True):
        assert other.pop("value") == pytest.approx(row.pop("value"), rel=1e-4, abs=1e-4)
        details = [json.loads(each.pop("detail") or "{}") for each in (row, other)]
        assert row == other
        assert details[0].get("response") == details[1].get("response")
    log = "".join(path.read_text(errors="replace") for path in (folder / "b").rglob("*.log"))
    assert "nats" in log
    # what is kept is not computed again
    again = run_processes(*words, **launcher)
    assert again.returncode == 0 and "holds these scores already" in again.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kinds"),
    [
        ("fsdp=2", ""),
        ("tensor=2", "said talk"),
        ("data=2,tensor=2", "said"),
    ],
)
def test_scores_over_a_mesh_of_processes(
    mesh: str, kinds: str, tasks: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Log-likelihoods, sampled answers and greedy answers in several turns."""
    processes, every = 4 if "," in mesh else 2, f"mc few prose {kinds}"
    scores_of_mesh(tasks, tiny_model, tmp_path, "--mesh", mesh, processes=processes, kinds=every)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_answers_with_drafts_over_a_mesh(
    draft: str, tasks: Path, tiny_model: Path, tmp_path: Path
) -> None:
    kinds, more = "few said talk", ["--draft", tiny_model if draft == "model" else draft]
    words = ("--mesh", "tensor=2")
    scores_of_mesh(tasks, tiny_model, tmp_path, *words, processes=2, kinds=kinds, more=more)


@pytest.mark.slow
def test_scores_of_a_quantized_model_over_a_mesh(
    tasks: Path, tiny_model: Path, tmp_path: Path
) -> None:
    sizes = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 256}
    vocabulary = load_spec(tiny_model).vocab_size
    spec = from_config(new_config("llama", **sizes, vocab=vocabulary, context=512))
    made = quantize(spec, init_params(spec, 0), load_recipe("w4a16"), load_ops("torch"))
    export(tmp_path / "q", made, tiny_model)
    words = ("--mesh", "tensor=2")
    scores_of_mesh(tasks, tmp_path / "q", tmp_path, *words, processes=2, kinds="few prose said")
    refused = run_processes("eval", "--task", tasks / "few.toml", "--model", tmp_path / "q",
                            "--mesh", "fsdp=2", launcher=torchrun(2))  # fmt: skip
    assert "q is quantized, and split over tensor alone" in refused.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "data=3"])
def test_scores_over_a_mesh_in_jax(
    mesh: str, tasks: Path, tiny_model: Path, tmp_path: Path
) -> None:
    words = ("--mesh", mesh, "--backend", "jax")
    scores_of_mesh(tasks, tiny_model, tmp_path, *words, processes=1)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["expert=2", "tensor=2", "expert=2,fsdp=2 --backend jax"])
def test_scores_of_a_mixture_over_a_mesh(
    words: str, tasks: Path, mixture: Path, tmp_path: Path
) -> None:
    processes = 1 if "jax" in words else 2
    given = ["--mesh", *words.split()]
    kinds = "few prose" if "expert" in words else "few prose said"
    scores_of_mesh(tasks, mixture, tmp_path, *given, processes=processes, kinds=kinds)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-moe", "deepseek-v3", "gemma2"])
def test_answers_of_models_split_over_processes(
    family: str, tasks: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """Windows, sinks, experts, latents, and a cap of the logits."""
    sizes = {"vocab_size": load_spec(tiny_model).vocab_size, "max_position_embeddings": 512}
    sizes |= {"num_key_value_heads": 2} if family == "gemma2" else {}
    spec = from_config(CONFIGS[family] | sizes)
    model = tmp_path / family
    hub.save_model(model, spec, perturbed(spec), tokenizer_from=tiny_model)
    scores_of_mesh(tasks, model, tmp_path, "--mesh", "tensor=2", processes=2, kinds="said")


@pytest.mark.slow
def test_a_process_of_a_split_model_that_dies_is_named(
    tasks: Path, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "long.toml").write_text(
        f'name = "long"\ndata = "{tasks / "rows.jsonl"}"\nkind = "exact_match"\nsamples = 90\n'
        'verifier = "contains"\ntemperature = 1\nmax_new_tokens = 200\nprompt = "{{a}}"\n'
        'answer = "answer"\n'
    )
    call = [*torchrun(2), "eval", "--task", tmp_path / "long.toml", "--model", tiny_model]
    call += ["--judge-cache", tmp_path / "c", "--mesh", "tensor=2", "-o", tmp_path / "s.parquet"]
    with open(tmp_path / "err", "w") as err:
        run = subprocess.Popen([*map(str, call)], stdout=subprocess.DEVNULL, stderr=err)
    while not list(tmp_path.rglob("calls-*.log")) and run.poll() is None:
        time.sleep(0.2)
    ranks = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout
    other = next(pid for pid in ranks.split()
                 if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())  # fmt: skip
    os.kill(int(other), signal.SIGKILL)
    run.wait(200)
    assert f"rank 1 ({os.uname().nodename.split('.')[0]}" in (tmp_path / "err").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "pipe=2"], "axis pipe: an evaluation divides items over data"),
        (["--mesh", "context=2"], "tensor=N or fsdp=N in place of context=N if"),
        (["--mesh", "context=2", "--task", "SAID"], "in place of context=N if"),
        (["--mesh", "fsdp=2", "--task", "SAID"], "said is answered in words, by whole models"),
        (["--mesh", "data=2", "--backend", "jax", "--task", "SAID"], "said is answered in words"),
        (["--mesh", "fsdp=2", "--min-k", "20%"], "--min-k: not with --mesh fsdp=2"),
        (["--mesh", "data=2"], "torchrun --nproc-per-node 2"),
        (["--mesh", "tensor=2", "--draft", "ngram", "--task", "SAID"], "torchrun --nproc-per-node"),
        (["--mesh", "rows=2"], "--mesh: 'rows=2'"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(
    words: list[str], message: str, tasks: Path, tiny_model: Path, tmp_path: Path
) -> None:
    given = ["--task", tasks / "few.toml", "--model", tiny_model, "-o", tmp_path / "s.parquet"]
    words = [str(tasks / "said.toml") if word == "SAID" else word for word in words]
    done = sabia("eval", *given, *words)
    assert done.exit_code == 2 and message in " ".join(done.output.split())
