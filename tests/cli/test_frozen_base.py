"""`--lora-base` of sft and grpo: the run is that of adapters on a model of the decoded matrices."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from digit_policy import write_policy
from kills import through_kills
from safetensors.numpy import load_file
from training_cases import ENVIRONMENT, Commands, difference, make_tokens, torchrun

from sabia.core.model.lora import LoraConfig, base_names
from sabia.core.model.storage import hub
from sabia.core.numerics.frozen_base import stored_base

TRAIN = ("--length", "96", "--batch", "8", "--lr", "1e-2", "--steps", "6", "--lora-rank", "4", "-q")

POLICY = ("--reward", "regex", "--steps", "4", "--prompts", "3", "--group", "6", "--lr", "2e-2",
          "--max-new-tokens", "3", "--updates", "2", "--beta", "0.05",
          "--lora-rank", "2")  # fmt: skip


def with_decoded(model: Path, out: Path, base: str = "nf4") -> Path:
    """A copy of a model whose frozen matrices are those of the base, decoded."""
    spec, params = hub.load_model(model)
    for name in base_names(spec, LoraConfig(base=base)):
        params[name] = stored_base(np.asarray(params[name]), base).decoded()
    hub.save_model(out, spec, params, tokenizer_from=model)
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory, sabia: Commands) -> Path:
    """A model, the same with decoded matrices, conversations and pairs."""
    folder = tmp_path_factory.mktemp("base")
    shape = "d=40,layers=2,heads=2,context=256"
    words = ("pretrain", make_tokens(folder / "tokens"), "--shape", shape, "--steps", "5")
    assert sabia(*words, "-o", folder / "base").returncode == 0
    with_decoded(folder / "base" / "final", folder / "decoded")
    chats, pairs = [], []
    for i in range(60):
        question, answer = f"{i % 9} and {i % 4}?", f"{i % 9 + i % 4}"
        asked = [{"role": "user", "content": question}]
        chats.append({"messages": [*asked, {"role": "assistant", "content": answer}]})
        pairs.append({"prompt": asked, "chosen": f"{answer}, said the owl", "rejected": "no"})
    for name, rows in (("chats", chats), ("pairs", pairs)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def final(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "final" / "model.safetensors")


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def same_run(sabia: Commands, made: Path, place: Path, rows: str, *more: object) -> None:
    for name, model, base in (
        ("codes", made / "base" / "final", ("--lora-base", "nf4")),
        ("plain", made / "decoded", ()),
    ):
        words = ("sft", made / rows, "--model", model, *TRAIN, *base, *more, "-o", place / name)
        done = sabia(*words)
        assert done.returncode == 0, done.stderr
    assert losses(place / "codes") == losses(place / "plain")
    ours, theirs = final(place / "codes"), final(place / "plain")
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_final_is_that_of_adapters_on_the_decoded_model(
    made: Path, tmp_path: Path, sabia: Commands
) -> None:
    same_run(sabia, made, tmp_path, "chats.jsonl")
    sizes = [sum(p.stat().st_size for p in (tmp_path / name / "checkpoints").rglob("*"))
             for name in ("codes", "plain")]  # fmt: skip
    assert sizes[0] < 0.8 * sizes[1]  # no frozen matrices
    words = ("sft", made / "chats.jsonl", "--model", made / "base" / "final", "--lora-base", "int4")
    words += ("--length", "96")
    for more, message in (
        ((), "--lora-base: only with --lora-rank or --adapter"),
        (("--lora-rank", "2", "--precision", "nvfp4"), "--lora-base: int4 with --precision nvfp4"),
    ):
        done = sabia(*words, *more, "-o", tmp_path / "other")
        assert done.returncode == 2 and message in done.stderr.decode()


@pytest.mark.parametrize(
    ("loss", "recipe"),
    [
        ("", "nf4"),
        *[pytest.param(loss, "nf4-double", marks=pytest.mark.slow) for loss in ("dpo", "reward")],
    ],
)
def test_codes_of_a_checkpoint_in_nf4_are_kept(
    made: Path, tmp_path: Path, loss: str, recipe: str, sabia: Commands
) -> None:
    """The run is that on the decoded checkpoint, whose values are not rounded again."""
    words = ("--model", made / "base" / "final", "-o", tmp_path / "q", "--recipe", recipe)
    words += ("--rounding", "rtn")
    assert sabia("quantize", *words).returncode == 0
    spec, params = hub.load_model(tmp_path / "q")
    hub.save_model(tmp_path / "decoded", spec, params, tokenizer_from=tmp_path / "q")
    rows, more = ("pairs", ("--loss", loss)) if loss else ("chats", ())
    for name, model, base in (("codes", "q", ("--lora-base", "nf4")), ("plain", "decoded", ())):
        words = ("sft", made / f"{rows}.jsonl", "--model", tmp_path / model, *TRAIN[:-1], *base)
        done = sabia(*words, *more, "-o", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert (b"is in NF4 already; its codes are kept" in done.stderr) == (name == "codes")
    assert losses(tmp_path / "codes") == losses(tmp_path / "plain")
    ours, theirs = final(tmp_path / "codes"), final(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto", "orpo", "reward"])
def test_preferences(made: Path, tmp_path: Path, loss: str, sabia: Commands) -> None:
    same_run(sabia, made, tmp_path, "pairs.jsonl", "--loss", loss)


@pytest.mark.slow
def test_killed_and_on_two_processes(made: Path, tmp_path: Path, sabia: Commands) -> None:
    words = ("sft", made / "chats.jsonl", "--model", made / "base" / "final", *TRAIN)
    words += ("--lora-base", "nf4", "--save-every", "1")
    assert sabia(*words, "-o", tmp_path / "one").returncode == 0
    line = (sys.executable, "-m", "sabia.cli.main", *words, "-o", tmp_path / "two")
    through_kills(line, 5, random.Random(3), 9.0, tmp_path / "scratch")
    ours, theirs = final(tmp_path / "one"), final(tmp_path / "two")
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    line = (*torchrun(2), *map(str, words), "-o", str(tmp_path / "three"))
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert difference(tmp_path / "one", tmp_path / "three") <= 1e-5


@pytest.mark.slow
def test_peft_reads_the_adapter_on_the_decoded_model(
    made: Path, tmp_path: Path, sabia: Commands
) -> None:
    peft = pytest.importorskip("peft", reason="the reader of adapters")
    transformers = pytest.importorskip("transformers", reason="the model that is adapted")
    import torch

    words = ("sft", made / "chats.jsonl", "--model", made / "base" / "final", *TRAIN)
    done = sabia(*words, "--lora-base", "nf4", "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    read, ids = transformers.AutoModelForCausalLM.from_pretrained, torch.arange(20)[None] + 7
    with torch.no_grad():
        merged = read(tmp_path / "run" / "final")(ids).logits
        gaps = []
        for model in (made / "decoded", made / "base" / "final"):
            adapted = peft.PeftModel.from_pretrained(read(model), tmp_path / "run" / "adapter")
            gaps.append(float((adapted(ids).logits - merged).abs().max()))
    assert gaps[0] <= 1e-5 < 1e-3 < gaps[1]


@pytest.mark.slow
def test_the_policy_of_grpo(tmp_path: Path, sabia: Commands) -> None:
    """Samples are drawn from codes and adapters; the divergence is from the decoded model."""
    write_policy(tmp_path)
    with_decoded(tmp_path / "model", tmp_path / "decoded", "int4")
    for name, model, base in (
        ("codes", "model", ("--lora-base", "int4")),
        ("plain", "decoded", ()),
    ):
        words = ("grpo", tmp_path / "prompts.jsonl", "--model", tmp_path / model, *POLICY, *base)
        done = sabia(*words, "-o", tmp_path / name, "-q")
        assert done.returncode == 0, done.stderr
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("codes", "plain")
    ]
    assert len(rows[0]) == len(rows[1]) == 4 and rows[0][-1]["kl"] > 1e-3
    for ours, theirs in zip(*rows, strict=True):
        assert ours["reward"] == theirs["reward"]
        assert ours["kl"] == pytest.approx(theirs["kl"], abs=1e-6)
        assert ours["logprob_gap_max"] <= 1e-4
    ours, theirs = final(tmp_path / "codes"), final(tmp_path / "plain")
    assert all(np.abs(ours[name] - theirs[name]).max() <= 1e-5 for name in ours)
    done = sabia(*words, "--lora-base", "nf4", "--sampler-url", "http://127.0.0.1:1",
                 "--sampler-folder", tmp_path, "-o", tmp_path / "other")  # fmt: skip
    assert done.returncode == 2 and b"--sampler-url: not together with" in done.stderr
