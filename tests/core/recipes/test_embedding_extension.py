"""A model gets rows for the tokens that `tokenize --extend` added, and nothing else changes."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from training_cases import LENGTH, SHAPE, Commands, corpus, losses

from sabia.core.errors import BadData, UsageError
from sabia.core.model.lora import LoraConfig
from sabia.core.model.storage import hub
from sabia.core.recipes.embedding_extension import model_for
from sabia.core.spec import from_config, new_config, parse_shape
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.text.tokenize.vocabulary_extension import extend, load_extension

OTHER = [f"zorblat {i % 13} quizzem {i % 7} frumious bandersnatch" for i in range(300)]
NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """base/ (padded), extended/ of its tokenizer, and other/, a larger tokenizer."""
    folder = tmp_path_factory.mktemp("grown")
    tokenizer = train_bpe(corpus(), 300)
    tokenizer.save(folder / "tokenizer")
    save_base(folder / "base", folder / "tokenizer", tokenizer.vocab_size + 7)
    longer, extension = extend(tokenizer, OTHER, tokenizer.vocab_size + NEW)
    longer.save(folder / "extended")
    extension.save(folder / "extended")
    train_bpe(OTHER + corpus(), tokenizer.vocab_size + NEW).save(folder / "other")
    return folder


def save_base(place, tokenizer, vocab, dtype="float32", **more):
    given = parse_shape(SHAPE) | {"vocab": vocab, "context": 64} | more
    spec = from_config(new_config(**given))
    params = {k: v.astype(hub_dtype(dtype)) for k, v in hub.init_params(spec, 3).items()}
    hub.save_model(place, spec, params, tokenizer_from=tokenizer)


def hub_dtype(name):
    from sabia.core.model.storage.safetensors_file import numpy_dtype

    return numpy_dtype(name)


@pytest.mark.parametrize(
    ("multiple", "padding", "dtype", "more"),
    [
        (1, 7, "float32", {}),
        (64, 0, "bfloat16", {"tied": True}),
        (1, 99, "float32", {"family": "gemma3"}),
        (64, 7, "bfloat16", {}),
    ],
)
def test_old_rows_stay_and_new_ones_are_means(folder, tmp_path, multiple, padding, dtype, more):
    size = load_tokenizer(folder / "tokenizer").vocab_size
    save_base(tmp_path / "base", folder / "tokenizer", size + padding, dtype, **more)
    shutil.copytree(folder / "extended", tmp_path / "extended")
    extension = replace(load_extension(folder / "extended"), multiple=multiple)
    extension.save(tmp_path / "extended")
    spec, load = model_for(str(tmp_path / "extended"), str(tmp_path / "base"), None)
    before, params = hub.load_model(tmp_path / "base")[1], load()
    rows = max(size + padding, -(-(size + NEW) // multiple) * multiple)
    assert spec.vocab_size == spec.config["vocab_size"] == rows
    assert {t.name: t.shape for t in spec.tensors()} == {k: v.shape for k, v in params.items()}
    changed = {"embed"} if spec.tied else {"embed", "head"}
    for name, old in before.items():
        new = np.asarray(params[name])
        assert new.dtype == old.dtype == hub_dtype(dtype)
        if name not in changed:
            assert np.array_equal(new, old)
            continue
        assert np.array_equal(new[:size], old[:size])
        wide = old.astype(np.float64)
        for number, piece in enumerate(extension.pieces, size):
            mean = sum(wide[i] for i in piece) / len(piece)
            np.testing.assert_allclose(new[number].astype(float), mean, rtol=8e-3, atol=1e-6)
        kept = slice(size + NEW, size + padding)
        assert np.array_equal(new[kept], old[kept])
        behind = new[max(size + padding, size + NEW) :].astype(float)
        mean = np.broadcast_to(wide[:size].mean(0), behind.shape)
        np.testing.assert_allclose(behind, mean, rtol=8e-3, atol=1e-5)


def test_a_model_that_has_the_tokens_is_left_alone(folder, tmp_path):
    size = load_tokenizer(folder / "extended").vocab_size
    save_base(tmp_path / "grown", folder / "extended", size)
    spec, load = model_for(str(folder / "extended"), str(tmp_path / "grown"), LoraConfig())
    assert spec.vocab_size == size and isinstance(load()["embed"], np.ndarray)


def test_what_cannot_grow_is_refused(folder, tmp_path):
    base, extended = str(folder / "base"), folder / "extended"
    with pytest.raises(UsageError, match=r"has \d+ tokens, .*tokenize --extend .*base"):
        model_for(str(folder / "other"), base, None)
    with pytest.raises(UsageError, match="--lora-rank: adapters would not learn the 24 tokens"):
        model_for(str(extended), base, LoraConfig())
    save_base(tmp_path / "foreign", folder / "other", 500)  # its 500 rows would do, its ids not
    assert model_for(str(extended), str(tmp_path / "foreign"), None)[0].vocab_size == 500
    (folder / "other" / "extension.json").write_text((extended / "extension.json").read_text())
    with pytest.raises(UsageError, match=r"has .* tokens"):
        model_for(str(folder / "other"), base, None)
    shutil.copytree(extended, tmp_path / "stale")
    record = load_extension(extended)
    replace(record, pieces=record.pieces[:-1]).save(tmp_path / "stale")
    with pytest.raises(BadData, match="left from another"):
        model_for(str(tmp_path / "stale"), base, None)


def test_layers_that_are_handed_on_cannot_grow(folder, tmp_path):
    size = load_tokenizer(folder / "tokenizer").vocab_size
    save_base(tmp_path / "base", folder / "tokenizer", size, family="qwen3_next")
    spec, params = hub.load_model(tmp_path / "base")
    more = {"mtp.norm.weight": np.ones(32, np.float32)}
    for name, rows in (("mtp.fc.weight", 64), ("mtp.embed.weight", size)):
        more[name] = np.ones((rows, 32), np.float32)
        shutil.rmtree(tmp_path / "base")
        tensors = hub.to_hf(spec, params) | more
        hub.write_checkpoint(
            tmp_path / "base", spec.config, tensors, tokenizer_from=folder / "tokenizer"
        )
        if rows == size:
            with pytest.raises(UsageError, match=r"mtp\.embed\.weight is copied unchanged"):
                model_for(str(folder / "extended"), str(tmp_path / "base"), None)
        else:
            assert model_for(str(folder / "extended"), str(tmp_path / "base"), None)


@pytest.fixture(scope="module")
def sabia(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def tokens(folder, sabia):
    """Rows by a tokenizer that the command extended, whose place they record."""
    texts = "".join(json.dumps({"text": text}) + "\n" for text in OTHER)
    (folder / "docs.jsonl").write_text(texts)
    done = sabia("tokenize", folder / "docs.jsonl", "--extend", folder / "base", "--vocab-size",
                 "308", "--vocab-multiple", "8", "--save-tokenizer", folder / "t", "--length",
                 LENGTH, "-o", folder / "unused.parquet")  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = sabia("tokenize", folder / "docs.jsonl", "--tokenizer", folder / "t", "--length",
                 LENGTH, "-o", folder / "rows")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert load_extension(folder / "rows" / "_tokenizer").multiple == 8
    return folder / "rows"


def test_a_run_exports_the_grown_model(folder, tokens, tmp_path, sabia):
    """With a rate that moves nothing: transformers sees the old logits, and finite new ones."""
    done = sabia("pretrain", tokens, "--model", folder / "base", "--steps", "1", "--batch", "2",
                 "--lr", "1e-30", "-o", tmp_path / "run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"initialised with the means of their pieces" in done.stderr
    final = tmp_path / "run" / "final"
    made = load_tokenizer(final)
    assert made.fingerprint == load_tokenizer(tokens / "_tokenizer").fingerprint
    rows = -(-made.vocab_size // 8) * 8
    assert json.loads((final / "config.json").read_text())["vocab_size"] == rows
    transformers = pytest.importorskip("transformers", reason="the judge of the export")
    import torch

    old = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype="float32")
    new = transformers.AutoModelForCausalLM.from_pretrained(final, dtype="float32")
    size = load_tokenizer(folder / "base").vocab_size
    ids = torch.arange(size)[None, :60]
    with torch.no_grad():
        one, other = old(input_ids=ids).logits, new(input_ids=ids).logits
    assert other.shape[-1] == rows and other.isfinite().all()
    torch.testing.assert_close(other[..., :size], one[..., :size], rtol=0, atol=1e-6)


def test_fine_tuning_grows_the_model_too(folder, tmp_path, sabia):
    chat = [{"role": "user", "content": "3 and 4"}, {"role": "assistant", "content": OTHER[2]}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 4)
    done = sabia("sft", tmp_path / "chat.jsonl", "--model", folder / "base", "--tokenizer",
                 folder / "extended", "--length", "64", "-o", tmp_path / "run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    final = tmp_path / "run" / "final"
    assert hub.load_model(final)[0].vocab_size == load_tokenizer(final).vocab_size


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_grown_run_resumes(folder, tokens, tmp_path, sabia, backend):
    words = ("pretrain", tokens, "--model", folder / "base", "--tokenizer", folder / "t",
             "--steps", "6", "--batch", "4", "--lr", "1e-2", "--backend", backend)  # fmt: skip
    whole = sabia(*words, "-o", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    stopped = sabia(*words, "-o", tmp_path / "run", at=("step", 3, "SIGTERM"))
    assert stopped.returncode == 75, stopped.stderr
    done = sabia(*words, "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    found = losses(tmp_path / "whole")
    assert found[6] < found[1]


def test_adapters_are_refused_with_the_mend(folder, tokens, tmp_path, sabia):
    done = sabia("pretrain", tokens, "--model", folder / "base", "--lora-rank", "2", "-q",
                 "-o", tmp_path / "run")  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert b"train it without adapters first" in done.stderr
