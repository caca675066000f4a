"""What grpo has from the common training run: guards, validation, adapters, services."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from sabia.core.errors import Failed, UsageError
from sabia.core.generate.chat import render
from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Request
from sabia.core.model.storage import hub
from sabia.core.model.storage.peft_adapters import WEIGHTS
from sabia.core.options.grpo import GrpoOptions
from sabia.core.recipes.grpo import policy_run
from sabia.core.recipes.grpo.sample_source import SampleSource
from sabia.core.recipes.grpo.step_table import StepTable
from sabia.core.shards.job import Job
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train import tracking
from sabia.core.train.guards import SpikeGuard
from sabia.core.train.telemetry import metrics_path, read_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("guards")
    tokenizer = train_bpe(["user assistant which digit? 0 1 2 3 4 5 6 7 8 9"] * 9, 300)
    tokenizer.save(place / "t")
    spec = from_config(
        new_config(hidden=32, layers=1, vocab=tokenizer.vocab_size, heads=2, context=64)
    )
    hub.save_model(place / "model", spec, hub.init_params(spec, 0), tokenizer_from=place / "t")
    record = {"messages": [{"role": "user", "content": "which digit?"}], "answer": "[0-9a-m]"}
    rows = [json.dumps({**record, "id": f"p{i}"}) for i in range(6)]
    (place / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return place


def run(folder, out, **changes):
    values = {"reward": "regex", "steps": 4, "prompts": 2, "group": 8, "max_new_tokens": 3,
              "warmup": "1", "peak_flops": 1e12} | changes  # fmt: skip
    options = GrpoOptions(**{"model": str(folder / "model")} | values)
    policy_run.run(
        Job("grpo", inputs=(str(folder / "prompts.jsonl"),), out=str(out), to="jsonl"), options
    )
    return read_rows(metrics_path(out))


def limits_at(monkeypatch, *calls):
    """Let the guard refuse the updates of these numbers, from 0."""
    count = iter(range(1000))

    def limits(self):
        return (np.inf, 0.0) if next(count) in calls else (np.inf, np.inf)

    monkeypatch.setattr(SpikeGuard, "limits", limits)


def test_a_spike_is_left_out(folder, tmp_path, monkeypatch, capsys):
    plain = run(folder, tmp_path / "plain")
    limits_at(monkeypatch, 1)
    rows = run(folder, tmp_path / "skip", on_spike="skip")
    assert [row["updates"] for row in rows] == [1, 0, 1, 1]
    assert rows[0]["reward"] == plain[0]["reward"]
    assert rows[1]["reward"] == plain[1]["reward"]  # the third step samples without the second
    said = capsys.readouterr().err
    assert "step 2: " in said
    assert "the update is left out" in said


def test_a_spike_stops_the_run(folder, tmp_path, monkeypatch):
    limits_at(monkeypatch, 2)
    with pytest.raises(Failed, match=r"step 3: .* its rows: p\d, p\d"):
        run(folder, tmp_path / "stop", on_spike="stop")


def test_too_many_spikes_fail(folder, tmp_path, monkeypatch):
    limits_at(monkeypatch, *range(1000))
    with pytest.raises(Failed, match="after 8 updates that were left out"):
        run(folder, tmp_path / "run", on_spike="skip", steps=20)


def test_the_validation_reward_is_that_of_greedy_answers(folder, tmp_path):
    out = tmp_path / "run"
    rows = run(folder, out, validation=str(folder / "prompts.jsonl"), eval_every=2, lr=5e-3)
    validated = [row for row in rows if "validation_reward" in row]
    assert [row["step"] for row in validated] == [0, 2, 4]
    assert all(row["validation_prompts"] == 6 for row in validated)
    spec, params = hub.load_model(out / "final")
    tokenizer = load_tokenizer(folder / "model")
    question = [{"role": "user", "content": "which digit?"}]
    ids = tokenizer.encode(render(question, tokenizer, True))
    (answer,) = Engine(spec, params, tokenizer).generate([Request(ids, 3, 0.0)])
    right = any(letter in "0123456789abcdefghijklm" for letter in answer.text)
    assert validated[-1]["validation_reward"] == float(right)
    assert {row["validation_sampled_reward"] for row in validated} <= {n / 6 for n in range(7)}


def test_the_checkpoint_of_the_best_validation_is_kept(folder, tmp_path, monkeypatch):
    values = iter([0.1, 0.1, 0.5, 0.5, 0.3, 0.3, 0.2, 0.2, 0.4, 0.4])  # greedy, sampled
    monkeypatch.setattr(SampleSource, "held_out_rewards", lambda *_: (6 * next(values), 6.0))
    out, lr = tmp_path / "run", 5e-3
    run(folder, out, validation=str(folder / "prompts.jsonl"), eval_every=1, keep_checkpoints=1,
        lr=lr)  # fmt: skip
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["step-00000001", "step-00000004"]
    assert json.loads((out / "run.json").read_text())["best_step"] == 1
    run(folder, tmp_path / "short", steps=1, lr=lr)
    name = "model.safetensors"
    assert (out / "best" / name).read_bytes() == (tmp_path / "short/final" / name).read_bytes()
    assert (out / "best" / name).read_bytes() != (out / "final" / name).read_bytes()


@pytest.mark.parametrize("changes", [
    {"remat": "full"},
    {"optimizer": "muon", "momentum": 0.9},
    {"optimizer": "lion", "freeze": "embed"},
    pytest.param({"compile": True}, marks=pytest.mark.slow),
])  # fmt: skip
def test_optimizers_and_compiled_steps(folder, tmp_path, changes):
    plain, rows = (
        run(folder, tmp_path / name, lr=1e-3, **more)
        for name, more in (("plain", {}), ("other", changes))
    )
    pairs = zip(plain, rows, strict=True)
    same = [abs(row["loss"] - other["loss"]) <= 1e-5 for row, other in pairs]
    assert all(same) == ("optimizer" not in changes)
    before = hub.load_model(folder / "model")[1]["embed"]
    after = hub.load_model(tmp_path / "other" / "final")[1]["embed"]
    assert np.array_equal(before, after) == ("freeze" in changes)
    assert max(row["logprob_gap_max"] for row in rows) <= 1e-4


def test_metrics_are_sent_to_a_service(folder, tmp_path, monkeypatch):
    sent = []

    class Sink:
        def write(self, step, figures):
            sent.append((step, figures["reward"]))

        def close(self):
            pass

    monkeypatch.setattr(tracking, "find_spec", lambda name: name)
    monkeypatch.setattr(tracking, "open_sink", lambda *_: Sink())
    rows = run(folder, tmp_path / "run", track="tensorboard", steps=2)
    assert sent == [(row["step"], row["reward"]) for row in rows]


def test_only_adapters_are_trained_and_sampled_from(folder, tmp_path):
    rows = run(folder, tmp_path / "run", lora_rank=2, lora_targets="attn.[qv]$", lr=5e-2)
    assert max(row["logprob_gap_max"] for row in rows) <= 1e-4  # the sampler has the adapters
    before = hub.load_model(folder / "model")[1]
    after = hub.load_model(tmp_path / "run" / "final")[1]
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"layers.0.attn.q", "layers.0.attn.v"}
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


def test_training_goes_on_from_an_adapter(folder, tmp_path):
    """The policy, and the reference of the divergence, begin as the model with the adapter."""
    run(folder, tmp_path / "first", lora_rank=2, lora_alpha=3.0, lr=5e-2)
    adapter = str(tmp_path / "first" / "adapter")
    rows = run(folder, tmp_path / "run", adapter=adapter, beta=1.0, updates=2, lr=1e-9, steps=1)
    assert abs(rows[0]["kl"]) <= 1e-9
    first, second = (load_file(tmp_path / name / "adapter" / WEIGHTS) for name in ("first", "run"))
    assert first.keys() == second.keys() and len(first) == 14
    assert all(np.abs(first[name] - second[name]).max() <= 1e-7 for name in first)
    ends = [hub.load_model(tmp_path / name / "final")[1] for name in ("first", "run")]
    assert max(np.abs(ends[0][name] - ends[1][name]).max() for name in ends[0]) <= 1e-6
    for words, message in (
        ({"lora_rank": 3}, "--lora-rank: 3 (expected that of"),
        ({"lora_rank": 2, "lora_targets": "mlp"}, "--lora-targets: mlp (expected that of"),
        ({"model": str(tmp_path / "first" / "final")}, "was trained on other weights than those"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            run(folder, tmp_path / "other", adapter=adapter, **words)


def test_peft_reads_the_adapter(folder, tmp_path):
    peft = pytest.importorskip("peft", reason="the reader of adapters")
    transformers = pytest.importorskip("transformers", reason="the model that is adapted")
    run(folder, tmp_path / "run", lora_rank=2, lr=5e-2)
    read = transformers.AutoModelForCausalLM.from_pretrained
    adapted = peft.PeftModel.from_pretrained(read(folder / "model"), tmp_path / "run" / "adapter")
    ids = torch.arange(20)[None] + 7
    with torch.no_grad():
        scores = [m(ids).logits for m in (adapted, read(tmp_path / "run/final"))]
        start = read(folder / "model")(ids).logits
    assert (scores[0] - scores[1]).abs().max() <= 1e-5 < 1e-3 < (scores[0] - start).abs().max()


def test_metrics_have_what_those_of_pretrain_have(folder, tmp_path):
    rows = run(folder, tmp_path / "run", log_every=3, profile="2:2")
    assert [row["step"] for row in rows] == [1, 3, 4]
    common = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "mfu_6nd",
              "seconds", "memory_bytes", "goodput"}  # fmt: skip
    assert common <= rows[-1].keys()
    assert list((tmp_path / "run" / "profile").glob("*.json*"))


def test_a_new_directory_goes_on_from_a_url(folder, tmp_path):
    url = f"file://{tmp_path / 'url'}"
    run(folder, tmp_path / "whole", checkpoint_url=url)
    run(folder, tmp_path / "again", checkpoint_url=url)
    names = ("whole", "again")
    weights = [(tmp_path / n / "final" / "model.safetensors").read_bytes() for n in names]
    assert weights[0] == weights[1]
    assert not list((tmp_path / "again" / "samples").glob("*.parquet"))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_a_capped_model_trains_what_it_samples(folder, tmp_path, temperature):
    tokenizer = load_tokenizer(folder / "model")
    config = new_config("gemma2", hidden=32, layers=2, vocab=tokenizer.vocab_size, heads=2,
                        context=64)  # fmt: skip
    spec = from_config(config | {"final_logit_softcapping": 5.0})
    params = hub.init_params(spec, 0)
    params["embed"] = params["embed"] * 12  # scores far beyond the cap
    hub.save_model(tmp_path / "model", spec, params, tokenizer_from=folder / "model")
    (tmp_path / "prompts.jsonl").write_bytes((folder / "prompts.jsonl").read_bytes())
    rows = run(tmp_path, tmp_path / "run", temperature=temperature, beta=0.1, updates=2)
    assert rows[0]["trained_tokens"] > 20
    assert max(row["logprob_gap_max"] for row in rows) <= 1e-4


def test_another_distribution_than_sampled_stops_the_run(folder, tmp_path):
    out, changes = tmp_path / "run", {"precision": "bf16", "warmup": "0"}
    with pytest.raises(Failed, match=r"step 1: .*at most 1e-09.*--max-logprob-gap"):
        run(folder, out, max_logprob_gap=1e-9, **changes)
    rows = run(folder, out, **changes)  # the default bound of bf16; the samples are kept
    whole = run(folder, tmp_path / "whole", **changes)
    assert [row["reward"] for row in rows] == [row["reward"] for row in whole]
    assert all(1e-9 < row["logprob_gap"] < 0.05 for row in rows)


def test_a_bound_that_is_no_number_of_the_step_stops_it():
    row = {"step": 3, "reward": 0.0, "live_groups": 1.0, "length": 2.0, "clip_fraction": 0.0,
           "logprob_gap": float("nan"), "tokens_per_s": 1.0}  # fmt: skip
    with pytest.raises(Failed, match="step 3: "):
        StepTable(max_gap=1e-3).show(row)
