"""`sabia sft` from the shell: what is learnt, what is masked, what is rejected."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from training_cases import LENGTH, Commands, difference, load, make_tokens, without_template

SHAPE = "d=32,layers=1,heads=2,context=128"
TRAIN = ("--length", "96", "--batch", "16", "--lr", "1e-2", "--epochs", "3")


def chats(count: int) -> list[dict]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{i % 9} and {i % 4}?"},
                {"role": "assistant", "content": f"{i % 9 + i % 4}"},
            ]
        }
        for i in range(count)
    ]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory, sabia: Commands) -> Path:
    """A base model, conversations (two of them unusable) and a model tuned on them."""
    folder = tmp_path_factory.mktemp("made")
    tokens = make_tokens(folder / "tokens")
    words = ("pretrain", tokens, "--shape", SHAPE, "--steps", "5", "-o", folder / "base")
    assert sabia(*words).returncode == 0
    rows = chats(120)
    rows.insert(7, {"messages": [{"role": "user", "content": "nobody answers"}]})
    rows.append({"messages": [{"role": "user", "content": "long " * 200},
                              {"role": "assistant", "content": "yes"}]})  # fmt: skip
    chat, held = write(folder / "chat.jsonl", rows), write(folder / "held.jsonl", chats(30))
    done = sabia("sft", chat, "--model", folder / "base" / "final", *TRAIN, "--validation", held,
                 "-o", folder / "run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "notes.txt").write_bytes(done.stderr)
    return folder


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_learns_the_answers(made: Path) -> None:
    found = [row["validation_loss"] for row in metrics(made / "run") if "validation_loss" in row]
    assert found[-1] < found[0] - 1.0
    assert (made / "run" / "final" / "tokenizer.json").exists()


def test_unusable_conversations_are_rejected_with_a_reason(made: Path) -> None:
    table = pq.read_table(made / "run.rejects" / "part-00000.parquet").to_pylist()
    reasons = [row["reason"] for row in table]
    assert len(reasons) == 2
    assert "no token of the conversation was written by the assistant" in reasons[0]
    assert "expected at most --length 96" in reasons[1]
    assert "120 conversations" in (made / "notes.txt").read_text()


def test_only_the_assistant_is_counted(made: Path) -> None:
    """Tokens trained on = epochs x tokens of answers with their end-of-turn token."""
    tokenizer = load(made / "tokens")
    answers = sum(len(tokenizer.encode(row["messages"][1]["content"])) + 1 for row in chats(120))
    said = (made / "notes.txt").read_text()
    assert f"; {answers:,} of" in said
    rows = [row for row in metrics(made / "run") if "validation_tokens" in row]
    held = sum(len(tokenizer.encode(row["messages"][1]["content"])) + 1 for row in chats(30))
    assert rows[0]["validation_tokens"] == held


def test_packing_changes_no_loss(made: Path, tmp_path: Path, sabia: Commands) -> None:
    """The base model validates the same packed and one by one, and as transformers has it."""
    words = ("sft", made / "held.jsonl", "--model", made / "base" / "final", "--length", "96",
             "--validation", made / "held.jsonl", "--steps", "1", "-q")  # fmt: skip
    found = []
    for name, more in (("packed", ()), ("single", ("--no-pack",))):
        done = sabia(*words, *more, "-o", tmp_path / name)
        assert done.returncode == 0, done.stderr
        found.append(metrics(tmp_path / name)[0]["validation_loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    transformers = pytest.importorskip("transformers", reason="the judge of the loss")
    import torch

    from sabia.core.generate.chat import render_rows

    model = transformers.AutoModelForCausalLM.from_pretrained(made / "base" / "final")
    total = count = 0.0
    for row in chats(30):
        ((ids, mask),) = render_rows(row["messages"], load(made / "tokens"))
        tensor = torch.tensor([ids])
        with torch.no_grad():
            scores = model(input_ids=tensor).logits[0, :-1].log_softmax(-1)
        nll = -scores.gather(1, tensor[0, 1:, None])[:, 0].numpy()
        keep = np.array(mask[1:], bool)
        total, count = total + nll[keep].sum(), count + keep.sum()
    assert found[0] == pytest.approx(total / count, abs=1e-5)


def test_jax_learns_the_same(made: Path, tmp_path: Path, sabia: Commands) -> None:
    pytest.importorskip("jax", reason="the jax backend")
    done = sabia("sft", made / "chat.jsonl", "--model", made / "base" / "final", *TRAIN,
                 "-o", tmp_path / "run", "--backend", "jax")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert difference(made / "run", tmp_path / "run") <= 1e-5


def test_again_is_done(made: Path, sabia: Commands) -> None:
    done = sabia("sft", made / "chat.jsonl", "--model", made / "base" / "final", *TRAIN,
                 "-o", made / "run")  # fmt: skip
    assert done.returncode == 0
    assert b"already finished" in done.stderr


def ask(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


def reply(text: str, **more: str) -> dict:
    answer = {"role": "assistant", "content": text, **more}
    return {"messages": [{"role": "user", "content": "?"}, answer]}


@pytest.mark.parametrize(
    ("rows", "code", "said"),
    [
        ([{"messages": [{"role": "user", "content": "?"}]}], 65, "no usable conversation, 1 rej"),
        ([{"text": "a document"}], 65, "no usable conversation"),
        ([ask("?"), reply("x", tool_calls="["), ask("??")], 65,
         "3 rejected; 2 of them: no token of the conversation was written by the assistant"),
        ([reply("a b c " * n) for n in (9000, 9500)], 65,
         "2 rejected; 2 of them: 54011 tokens (expected at most --length 2048)"),
    ],
)  # fmt: skip
def test_nothing_to_learn(made: Path, tmp_path: Path, sabia: Commands, rows, code, said) -> None:
    chat = write(tmp_path / "chat.jsonl", rows)
    done = sabia("sft", chat, "--model", made / "base" / "final", "-o", tmp_path / "run")
    assert done.returncode == code
    assert said in done.stderr.decode()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--model: is missing (expected DIR)"),
        (("--model", "/nope"), "--model: /nope: not a model directory"),
        (("--model", "BASE", "--tokenizer", "/nope"), "--tokenizer: /nope has no tokenizer"),
        (("--model", "PLAIN"), "has no chat template"),
        (("--model", "PLAIN"), "`sabia sft --tokenizer DIR`"),
        (("--model", "BASE", "--tokenizer", "PLAIN"), "--tokenizer: "),
        (("--model", "BASE", "--eval-every", "3"), "--eval-every: only with --validation"),
    ],
)
def test_refusals(made: Path, tmp_path: Path, sabia: Commands, words, said) -> None:
    base = made / "base" / "final"
    models = {"BASE": base, "PLAIN": without_template(base, tmp_path / "plain")}
    words = [models.get(word, word) for word in words]
    done = sabia("sft", made / "chat.jsonl", *words, "-o", tmp_path / "run")
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert said in line


def test_row_longer_than_the_model(made: Path, tmp_path: Path, sabia: Commands) -> None:
    assert LENGTH < 128
    rows = [{"messages": [{"role": "user", "content": "long " * 60},
                          {"role": "assistant", "content": "yes"}]}]  # fmt: skip
    chat = write(tmp_path / "chat.jsonl", rows)
    done = sabia("sft", chat, "--model", made / "base" / "final", "-o", tmp_path / "run")
    assert done.returncode == 65
    assert b"the model's context of 128" in done.stderr
