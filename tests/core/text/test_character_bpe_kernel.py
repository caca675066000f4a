"""The compiled kernel gives the ids of `tokenizers` for BPE of characters, as Gemma has it.

Tokenizers are trained here in the configurations that published files have, and in others that
change which characters are unknown, where texts are split and which characters merges join.
"""

import argparse
import inspect
import json
import random
import time
from functools import cache

import pyarrow as pa
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from sabia.core.options.tokenize import TokenizerTraining
from sabia.core.text.tokenize.bpe_encoder import KernelEncoder
from sabia.core.text.tokenize.bpe_patterns import Unsupported
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.tokenizer_training import train
from tests.support.fuzzed_texts import WORDS, added, differing, fuzz, known

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
LLAMA = {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}
GEMMA_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
               "invert": False}  # fmt: skip
TOKENS = [added("<s>", 1, special=True), added("<tool>", 901), added("<tool>x", 902),
          added("\n\n", 903), added("▁▁", 904), added("  \n", 905)]  # fmt: skip
LATE = [added("the", 906, normalized=True), added(" of", 907, normalized=True),
        added("<|sp|>", 908, special=True, normalized=True),
        added("▁▁▁", 909, normalized=True), added("ok", 910, normalized=True)]  # fmt: skip


def metaspace(scheme, split):
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


@cache
def trained(size: int, whole_lines: bool) -> str:
    """The model of a tokenizer of `size` pieces; of whole lines, merges join words."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    if not whole_lines:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    lines = inspect.getsource(argparse)[:60_000].splitlines(keepends=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False
    )
    backend.train_from_iterator([*lines, *[" ".join(WORDS[i:]) for i in range(20)]], trainer)
    return json.dumps(json.loads(backend.to_str())["model"])


def tokenizer(
    normalizer=None, chain=None, size=900, whole_lines=False, tokens=(), drop=(), **model
) -> Tokenizer:
    """A tokenizer of characters; `drop` are tokens that its vocabulary does not have."""
    own = json.loads(trained(size, whole_lines)) | model
    drop = set(drop)
    own["vocab"] = {t: n for t, n in own["vocab"].items() if t not in drop}
    own["merges"] = [m for m in own["merges"] if not drop & {*m, "".join(m)}]
    definition = {"version": "1.0", "truncation": None, "padding": None, "decoder": None,
                  "post_processor": None, "normalizer": normalizer, "pre_tokenizer": chain,
                  "added_tokens": list(tokens), "model": own}  # fmt: skip
    return Tokenizer(json.dumps(definition), {"eos_token": "</s>"})


NO_BYTES = {"byte_fallback": False}
KINDS = {
    "llama-2": {"normalizer": LLAMA},
    "llama-2 with added tokens": {"normalizer": LLAMA, "tokens": TOKENS + LATE},
    "llama-2 of 2,500 pieces": {"normalizer": LLAMA, "size": 2_500},
    "llama-2 whose merges join words": {"normalizer": LLAMA, "whole_lines": True},
    "mistral": {"chain": metaspace("first", False), "tokens": TOKENS},
    "mistral with late added tokens": {"chain": metaspace("first", False), "tokens": LATE},
    "metaspace": {"chain": metaspace("always", True), "tokens": TOKENS + LATE},
    "metaspace of whole lines": {"chain": metaspace("always", True), "whole_lines": True},
    "metaspace without a prefix": {"chain": metaspace("never", True), "size": 500},
    "metaspace of old files": {
        "chain": {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    },
    "metaspace, unsplit": {"chain": metaspace("always", False), "tokens": TOKENS},
    "gemma": {"normalizer": REPLACE, "chain": GEMMA_SPLIT, "tokens": TOKENS, "size": 2_500},
    "gemma whose merges join words": {
        "normalizer": REPLACE, "chain": GEMMA_SPLIT, "tokens": TOKENS + LATE, "whole_lines": True
    },
    "nfc": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, LLAMA]}},
    "single digits": {
        "normalizer": REPLACE,
        "chain": {"type": "Sequence",
                  "pretokenizers": [{"type": "Digits", "individual_digits": True}]},
    },
    "no replacement of blanks": {},
    "unknown characters": {"normalizer": LLAMA, "fuse_unk": False} | NO_BYTES,
    "fused unknown characters": {"normalizer": LLAMA} | NO_BYTES,
    "some bytes": {"normalizer": LLAMA, "drop": BYTES[0x80:0xC4:3]},
    "some bytes, not fused": {"normalizer": LLAMA, "drop": BYTES[1:0xE4:5], "fuse_unk": False},
    "dropped characters": {"normalizer": LLAMA, "unk_token": None, "drop": "ac"} | NO_BYTES,
    "common characters unknown": {"normalizer": LLAMA, "drop": "ac"} | NO_BYTES,
    "common characters as bytes": {"normalizer": LLAMA, "drop": "act"},
    "whole pieces first": {"chain": metaspace("always", True), "ignore_merges": True},
    "whole texts first": {"normalizer": LLAMA, "ignore_merges": True, "whole_lines": True},
}  # fmt: skip
HARD = ["", " ", "▁", "  ", "a", " a", "▁a", "a ▁ b", "\n", "\n\n▁the", "the", " the", "the of the",
        "<tool>", "<tool> the", " <tool>x<tool>the", "<|sp|>ok", "ok <|sp|>", "<s>a", "a<s> b",
        "\x00", "\u200b\u0301", "x" * 70, " " * 70, "▁" * 70, "\u4e00" * 70, "a\ufffdb\ufffd",
        "e\u0301\u4e00\U0001f468\u200d\U0001f469", "<0x0A>", "<unk>", "the<unk>the"]  # fmt: skip


@cache
def fallback() -> Tokenizer:
    return train([" ".join(WORDS)] * 3, TokenizerTraining(model="bpe-fallback", vocab_size=700))


@pytest.mark.parametrize("name", KINDS)
def test_same_ids_on_awkward_strings(name):
    texts = HARD + fuzz(1_000, len(name)) + known(fuzz(1_000, 40))
    assert differing(tokenizer(**KINDS[name]), texts) == []


def test_same_ids_for_our_own_training():
    assert differing(fallback(), HARD + fuzz(1_000, 41) + known(fuzz(1_000, 42))) == []


@pytest.mark.parametrize("name", ["llama-2", "gemma whose merges join words", "some bytes"])
def test_merges_may_come_in_any_order(name):
    definition = json.loads(tokenizer(**KINDS[name]).definition)
    random.Random(0).shuffle(definition["model"]["merges"])
    shuffled = Tokenizer(json.dumps(definition), {})
    assert differing(shuffled, [*fuzz(500, 43), "the argument of the " * 40, "the" * 90]) == []


def test_whole_pieces_that_no_merge_makes():
    own = json.loads(tokenizer(**KINDS["whole pieces first"]).definition)
    own["model"]["vocab"] |= {"▁qzx,": 2_000, "▁" * 9: 2_001, "▁q▁zx": 2_002}
    split = Tokenizer(json.dumps(own), {})
    assert split.encode_ordinary(" qzx,") == [2_000]
    texts = ["qzx,", "a qzx, b", " qzx,.", "qzx", " " * 9, "▁qzx,", "q zx", " q zx", "q▁zx"]
    assert differing(split, texts) == []
    own["pre_tokenizer"], own["normalizer"] = None, LLAMA
    unsplit = Tokenizer(json.dumps(own), {})
    assert unsplit.encode_ordinary("q zx") == [2_002]
    assert differing(unsplit, texts) == []


@pytest.mark.parametrize("where", ["unk_token", "byte"])
def test_merges_of_tokens_that_are_no_characters(where):
    own = json.loads(tokenizer(**KINDS["llama-2"]).definition)
    model = own["model"]
    left = "<unk>" if where == "unk_token" else "<0x0A>"
    model["vocab"][left + "a"] = 2_000
    model["merges"] = [[left, "a"], *model["merges"]]
    model["vocab"].pop("q")
    model["byte_fallback"] = where == "byte"
    model["vocab"].pop("\n", None)
    model["merges"] = [m for m in model["merges"] if not {"q", "\n"} & set("".join(m))]
    merged = Tokenizer(json.dumps(own), {})
    texts = ["qa", "qqa", "b\na", "\n\naq", "a\n", "xqa the\na"]
    assert any(2_000 in ids for ids in merged.encode_ordinary_batch(texts))
    assert differing(merged, texts + fuzz(300, 44)) == []


def test_a_blank_before_a_text_changes_no_other_text():
    texts = ["a", "", "the", "\U0001f468", "b"]
    for name in ("llama-2", "metaspace", "mistral"):
        assert differing(tokenizer(**KINDS[name]), texts * 3) == []
    kernel = KernelEncoder(tokenizer(**KINDS["llama-2"]))
    part = pa.array(["\u4e00" * 5, *texts, "\u4e00"]).slice(1, 5)
    whole = kernel.encode(pa.array(texts))
    assert all((a == b).all() for a, b in zip(kernel.encode(part), whole, strict=True))
    assert part.to_pylist() == texts


@pytest.mark.parametrize("name", ["llama-2", "gemma whose merges join words", "whole texts first"])
def test_time_is_linear_in_the_length_of_a_text(name):
    kernel = KernelEncoder(tokenizer(**KINDS[name]))
    kernel.encode(pa.array(["a" * 100]))

    def seconds(text):
        column = pa.array([text])
        start = time.process_time()
        kernel.encode(column)
        return time.process_time() - start

    letters = "".join(random.Random(1).choices("the of argument ", k=1_000_000))
    for text in ("a" * 1_000_000, " " * 1_000_000, letters, "\u4e00" * 300_000):
        assert seconds(text) < 40 * max(seconds(text[: len(text) // 10]), 0.004)
        assert seconds(text) < 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"normalizer": PREPEND}, "normalizer Prepend without Replace"),
        ({"normalizer": {"type": "NFKC"}}, "normalizer NFKC"),
        ({"normalizer": REPLACE | {"pattern": {"Regex": " +"}}}, "normalizer Replace"),
        ({"normalizer": LLAMA, "chain": metaspace("first", True)}, "Metaspace after Prepend"),
        ({"chain": metaspace("first", True) | {"replacement": "_"}}, "Metaspace of '_'"),
        ({"chain": GEMMA_SPLIT}, "pre-tokenizer Split"),
        ({"chain": {"type": "Whitespace"}}, "pre-tokenizer Whitespace"),
        ({"normalizer": REPLACE, "drop": ["▁"]}, "no token for ▁"),
        ({"unk_token": "<none>"}, "no token for its unk_token '<none>'"),
        ({"tokens": [added("x", 5, single_word=True)]}, "single_word of the added token 'x'"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(settings, reason):
    with pytest.raises(Unsupported) as refused:
        KernelEncoder(tokenizer(**settings))
    assert reason in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_same_ids_on_fifty_thousand_strings(name):
    texts = fuzz(25_000, 45) + known(fuzz(25_000, 46))
    assert differing(tokenizer(**KINDS[name]), texts) == []
    if name == "llama-2":
        assert differing(fallback(), texts) == []
