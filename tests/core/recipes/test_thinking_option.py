"""--thinking-budget of eval, rewrite and grpo, with a model in the process and with `sabia serve`.

The model is random and never closes its reasoning, so that it has no answer without a budget.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from in_process import sabia
from served import NAME, RowByRowEngine, in_thread

from sabia.core.errors import UsageError
from sabia.core.generate.calls import ChatResponse
from sabia.core.generate.model_directory import load_engine
from sabia.core.generate.opened import open_budget
from sabia.core.generate.requests import LENGTH, Completion
from sabia.core.model.storage import hub
from sabia.core.options.eval import EvalOptions
from sabia.core.options.grpo import GrpoOptions
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.recipes.grpo.prompt_schedule import Prompt
from sabia.core.recipes.grpo.sample_batch import arrays_of
from sabia.core.recipes.grpo.sample_journal import Journal
from sabia.core.serve.http_server import Server
from sabia.core.shards.job import Job
from sabia.core.spec import from_config, new_config
from sabia.core.text.rewrite.model_engine import Writer, open_answers
from sabia.core.text.rewrite.rewrite_recipe import load_recipe
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe

sys.path.insert(0, str(Path(__file__).parents[2]))
from openai_stub import Stub

TEMPLATE = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
            "{# </think> #}")  # fmt: skip
TASK = """name = "t"
data = "items.jsonl"
kind = "exact_match"
verifier = "contains"
chat = true
prompt = "{{q}}"
answer = "gold"
max_new_tokens = 18
"""
BUDGET = ("--thinking-budget", 7)
OVER = (*BUDGET, "--thinking-overflow", "length")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a model whose template has no reasoning, a task, documents and prompts."""
    root = tmp_path_factory.mktemp("thinking")
    base = train_bpe(["user assistant: which digit? 0 1 2 3 4 5 6 7 8 9"] * 9, 300)
    spec = from_config(new_config(hidden=32, layers=1, vocab=300, heads=2, context=1024))
    for name, template in (("model", TEMPLATE), ("plain", TEMPLATE.replace("<think>\n", ""))):
        Tokenizer(base.definition, base.config, template).save(root / f"{name}-t")
        hub.save_model(root / name, spec, hub.init_params(spec, 0),
                       tokenizer_from=root / f"{name}-t")  # fmt: skip
    write(root / "items.jsonl", [{"id": str(n), "q": f"{n}?", "gold": "0"} for n in range(3)])
    (root / "t.toml").write_text(TASK)
    write(root / "in.jsonl", [{"id": str(n), "text": f"{n} {n}"} for n in range(1)])
    (root / "say.toml").write_text('prompt = "say"\n')
    write(root / "prompts.jsonl", [
        {"id": f"p{n}", "messages": [{"role": "user", "content": f"{n}?"}], "answer": "[0-9]"}
        for n in range(6)
    ])  # fmt: skip
    return root


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def url(folder: Path, tmp_path: Path) -> Iterator[str]:
    made = load_engine(folder / "model")
    (tmp_path / "updates").mkdir()

    def make() -> Server:
        engine = RowByRowEngine(made.spec, made.params, made.tokenizer)
        return Server(engine, NAME, 1024, 64, 1000, updates=tmp_path / "updates")

    with in_thread(make) as address:
        yield address


def evaluated(folder: Path, out: Path, model: object, *words: object) -> list[dict[str, Any]]:
    """Details of the answers, by item."""
    done = sabia("eval", "--task", folder / "t.toml", "--model", model, "-o", out,
                 "--max-missing", "100%", "--judge-cache", out.with_suffix(".calls"),
                 *words)  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = {row["item_id"]: row for row in read(out)}
    return [json.loads(rows[str(n)]["detail"]) for n in range(3)]


def test_eval_has_answers_within_a_budget(folder: Path, url: str, tmp_path: Path) -> None:
    models = {"own": f"m={folder / 'model'}", "served": f"m={url}#{NAME}"}
    made = {
        (name, kind): evaluated(folder, tmp_path / f"{name}-{kind}.jsonl", model, *words)
        for name, model in models.items()
        for kind, words in (("free", ()), ("closed", BUDGET), ("over", OVER))
    }
    for name in models:
        for free, closed, over in zip(*(made[name, k] for k in ("free", "closed", "over")),
                                      strict=True):  # fmt: skip
            assert "no_answer" not in closed and closed["response"] and closed["reasoning"]
            assert (free["tokens"], closed["tokens"], over["tokens"]) == (18, 18, 7)
            assert over["finish_reason"] == LENGTH
            if name == "own":  # a server's reply does not say that its prompt opens reasoning
                assert free["reasoning"].startswith(closed["reasoning"])
                assert "inside of the reasoning" in free["no_answer"] and over["no_answer"]
    assert made["own", "closed"] == made["served", "closed"]
    again = tmp_path / "own-closed.jsonl"  # kept answers are those of the same budget only
    kept = ("--judge-cache", again.with_suffix(".calls"))
    assert (
        evaluated(folder, tmp_path / "b.jsonl", models["own"], *kept)[0] == made["own", "free"][0]
    )


def test_rewrite_asks_within_a_budget(folder: Path, url: str, tmp_path: Path) -> None:
    closing = load_tokenizer(folder / "model").encode("</think>")
    places: dict[str, dict[str, Any]] = {
        "own": {"engine": "local", "model": str(folder / "model")},
        "there": {"engine": "endpoint", "model": NAME, "url": (url,)},
    }
    budgets: dict[str, dict[str, Any]] = {
        "free": {}, "closed": {"thinking_budget": 7},
        "over": {"thinking_budget": 7, "thinking_overflow": "length"},
    }  # fmt: skip
    made: dict[tuple[str, str], list[ChatResponse]] = {}
    for (name, place), (kind, more) in product(places.items(), budgets.items()):
        options = RewriteOptions(cache=str(tmp_path / name), **place, **more)
        budget = open_budget(options, Job("rewrite", out=str(tmp_path / "out.jsonl")))
        answers = open_answers(options, budget)
        writer = Writer(answers, load_recipe("reason-first"), 0.0, 0)
        asked = [replace(writer.request(text), max_tokens=20) for text in "0123456789"]
        made[name, kind] = answers.submit(asked)()
        texts = [answers.cached_text(one) for one in asked]  # each by a key of its own
        assert texts == [one.text for one in made[name, kind]]
        answers.close()
    for kind in budgets:
        assert [one.text for one in made["own", kind]] == [one.text for one in made["there", kind]]
    count = 0
    for free, closed, over in zip(*(made["there", kind] for kind in budgets), strict=True):
        if free.finish_reason != LENGTH:  # the random model ended its turn
            continue
        count += 1
        # apart where the template would write it so, else a part of the text
        reasoning = closed.message.get("reasoning_content")
        before, mark, _ = (closed.text or "").partition("</think>")
        assert bool(reasoning) != bool(mark)
        assert free.text and free.text.startswith(reasoning or before)
        assert closed.usage.completion_tokens == 20 > 7 + len(closing)
        assert (over.finish_reason, over.usage.completion_tokens) == (LENGTH, 7)
    assert count > 2


def test_a_server_that_ignores_the_budget_is_refused(folder: Path, tmp_path: Path) -> None:
    with Stub(lambda text: "<think>\nhm\n</think>\n0") as stub:
        words = ("--engine", "endpoint", "--url", stub.url, "--model", "m", *BUDGET)
        done = sabia("rewrite", folder / "in.jsonl", "--recipe", folder / "say.toml",
                     "--cache", tmp_path / "calls", "-o", tmp_path / "o.jsonl", *words)  # fmt: skip
        assert done.exit_code == 1 and "ignores thinking_budget" in done.output
        assert all(body["thinking_budget"] == 7 for body in stub.bodies)
        done = sabia("eval", "--task", folder / "t.toml", "--model", f"m={stub.url}#m", *BUDGET,
                     "--judge-cache", tmp_path / "calls", "-o", tmp_path / "e.jsonl")  # fmt: skip
        assert done.exit_code == 1 and "ignores thinking_budget" in done.output


GRPO = {"reward": "regex", "steps": 2, "prompts": 2, "group": 4, "max_new_tokens": 12,
        "warmup": "1", "peak_flops": 1e12, "lr": 5e-3}  # fmt: skip


def trained(folder: Path, out: Path, **changes: Any) -> list[dict[str, Any]]:
    """The metrics of a run."""
    words = [word for name, value in (GRPO | changes).items()
             for word in (f"--{name.replace('_', '-')}", value)]  # fmt: skip
    done = sabia("grpo", folder / "prompts.jsonl", "--model", folder / "model", "-o", out,
                 "--to", "jsonl", *words)  # fmt: skip
    assert done.exit_code == 0, done.output
    return read(out / "metrics.jsonl")


def samples_of(out: Path) -> list[dict[str, Any]]:
    paths = sorted((out / "samples").glob("step-*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def test_grpo_does_not_learn_the_tokens_that_close_reasoning(
    folder: Path, url: str, tmp_path: Path
) -> None:
    closing = load_tokenizer(folder / "model").encode("</think>")
    places = list(range(3, 3 + len(closing)))
    rows = trained(folder, tmp_path / "own", thinking_budget=3, max_new_tokens=20)
    samples = samples_of(tmp_path / "own")
    assert len(samples) == 16
    for sample in samples:
        assert sample["forced"] == places and [sample["tokens"][p] for p in places] == closing
        assert sample["text"].index("</think>") > 0
    assert max(row["logprob_gap_max"] for row in rows if "loss" in row) <= 1e-4
    drawn = sum(len(sample["tokens"]) - len(places) for sample in samples)
    assert sum(row["sampled_tokens"] for row in rows) == drawn
    nats = -sum(sum(sample["logprobs"]) for sample in samples)
    means = [row["entropy"] * row["sampled_tokens"] for row in rows]
    assert sum(means) == pytest.approx(nats, rel=1e-5)
    known = Journal(tmp_path / "own" / "samples").graded(0)
    assert all(completion.forced == places for completion, _ in known.values())
    there = trained(folder, tmp_path / "there", thinking_budget=3, max_new_tokens=20,
                    sampler_url=url, sampler_folder=tmp_path / "updates")  # fmt: skip
    assert [row["reward"] for row in there] == [row["reward"] for row in rows]
    for one, other in zip(samples_of(tmp_path / "there"), samples, strict=True):
        assert (one["tokens"], one["forced"]) == (other["tokens"], other["forced"])
    trained(folder, tmp_path / "over", thinking_budget=3, thinking_overflow="length")
    ends = Counter((len(s["tokens"]), s["finish_reason"]) for s in samples_of(tmp_path / "over"))
    assert ends == {(3, LENGTH): 16}


def test_forced_tokens_have_no_part_in_the_loss() -> None:
    sample = Completion("", 0, [5, 6, 7, 8], "", [-1.0, 0.0, 0.0, -2.0], [-1.0] * 4, LENGTH, [1, 2])
    free = Completion("", 1, [5, 6], "", [-1.0, -1.0], [-1.0] * 2, LENGTH)
    prompt = Prompt("", (), (1, 2), None, None)
    options = GrpoOptions(model="m", reward="regex", aggregation="seq-mean")
    batch = arrays_of([(prompt, [(sample, 1.0), (free, -1.0)])], options, 1)
    assert batch["loss_mask"][:, 0].tolist() == [[1, 0, 0, 1], [1, 1, 0, 0]]
    assert batch["weights"][:, 0].tolist() == [[0.5, 0, 0, 0.5], [0.5, 0.5, 0, 0]]
    assert np.array_equal(batch["targets"][0, 0], [5, 6, 7, 8])  # they are inputs as before


@pytest.mark.parametrize("command", ["eval", "rewrite", "grpo"])
def test_budgets_that_cannot_be_are_refused(command: str, folder: Path, tmp_path: Path) -> None:
    words: dict[str, tuple[object, ...]] = {
        "eval": ("--task", folder / "t.toml", "--judge-cache", tmp_path / "c"),
        "rewrite": (
            folder / "in.jsonl",
            "--engine",
            "local",
            "--cache",
            tmp_path / "c",
            "--recipe",
            folder / "say.toml",
        ),
        "grpo": (
            folder / "prompts.jsonl",
            "--reward",
            "regex",
            "--steps",
            1,
            "--max-new-tokens",
            20,
        ),
    }
    out = tmp_path / ("out" if command == "grpo" else "out.jsonl")
    call = (command, *words[command], "--model", folder / "plain", "-o", out)
    done = sabia(*call, *BUDGET)
    assert done.exit_code == 2 and "the model's chat template has no reasoning" in done.output
    done = sabia(*call, "--thinking-overflow", "length")
    assert done.exit_code == 2 and "only with --thinking-budget" in done.output


def test_a_budget_needs_a_model_and_room_for_an_answer() -> None:
    with pytest.raises(UsageError, match=r"--thinking-budget: only with --engine"):
        RewriteOptions(thinking_budget=3)
    with pytest.raises(UsageError, match=r"--thinking-budget: only with --model"):
        EvalOptions(task=("t",), answers=("a",), thinking_budget=3)
    with pytest.raises(UsageError, match=r"--thinking-budget: 9 .expected less than the 9 of"):
        GrpoOptions(model="m", reward="regex", thinking_budget=9, max_new_tokens=9)
