"""`grpo --routing-replay`: the trainer sends tokens to the experts that the sampler chose."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from sabia.core.errors import Failed, Interrupted, UsageError
from sabia.core.generate.chat import render
from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Request
from sabia.core.judge.verdict import Grade
from sabia.core.model import forward
from sabia.core.model.routing import Routing
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions, PolicyLoss
from sabia.core.parallel.build_ops import load_ops
from sabia.core.recipes.grpo import policy_run
from sabia.core.recipes.grpo.prompt_schedule import Prompt
from sabia.core.recipes.grpo.sample_batch import arrays_of, of_few_shapes, own_rows, with_slots
from sabia.core.recipes.grpo.sample_journal import Journal
from sabia.core.recipes.grpo.sample_source import SampleSource
from sabia.core.shards.job import Job
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train.losses.grpo import grpo_loss
from sabia.core.train.telemetry import metrics_path, read_rows

SHAPE: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 2, "context": 128, "experts": 6,
                         "chosen": 2, "expert_ffn": 24}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("routing")
    tokenizer = train_bpe(["user assistant which digit? 0 1 2 3 4 5 6 7 8 9"] * 9, 300)
    tokenizer.save(folder / "t")
    for family in ("qwen3_moe", "deepseek_v3"):
        spec = from_config(new_config(family, vocab=tokenizer.vocab_size, **SHAPE))
        params = {n: x * (3 if x.ndim > 1 else 1) for n, x in hub.init_params(spec, 0).items()}
        hub.save_model(folder / family, spec, params, tokenizer_from=folder / "t")
    texts = ["which digit?" * (1 + n % 3) for n in range(12)]
    rows = [{"id": f"p{n}", "messages": [{"role": "user", "content": text}], "answer": "[0-9]"}
            for n, text in enumerate(texts)]  # fmt: skip
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(place: Path, out: Path, kind: str = "qwen3_moe", **changes: Any) -> list[dict[str, Any]]:
    values = {"reward": "regex", "steps": 3, "prompts": 3, "group": 6, "max_new_tokens": 8,
              "warmup": "1", "peak_flops": 1e12, "lr": 1e-3, "routing_replay": True}  # fmt: skip
    values |= changes
    options = GrpoOptions(model=str(place / kind), **values)
    inputs, backend = (str(place / "prompts.jsonl"),), str(values.get("backend", "torch"))
    policy_run.run(Job("grpo", inputs=inputs, out=str(out), to="jsonl", backend=backend), options)
    return read_rows(metrics_path(out))


def rendered(place: Path, kind: str) -> list[tuple[dict[str, Any], str]]:
    """The records of the prompts, with their texts."""
    tokenizer = load_tokenizer(place / kind)
    rows = [json.loads(line) for line in (place / "prompts.jsonl").read_text().splitlines()]
    return [(row, render(row["messages"], tokenizer, True)) for row in rows]


def noise_on_the_sampler(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """The engine samples with other routers than the trainer's."""
    plain = SampleSource.sampling_params

    def noisy(self: SampleSource) -> dict[str, Any]:
        params, draw = plain(self), torch.Generator().manual_seed(self.step)
        routers = {k: x for k, x in params.items() if k.endswith("mlp.router")}
        return params | {
            k: x + size * x.abs().mean() * torch.randn(x.shape, generator=draw)
            for k, x in routers.items()
        }

    monkeypatch.setattr(SampleSource, "sampling_params", noisy)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_the_metric_counts_what_was_planted(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    noise_on_the_sampler(monkeypatch, 0.03)
    more = {"max_logprob_gap": 10.0, "steps": 1, "micro_tokens": 1}  # each sample has its own row
    row = run(place, tmp_path / "run", kind, **more)[0]
    without = run(place, tmp_path / "without", kind, **more, routing_replay=False)[0]
    assert "routing_mismatch" not in without
    assert row["trained_tokens"] == without["trained_tokens"]
    assert row["logprob_gap"] < 0.95 * without["logprob_gap"]
    spec, params = hub.load_model(place / kind)
    routing, ops = Routing.of(spec), load_ops("torch")
    assert routing is not None
    differ, total = np.zeros(routing.layers), 0
    prompts = {  # by their records
        record["id"]: load_tokenizer(place / kind).encode(text)
        for record, text in rendered(place, kind)
    }
    (file,) = (tmp_path / "run" / "samples").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    live = {r["prompt_id"] for r in rows if len({s["reward"] for s in rows
            if s["prompt_id"] == r["prompt_id"]}) > 1}  # fmt: skip
    for sample in (r for r in rows if r["prompt_id"] in live):
        ids = [*prompts[sample["prompt_id"]], *sample["tokens"][:-1]]
        given = routing.unpacked(sample["routed_experts"])
        assert len(given) == len(ids)
        options = {"wanted": frozenset({"experts"})}
        with torch.inference_mode():
            tensors = ops.to_device(params, "float32")
            stats = forward.hidden_and_stats(spec, tensors, np.array([ids]), ops, **options)[1]
        own = np.stack([x[0].numpy() for x in stats["experts"].values()], 1)
        for token, layer in np.ndindex(given.shape[:2]):
            differ[layer] += len({*given[token, layer].tolist()} - {*own[token, layer].tolist()})
        total += len(ids) * routing.top_k
    assert total > 300 and differ.all()
    found = row["routing_mismatch_by_layer"]
    assert [*found] == [str(layer) for layer in spec.expert_layers]
    # the first layer has equal inputs; later ones those of the experts that were given
    assert found[str(spec.expert_layers[0])] == pytest.approx(differ[0] / total, rel=1e-6)
    assert row["routing_mismatch"] == pytest.approx(np.mean([*found.values()]))


CASES: list[dict[str, Any]] = [
    {"precision": "bf16", "lora_rank": 2, "updates": 2, "beta": 0.1},
    {"kind": "deepseek_v3", "remat": "full", "micro_tokens": 90, "advantage": "gae"},
]
SLOW: list[dict[str, Any]] = [
    {"lora_rank": 2, "lora_base": "nf4"},
    {"compile": True},
    {"exact": True, "precision": "bf16"},
    {"draft": "ngram", "refill": 1},
    {"backend": "jax"},
    {"backend": "jax", "updates": 2, "lora_rank": 2, "kind": "deepseek_v3"},
]


@pytest.mark.parametrize("changes", [*CASES, *(pytest.param(c, marks=pytest.mark.slow)
                                               for c in SLOW)])  # fmt: skip
def test_it_goes_with_other_options(place: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    rows = run(place, tmp_path / "run", **changes)
    narrow = changes.get("precision") == "bf16"
    assert all(row["routing_mismatch"] <= (0.02 if narrow else 0.002) for row in rows)
    assert all(row["logprob_gap"] <= (0.02 if narrow else 1e-4) for row in rows)
    assert all(np.isfinite(row["loss"]) for row in rows if "loss" in row)


def test_experts_of_another_kind_stop_the_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise_on_the_sampler(monkeypatch, 20.0)
    with pytest.raises(Failed, match=r"step 1: the sampler has other experts: .* \(expected at"):
        run(place, tmp_path / "run", max_logprob_gap=100.0)


def test_a_stopped_run_ends_with_the_same_weights(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise_on_the_sampler(monkeypatch, 0.03)
    more = {"max_logprob_gap": 10.0, "steps": 2}
    whole = run(place, tmp_path / "whole", **more)
    count, plain = iter(range(1000)), Engine.session

    def session(self: Engine, *sizes: Any, **options: Any) -> Any:
        made = plain(self, 6, *sizes[1:], **options)  # the samples of one prompt at a time
        inner = made.step

        def stopped() -> Any:
            if next(count) == 12:
                raise Interrupted("here")
            return inner()

        made.step = stopped
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "session", session)
        with pytest.raises(Interrupted):
            run(place, tmp_path / "run", **more)
    assert [*(tmp_path / "run" / "samples").glob(".*.partial.jsonl")]
    rows = run(place, tmp_path / "run", **more)
    for row, expected in zip(rows, whole, strict=True):
        assert row["routing_mismatch"] == expected["routing_mismatch"] > 0
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-6)


@pytest.fixture(scope="module")
def sampled(place: Path) -> Any:
    """(spec, parameters, pairs of a prompt and its samples by other routers)."""
    spec, params = hub.load_model(place / "qwen3_moe")
    draw, others = np.random.default_rng(4), dict(params)
    for name in (name for name in params if name.endswith("mlp.router")):
        others[name] = params[name] + 0.05 * draw.standard_normal(params[name].shape, np.float32)
    prompts = [tuple(draw.integers(0, 290, n).tolist()) for n in (40, 44, 47)]
    engine = Engine(spec, others, load_tokenizer(place / "qwen3_moe"))
    made = engine.generate([Request(p, 6, n=4, routed_experts=True, stop_ids=(2, 30, 31))
                            for p in prompts])  # fmt: skip
    training = [(Prompt("", (), p, "7", None), [(s, float(i) - 1.5) for i, s in
                 enumerate(made[4 * n : 4 * n + 4])]) for n, p in enumerate(prompts)]  # fmt: skip
    return spec, params, training


def gradients(sampled: Any, batch: Any, backend: str = "torch") -> tuple[float, Any, Any]:
    spec, params, _ = sampled
    ops: Any = load_ops(backend)
    tensors = ops.to_device(params, "float32")
    for tensor in tensors.values():
        tensor.requires_grad_()
    arrays = {k: torch.from_numpy(v) for k, v in with_slots(batch, 1000, 1).items()}
    total, share, sums = grpo_loss(spec, tensors, arrays, ops, options=PolicyLoss())
    (total / share).backward()
    return float((total / share).detach()), {k: p.grad.numpy() for k, p in tensors.items()}, sums


def test_rows_and_shared_prompts_have_the_same_gradients(sampled: Any) -> None:
    spec, _, training = sampled
    options = GrpoOptions(model="m", micro_tokens=10_000, group=4)
    routing = Routing.of(spec)
    rows, shared = (arrays_of(training, options, most, routing) for most in (1, 4))
    assert "prompt_routing" in shared and "prompt_routing" not in rows
    found = [gradients(sampled, batch) for batch in (rows, shared)]
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    for name, gradient in found[0][1].items():
        np.testing.assert_allclose(gradient, found[1][1][name], atol=1e-5)
        if name.endswith("mlp.router"):
            assert np.abs(gradient).max() > 1e-3
    own = gradients(sampled, arrays_of(training, options, 1))
    assert max(np.abs(own[1][k] - g).max() for k, g in found[0][1].items()) > 1e-3
    assert "routed" not in own[2]
    # padding for meshes and compilers routes nothing
    for padded in (own_rows(rows, 0, 1, 32), of_few_shapes(rows, 8, 8, 1)):
        _, grads, sums = gradients(sampled, padded)
        np.testing.assert_allclose(grads["embed"], found[0][1]["embed"], atol=1e-6)
        assert float(sums["routed"]) == float(found[0][2]["routed"])
        np.testing.assert_array_equal(sums["rerouted"], found[0][2]["rerouted"])


def test_the_journal_keeps_experts(sampled: Any, tmp_path: Path) -> None:
    samples = [sample for _, pairs in sampled[2] for sample, _ in pairs]
    journal = Journal(tmp_path / "samples")
    for sample in samples:
        journal.add(0, sample)
    journal.close()
    assert [*journal.sampled(0).values()] == samples
    plain = replace(samples[0], routed_experts=b"", request_id="plain")
    grades = [(sample, Grade(1.0)) for sample in (*samples, plain)]
    journal.finish(0, 1, ["p"] * len(grades), grades, [{}] * len(grades))
    graded = [completion for completion, _ in journal.graded(0).values()]
    assert [one.routed_experts for one in graded] == [one.routed_experts for one, _ in grades]
    assert all(len(one.routed_experts) > 100 for one in samples)


def test_a_model_without_experts_is_refused(place: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(place / "t")
    spec = from_config(new_config(hidden=32, layers=1, vocab=tokenizer.vocab_size, heads=2,
                                  context=128))  # fmt: skip
    params = hub.init_params(spec, 0)
    hub.save_model(place / "dense", spec, params, tokenizer_from=place / "t")
    with pytest.raises(UsageError, match=r"--routing-replay: .*dense has no experts"):
        run(place, tmp_path / "run", "dense")
