"""GRPO end to end on a model that knows digits but not which one is asked for."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from sabia.core import stop
from sabia.core.errors import BadData, Failed, Interrupted, UsageError
from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Completion, Request
from sabia.core.judge.llm import Judgement
from sabia.core.judge.verdict import Grade, Verdict
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions, PolicyLoss
from sabia.core.parallel.build_ops import load_ops
from sabia.core.recipes.grpo import policy_run
from sabia.core.recipes.grpo.prompt_schedule import Prompt, PromptSchedule
from sabia.core.recipes.grpo.sample_batch import (
    Group,
    arrays_of,
    divided,
    empty_batch,
    micro_rows,
    score,
    training_samples,
    with_slots,
)  # fmt: skip
from sabia.core.recipes.grpo.sample_journal import Journal
from sabia.core.recipes.grpo.sampler import Sampler
from sabia.core.recipes.grpo.step_table import StepTable
from sabia.core.shards.job import Job
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train.losses.grpo import grpo_loss
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper_factory import make_stepper


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model directory: after any question, one random digit and the end of the turn."""
    tokenizer = train_bpe(["user assistant which digit? 0 1 2 3 4 5 6 7 8 9"] * 9, 300)
    config = new_config(hidden=32, layers=1, vocab=tokenizer.vocab_size, heads=2, context=64)
    spec = from_config(config)
    stepper = make_stepper("torch", spec, hub.init_params(spec, 0), next_token_loss)
    random = np.random.default_rng(0)
    end = tokenizer.token_id("<|im_end|>")
    head = question_ids(tokenizer)
    for _ in range(60):
        digits = [tokenizer.encode(str(d)) for d in random.integers(0, 10, 32)]
        rows = np.array([[*head, *digit, end] for digit in digits], np.int32)
        mask = np.zeros_like(rows[:, 1:], np.float32)
        mask[:, -2:] = 1
        batch = {"input_ids": rows[:, :-1], "targets": rows[:, 1:], "loss_mask": mask}
        loss = stepper.step(batch, 2e-2).loss
    assert loss < 1.3  # log(10) / 2 tokens = 1.15
    place = tmp_path_factory.mktemp("start")
    tokenizer.save(place)
    params = load_ops("torch").to_numpy(stepper.whole_params())
    model = place / "model"
    hub.save_model(model, spec, params, tokenizer_from=place)
    return model


def question_ids(tokenizer, text="which digit?"):
    from sabia.core.generate.chat import render

    return tokenizer.encode(render([{"role": "user", "content": text}], tokenizer, True))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    record = {"messages": [{"role": "user", "content": "which digit?"}], "answer": "^[789]$"}
    path.write_text("".join(json.dumps({**record, "id": f"p{i}"}) + "\n" for i in range(6)))
    return path


def job_of(prompts, out, **changes):
    return Job(command="grpo", inputs=(str(prompts),), out=str(out), to="jsonl", **changes)


@pytest.fixture
def config(start):
    return GrpoOptions(
        model=str(start),
        reward="regex",
        steps=8,
        prompts=2,
        group=8,
        lr=5e-3,
        warmup="2",
        max_new_tokens=3,
    )


def weights(run):
    return hub.load_model(run / "final")[1]


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a) and a.keys() == b.keys()


def test_reward_rises_and_the_run_directory_is_whole(start, config, prompts, tmp_path, capsys):
    run = tmp_path / "run"
    policy_run.run(job_of(prompts, run), config.replace(steps=24, prompts=4))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert np.mean([row["reward"] for row in rows[:3]]) < 0.5
    assert np.mean([row["reward"] for row in rows[-3:]]) > 0.95
    assert max(row["logprob_gap_max"] for row in rows) <= 1e-4
    assert all(row["clip_fraction"] == 0 for row in rows)  # one update a step is on-policy
    said = capsys.readouterr()
    assert [json.loads(line)["step"] for line in said.out.splitlines()] == list(range(1, 25))
    assert "reward     live   length" in said.err
    samples = pq.read_table(sorted((run / "samples").glob("*.parquet")))
    assert samples.num_rows == 24 * 4 * 8
    first = samples.to_pylist()[0]
    assert first["policy_version"] == 0
    assert first["reward"] == float(first["text"] in ("7", "8", "9"))
    assert first["items"][0]["id"] == "regex"
    assert len(first["tokens"]) == len(first["logprobs"])
    content = json.loads(first["message"])["content"]
    assert content == first["text"].strip()
    assert not list((run / "samples").glob("*.jsonl"))
    policy_run.run(job_of(prompts, run), config.replace(steps=24, prompts=4))
    assert "already finished" in capsys.readouterr().err
    with pytest.raises(UsageError, match="another run"):
        policy_run.run(job_of(prompts, run), config.replace(steps=24, prompts=4, lr=1e-3))


@pytest.mark.parametrize("updates", [1, 2])
def test_a_stopped_run_ends_with_the_same_weights(config, prompts, tmp_path, monkeypatch, updates):
    """Stopped after a step, inside the sampling of another, and then left to end."""
    config = config.replace(updates=updates)
    policy_run.run(job_of(prompts, tmp_path / "whole"), config)
    run = tmp_path / "stopped"
    calls = {"requested": 0, "check": 0}

    def requested():
        calls["requested"] += 1
        return calls["requested"] == 3

    def check():
        calls["check"] += 1
        if calls["check"] == 7:  # four a step: two groups of eight in eight slots, two tokens
            raise Interrupted("stopped")

    monkeypatch.setattr(policy_run, "Engine", partial(Engine, slots=8))
    monkeypatch.setattr(stop, "requested", requested)
    with pytest.raises(Interrupted, match="step 3 of 8"):
        policy_run.run(job_of(prompts, run), config)
    monkeypatch.setattr(stop, "requested", lambda: False)
    monkeypatch.setattr(stop, "check", check)
    with pytest.raises(Interrupted):
        policy_run.run(job_of(prompts, run), config)
    broken = list((run / "samples").glob(".*.partial.jsonl"))
    kept = [json.loads(line) for path in broken for line in path.read_text().splitlines()]
    assert kept, "finished samples of the broken step are not on the disk"
    monkeypatch.setattr(stop, "check", lambda: None)
    policy_run.run(job_of(prompts, run), config)
    assert same(weights(run), weights(tmp_path / "whole"))
    assert not same(weights(run), hub.load_model(config.model)[1])
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))


def test_samples_past_the_checkpoint_are_not_made_again(config, prompts, tmp_path, monkeypatch):
    """A kill between checkpoints: the samples of the lost steps are read, the weights are equal."""
    policy_run.run(job_of(prompts, tmp_path / "whole"), config)
    run = tmp_path / "killed"
    steps = []

    def die(self, row):
        steps.append(row["step"])
        if row["step"] == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StepTable, "show", die)
        policy_run.run(job_of(prompts, run), config.replace(save_every="4"))
    made = []
    original = Sampler._sampled

    def count(self, step, owners, known):
        made.append(step)
        return original(self, step, owners, known)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "_sampled", count)
        policy_run.run(job_of(prompts, run), config)
    assert made == [6, 7]
    assert same(weights(run), weights(tmp_path / "whole"))


@pytest.mark.parametrize("aggregation", ["token", "seq-mean", "dr"])
def test_micro_batches_give_the_same_gradient(config, prompts, tmp_path, aggregation):
    """One denominator for the step: loss and gradient norm do not see how it was cut up."""
    first = {}
    for name, micro_tokens in (("whole", 16384), ("parts", 60)):
        loss = {"aggregation": aggregation, "advantage": "std"}
        changed = config.replace(steps=1, micro_tokens=micro_tokens, **loss)
        policy_run.run(job_of(prompts, tmp_path / name), changed)
        first[name] = json.loads((tmp_path / name / "metrics.jsonl").read_text())
    assert first["whole"]["trained_tokens"] > 16
    for name in ("loss", "grad_norm", "trained_tokens", "logprob_gap"):
        assert first["parts"][name] == pytest.approx(first["whole"][name], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("changes", [
    {"beta": 0.1, "ratio": "sequence", "aggregation": "seq-mean", "advantage": "std"},
    {"aggregation": "dr", "correction": "token-cap", "temperature": 0.8},
    {"precision": "bf16", "overlong": "mask", "updates": 3, "prompts": 6},
])  # fmt: skip
def test_other_settings_run(config, prompts, tmp_path, changes):
    run = tmp_path / "run"
    policy_run.run(job_of(prompts, run), config.replace(steps=3, **changes))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(row["loss"]) for row in rows if row["updates"])
    if changes.get("beta"):
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
        assert rows[-1]["kl"] > 0
    if changes.get("precision") != "bf16":
        assert rows[0]["logprob_gap_max"] <= 1e-4
    if changes.get("updates") == 3:
        assert max(row["updates"] for row in rows) == 3


def test_too_high_a_rate_is_said(config, prompts, tmp_path, capsys):
    """The negative control: learn the digit, then destroy the policy with a rate of 1."""
    table = StepTable()
    for reward in (0.45, 0.46, 0.47, 0.44, 0.3, 0.2, 0.18, 0.1, 0.05):
        table.add({"reward": reward, "samples": 1})
        table.check_collapse()
    assert capsys.readouterr().err.count("collapsed from 0.460") == 1
    steady = StepTable()
    for reward in (0.1, 0.05, 0.02, 0.0, 0.0, 0.0, 0.4, 0.3):
        steady.add({"reward": reward, "samples": 1})
        steady.check_collapse()
    assert not steady.warned  # .1 to 0 is noise of a small group


def test_records_that_cannot_be_graded_are_rejected(config, prompts, tmp_path, capsys):
    lines = prompts.read_text()
    no_answer = {"messages": [{"role": "user", "content": "x"}]}
    answered = {"messages": [{"role": "assistant", "content": "x"}], "answer": "1"}
    long = {"messages": [{"role": "user", "content": "x y " * 60}], "answer": "1"}
    bad = "".join(json.dumps(row) + "\n" for row in (no_answer, answered, long))
    prompts.write_text(lines + bad)
    run = tmp_path / "run"
    policy_run.run(job_of(prompts, run), config.replace(steps=1))
    reasons = [r["reason"] for r in pq.read_table(f"{run}.rejects").to_pylist()]
    assert len(reasons) == 3
    assert "no answer" in reasons[0]
    assert "turn to answer" in reasons[1]
    assert "tokens" in reasons[2]
    prompts.write_text(bad)
    with pytest.raises(BadData, match="3 rejected"):
        policy_run.run(job_of(prompts, tmp_path / "none"), config.replace(steps=1))


def test_refusals(config, prompts, tmp_path):
    with pytest.raises(UsageError, match="directory"):
        policy_run.run(Job(command="grpo", inputs=(str(prompts),)), config)
    for changes in ({"reward": "vibes"}, {"max_new_tokens": 64}):
        with pytest.raises(UsageError):
            policy_run.run(job_of(prompts, tmp_path / "run"), config.replace(**changes))
    with pytest.raises(BadData, match="no rubric"):
        policy_run.run(job_of(prompts, tmp_path / "run"), config.replace(reward="rubric"))
    for name, value in (("group", "1"), ("overlong", "drop"), ("temperature", "0")):
        with pytest.raises(UsageError, match=f"--{name}"):
            GrpoOptions.read({"model": config.model, name: value})


# -- the parts


def group_of(rewards, lengths=None, prompt=(1, 2, 3), reason="stop"):
    lengths = lengths or [2] * len(rewards)
    samples = [
        Completion("r", i, list(range(10, 10 + n)), "t", [-0.5] * n, [-0.5] * n, reason)
        for i, n in enumerate(lengths)
    ]
    return Group(Prompt("p", (), prompt, "7", None), samples, [Grade(r) for r in rewards])


GROUPS = (
    group_of([1.0, 0.0, 1.0], [1, 2, 4]),
    group_of([1.0, 1.0, 1.0]),
    group_of([None, 0.0, 1.0], prompt=(4, 5)),
    group_of([None, None, 1.0]),
)


def make_batch(groups, options):
    placed = [replace(group, position=(0, n)) for n, group in enumerate(groups)]
    training = training_samples(placed, options)
    return arrays_of([*training.values()], options, options.group) if training else None


def test_batches_hold_what_teaches(config):
    batch = make_batch(GROUPS, config.replace(group=3, micro_tokens=8))
    assert batch["targets"].shape == (5, 1, 4)
    assert batch["loss_mask"].sum((1, 2)).tolist() == [1, 2, 4, 2, 2]
    assert np.allclose(batch["advantage"].ravel(), [1 / 3, -2 / 3, 1 / 3, -0.5, 0.5])
    assert batch["input_ids"][2].tolist() == [1, 2, 3, 10, 11, 12, 0, 0]
    assert batch["targets"][2, 0].tolist() == [10, 11, 12, 13]
    assert batch["completion_at"][2].tolist() == [2, 3, 4, 5]
    assert batch["targets"][3, 0].tolist() == [10, 11, -1, -1]
    fanned = make_batch(GROUPS, config.replace(group=3))
    assert fanned["targets"].shape == (2, 3, 4)
    assert fanned["prompt_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert fanned["prompt_length"].tolist() == [[3], [2]]
    assert fanned["loss_mask"].sum(-1).tolist() == [[1, 2, 4], [2, 2, 0]]
    assert fanned["share"].sum() == batch["share"].sum() == 11
    assert make_batch(GROUPS[1:2], config) is None
    assert empty_batch(config)["loss_mask"].sum() == 0
    cut = [group_of([1.0, 0.0], reason="length")]
    assert make_batch(cut, config.replace(overlong="mask")) is None
    assert make_batch(cut, config)["loss_mask"].sum() == 4


@pytest.mark.parametrize("aggregation", ["token", "seq-mean", "dr"])
def test_shares_are_those_of_the_samples(config, aggregation):
    wanted = {"token": 11, "seq-mean": 5, "dr": 5 * config.max_new_tokens}[aggregation]
    for micro_tokens in (8, 10_000):
        changed = config.replace(group=3, micro_tokens=micro_tokens, aggregation=aggregation)
        assert make_batch(GROUPS, changed)["share"].sum() == wanted


def test_micro_batches_are_numbered(config):
    batch = make_batch(GROUPS, config.replace(group=3, micro_tokens=8))
    assert micro_rows(batch, config.replace(micro_tokens=16)) == 2
    assert micro_rows(batch, config.replace(micro_tokens=32)) == 3  # 3 + 2, not 4 + 1
    assert micro_rows(batch, config.replace(micro_tokens=16), 2) == 2  # 3 on each of 2 devices
    assert micro_rows(batch, config.replace(micro_tokens=1)) == 1
    assert with_slots(batch, 2, 4)["slot"].argmax(1).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("updates", [1, 2, 3, 7, 40])
def test_an_update_has_its_samples_with_any_number_of_processes(config, updates):
    draw = np.random.default_rng(updates)
    groups = [
        replace(group_of(draw.integers(0, 2, 3).astype(float), range(1, 4)), position=(n % 2, n))
        for n in range(10)
    ]
    names = {id(s): (g.position, s.sample) for g in groups for s in g.samples}
    expected = None
    for processes in (1, 2, 5):
        own = [training_samples(groups[rank::processes], config) for rank in range(processes)]
        counts = {place: len(samples) for part in own for place, (_, samples) in part.items()}
        found = [[] for _ in range(updates)]
        for part in own:
            for update, some in enumerate(divided(part, counts, updates)):
                found[update] += [names[id(s)] for _, samples in some for s, _ in samples]
        sizes = [len(part) for part in found]
        assert max(sizes) - min(sizes) <= 1
        found = [sorted(part) for part in found]
        expected = expected or found
        assert found == expected
    assert sorted(name for part in expected for name in part) == sorted(
        names[id(s)] for _, samples in training_samples(groups, config).values() for s, _ in samples
    )


def test_updates_do_not_depend_on_micro_batches(config, prompts, tmp_path):
    found = {}
    for micro_tokens in (16384, 8):  # samples share their prompt, or have a row each
        run = tmp_path / str(micro_tokens)
        changed = config.replace(steps=3, prompts=4, updates=3, micro_tokens=micro_tokens)
        policy_run.run(job_of(prompts, run), changed)
        found[micro_tokens] = weights(run)
    for name, tensor in found[8].items():
        np.testing.assert_allclose(tensor, found[16384][name], atol=2e-4)


@pytest.fixture(scope="module")
def sampled(start):
    """(spec, params, groups of samples of three prompts of different lengths)."""
    tokenizer = load_tokenizer(start)
    spec, params = hub.load_model(start)
    prompts = [tuple(question_ids(tokenizer, text)) for text in ("which digit?", "9", "one two")]
    asked = [Request(p, 6, 0.9, n=4, stop_ids=(2, 30, 31, 32, 33)) for p in prompts]
    samples = Engine(spec, params, tokenizer).generate(asked)
    return spec, params, [
        Group(Prompt("", (), p, "7", None), samples[4 * i : 4 * i + 4],
              [Grade(float(j)) for j in range(4)])
        for i, p in enumerate(prompts)
    ]  # fmt: skip


@pytest.mark.parametrize("micro_tokens", [20, 60, 10_000])
def test_scores_are_the_samplers_logprobs(config, sampled, micro_tokens):
    spec, params, groups = sampled
    changed = config.replace(group=4, micro_tokens=micro_tokens)
    batch = make_batch(groups, changed)
    assert batch["targets"].shape[1] == {20: 1, 60: 4, 10_000: 4}[micro_tokens]
    ops = load_ops("torch")
    found = score(spec, ops.to_device(params), batch, ops, 0.9, micro_rows(batch, changed))
    assert np.abs((found - batch["sampler"]) * batch["loss_mask"]).max() <= 1e-4


def test_a_shared_prompt_has_the_gradients_of_repeated_ones(config, sampled):
    spec, params, groups = sampled
    found = {}
    for name, micro_tokens in (("rows", 20), ("fanned", 10_000)):
        changed = config.replace(group=4, micro_tokens=micro_tokens)
        batch = with_slots(make_batch(groups, changed), 1000, 1)
        assert ("prompt_ids" in batch) == (name == "fanned")
        ops = load_ops("torch")
        tensors = {k: p.requires_grad_() for k, p in ops.to_device(params, "float32").items()}
        arrays = {k: torch.from_numpy(v) for k, v in batch.items()}
        loss = {"temperature": 0.9, "ratio": "sequence", "aggregation": "seq-mean"}
        options = PolicyLoss(updates=2, **loss)
        numerator, share, _ = grpo_loss(spec, tensors, arrays, ops, options=options)
        (numerator / share).backward()
        found[name] = (numerator.item(), {k: p.grad.numpy() for k, p in tensors.items()})
    assert found["rows"][0] == pytest.approx(found["fanned"][0], abs=1e-6)
    for name, gradient in found["rows"][1].items():
        assert np.abs(gradient - found["fanned"][1][name]).max() <= 1e-5
    assert np.abs(found["rows"][1]["embed"]).max() > 1e-3


def test_the_order_of_prompts_is_arithmetic():
    prompts = [Prompt(str(i), (), (1,), "7", None) for i in range(10)]
    schedule = PromptSchedule(prompts, 4, seed=3)
    seen = [p.id for step in range(5) for p in schedule.of_step(step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == sorted(str(i) for i in range(10))
    assert seen[:10] != seen[10:]
    assert [p.id for p in schedule.of_step(3)] == seen[12:16]
    assert [p.id for p in PromptSchedule(prompts, 4, seed=4).of_step(0)] != seen[:4]


def test_journal_gives_back_what_it_was_given(tmp_path):
    journal = Journal(tmp_path / "samples")
    one = Completion("0-0-p", 0, [5, 6], "é", [-0.25, -0.5], [-0.125, -1.0], "stop")
    two = Completion("0-0-p", 1, [7], "", [-2.0], [-2.0], "length")
    for completion in (one, two):
        journal.add(0, completion)
    journal.close()
    torn = next((tmp_path / "samples").glob("*.jsonl"))
    with open(torn, "a") as file:
        file.write('{"request_id": "0-0-p", "sample": 2, "tok')
    assert Journal(tmp_path / "samples").sampled(0) == {("0-0-p", 0): one, ("0-0-p", 1): two}
    grades = [Grade(1.0, (("exact", Verdict.MET, 2.0),)), Grade(None, (("a", Verdict.UNKNOWN, 1),))]
    journal.finish(0, 3, ["p", "p"], zip([one, two], grades, strict=True), [{}, {}])
    assert journal.sampled(0) == {}
    found = Journal(tmp_path / "samples", rank=1).graded(0)
    assert found == {("0-0-p", 0): (one, grades[0]), ("0-0-p", 1): (two, grades[1])}
    assert journal.graded(1) == {}


def test_a_judge_that_fails_stops_the_run_with_samples_kept(config, prompts, tmp_path, monkeypatch):
    record = {"messages": [{"role": "user", "content": "which digit?"}],
              "rubric": [{"id": "kind", "text": "is seven"},
                         {"id": "right", "kind": "exact", "reference": "7"}]}  # fmt: skip
    prompts.write_text(json.dumps(record) + "\n")
    replies = {"down": True}

    def collect(self, questions):
        return [
            Judgement({"kind": Verdict.UNKNOWN if replies["down"] and i % 2 else
                       Verdict.of(question.response == "7")})
            for i, question in enumerate(questions)
        ]  # fmt: skip

    monkeypatch.setattr("sabia.core.judge.llm.Judge.submit", lambda self, question: question)
    monkeypatch.setattr("sabia.core.judge.llm.Judge.collect", collect)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    judge = {"judge_url": ("http://127.0.0.1:9/v1",), "judge_model": "judge"}
    judged = config.replace(reward="rubric", steps=2, **judge)
    run = tmp_path / "run"
    with pytest.raises(Failed, match="no verdict on 50%"):
        policy_run.run(job_of(prompts, run), judged)
    assert (tmp_path / "caches" / "sabia" / "calls").is_dir()
    kept = next((run / "samples").glob(".*.partial.jsonl")).read_text()
    assert len(kept.splitlines()) == 16
    policy_run.run(job_of(prompts, run), judged.replace(max_null=0.6))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["no_reward"] for row in rows] == [8, 8]
    samples = pq.read_table(run / "samples").to_pylist()
    assert sum(sample["reward"] is None for sample in samples) == 16
    assert {s["reward"] for s in samples} <= {None, 0.0, 1.0}
    first = [s["tokens"] for s in samples if s["policy_version"] == 0]
    assert sorted(first) == sorted(json.loads(line)["tokens"] for line in kept.splitlines())
