"""The compiled BPE kernel gives the ids of `tokenizers` on every text, whatever the pattern.

The judge is the library itself: every code point, random strings of awkward characters for each
known pattern, added tokens, NFC, whole tokens, and (slow) many megabytes of real text.
"""

import json
import os
import random
import time
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.text.tokenize.bpe_encoder import KernelEncoder
from sabia.core.text.tokenize.bpe_patterns import (
    CJK_PATTERN,
    DEEPSEEK_PATTERN,
    GPT2_PATTERN,
    Unsupported,
    cl100k_pattern,
    known_patterns,
    o200k_pattern,
)
from sabia.core.text.tokenize.bpe_tables import byte_of_character
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.kernels.text.unicode_classes import CJK, CLASS_BITS, UNKNOWN, class_table
from tests.support.fuzzed_texts import WORDS, added, differing, fuzz, known

TEXTS = [" ".join(WORDS), "the sum of 12 and 345 is 357\n\n  and so on " * 3]
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(pattern):
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


def digits(individual):
    return {"type": "Digits", "individual_digits": individual}


CHAINS = {
    "gpt2": [LEVEL | {"use_regex": True}],
    "gpt2 as a split": [split(GPT2_PATTERN), LEVEL],
    "llama3": [split(cl100k_pattern(r"\p{N}{1,3}")), LEVEL],
    "qwen2": [split(cl100k_pattern(r"\p{N}")), LEVEL],
    "qwen3.5": [split(cl100k_pattern(r"\p{N}", marks=True)), LEVEL],
    "o200k": [split(o200k_pattern(r"\p{N}{1,3}", True)), LEVEL],
    "tekken": [split(o200k_pattern(r"\p{N}", False)), LEVEL],
    "deepseek": [split(r"\p{N}{1,3}"), split(CJK_PATTERN), split(DEEPSEEK_PATTERN), LEVEL],
    "starcoder": [digits(True), LEVEL | {"use_regex": True}],
    "runs of digits": [digits(False), split(cl100k_pattern(r"\p{N}+")), LEVEL],
}


@cache
def trained() -> Tokenizer:
    return train_bpe(TEXTS * 3, 600)


def changed(chain=None, **settings) -> Tokenizer:
    definition = json.loads(trained().definition)
    if chain is not None:
        definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": chain}
    for name, value in settings.items():
        if name == "ignore_merges":
            definition["model"][name] = value
        else:
            definition[name] = value
    return Tokenizer(json.dumps(definition), trained().config)


@pytest.mark.parametrize("name", CHAINS)
def test_same_ids_on_awkward_strings(name):
    assert differing(changed(CHAINS[name]), fuzz(500, len(name)) + TEXTS + ["", " "]) == []


@pytest.mark.parametrize("name", CHAINS)
def test_without_the_librarys_help_the_pattern_is_the_same(name):
    assert differing(changed(CHAINS[name]), known(fuzz(500, 11))) == []


def test_classes_are_those_of_the_regular_expressions():
    from tokenizers import Regex, pre_tokenizers

    table = class_table()
    known = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000 and not table[c] & UNKNOWN]
    sample = known[:66_000] + known[66_000::13]
    text = "".join(map(chr, sample))
    kinds = {r"\p{Lu}|\p{Lt}": (3,), r"\p{Ll}": (4,), r"\p{Lm}|\p{Lo}": (5,), r"\p{M}": (6,),
             r"\p{N}": (7,), r"[\p{P}\p{S}]": (8,), r"\s": (1, 2)}  # fmt: skip
    for pattern, classes in kinds.items():
        step = pre_tokenizers.Split(Regex(f"(?:{pattern})+"), "removed")
        outside = {c for word, _ in step.pre_tokenize_str(text) for c in word}
        members = {c for c in sample if chr(c) not in outside}
        assert members == {c for c in sample if (table[c] & CLASS_BITS) in classes}
    assert all(table[ord(c)] & CJK for c in "一龥぀ゟ゠ヿ") and not table[ord("가")] & CJK


@pytest.mark.parametrize("text", ["'\u017f", "\u0301ABC", "  5", "a\u0301A", "\u02b0B\u02b0"])
def test_backtracking_cases(text):
    for name in CHAINS:
        assert differing(changed(CHAINS[name]), [text, text * 2, "x" + text, text + " y"]) == []


def test_added_tokens_are_cut_out_as_the_library_does():
    tokens = json.loads(trained().definition)["added_tokens"]
    tokens += [added("<tool>", 600), added("<tool>x", 601), added("  ", 602, normalized=True),
               added("<|sp|>", 603, special=True), added("sp", 604),
               added("   ", 605, normalized=True),
               added("ok", 606, normalized=True)]  # fmt: skip
    for normalizer in (None, {"type": "NFC"}):
        tokenizer = changed(CHAINS["qwen2"], added_tokens=tokens, normalizer=normalizer)
        texts = ["a<tool>b", "<tool>x<tool>", "<|sp|>", "sp<|sp|>sp", "    a     b", "<tool>\u0338",
                 "<too", "tokok <tool>ok", "<|im_start|>user", "e\u0301<tool>e\u0301"]  # fmt: skip
        assert differing(tokenizer, texts + fuzz(300, 5)) == []


def without(characters, **model) -> Tokenizer:
    """The trained tokenizer without the tokens of these byte characters, GPT-NeoX's otherwise."""
    definition = json.loads(trained().definition)
    own = definition["model"]
    own["vocab"] = {t: n for t, n in own["vocab"].items() if not set(t) & set(characters)}
    own["merges"] = [m for m in own["merges"] if not set("".join(m)) & set(characters)]
    definition["model"] = own | model
    definition["normalizer"] = {"type": "NFC"}
    definition["pre_tokenizer"] = LEVEL | {"use_regex": True}
    runs = [added(" " * n, 700 + n, normalized=True) for n in range(2, 25)]
    definition["added_tokens"] = definition["added_tokens"][:2] + runs
    return Tokenizer(json.dumps(definition), trained().config)


def byte_characters(values) -> str:
    characters = {byte: character for character, byte in byte_of_character().items()}
    return "".join(characters[byte] for byte in values)


UNUSED = [0xC0, 0xC1, *range(0xF5, 0x100)]
INCOMPLETE = {
    "gpt-neox": (UNUSED, {}),
    "bytes that occur are dropped": ([*b"aqz ", 0xC3, 0x80, 0xF0], {}),
    "unknown tokens": ([*b"aqz ", 0xC3, 0x80, 0xF0], {"unk_token": "the"}),
    "fused unknown tokens": ([*b"aqz ", 0xC3, 0x80], {"unk_token": "the", "fuse_unk": True}),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_vocabularies_without_some_bytes(name):
    values, model = INCOMPLETE[name]
    tokenizer = without(byte_characters(values), **model)
    texts = ["aq", "qaz", "a" * 100, "b" * 70 + "qa" * 9, "x  qa   z" + " " * 60, "aé́À"]
    texts += fuzz(1_000, 31) + known(fuzz(1_000, 34))
    assert differing(tokenizer, texts * 2) == []


def test_nfc_is_applied():
    tokenizer = changed(CHAINS["qwen2"], normalizer={"type": "NFC"})
    texts = ["e\u0301", "\u1100\u1161\u11a8", "A\u030a \u212b", "\u0e2a\u0e27", "q\u0307\u0323"]
    assert differing(tokenizer, texts + fuzz(400, 6)) == []


def test_whole_tokens_come_first_where_the_model_says_so():
    definition = json.loads(trained().definition)
    vocab = definition["model"]["vocab"]
    definition["model"]["ignore_merges"] = True
    vocab["qzx"] = 600  # no merge makes it
    vocab["\u0120" * 90] = 601
    definition["added_tokens"] = definition["added_tokens"][:4]
    tokenizer = Tokenizer(json.dumps(definition), trained().config)
    assert tokenizer.encode_ordinary("qzx") == [600]
    assert differing(tokenizer, ["qzx", "a qzx", "qzxq", " " * 90, " " * 91, " " * 90 + "\n"]) == []
    assert differing(tokenizer, fuzz(200, 3)) == []


def test_merges_may_come_in_any_order():
    """Merges of a shuffled vocabulary, where a later pair may have a lower rank."""
    definition = json.loads(trained().definition)
    random.Random(0).shuffle(definition["model"]["merges"])
    tokenizer = Tokenizer(json.dumps(definition), trained().config)
    assert differing(tokenizer, [*fuzz(200, 4), "the sum of" * 30, "thesumof" * 30]) == []


@pytest.mark.parametrize("size", [15, 16, 17, 24, 63, 64, 65, 72, 73, 200, 5000])
def test_long_pieces(size):
    draw = random.Random(size)
    texts = ["a" * size, "".join(draw.choices("thequickbrownfox", k=size)), "\u4e00" * size]
    assert differing(trained(), texts * 2) == []


def test_a_small_cache_changes_nothing(monkeypatch):
    from sabia.kernels.bpe import definitions

    monkeypatch.setattr(definitions, "SMALL_ROWS", 8)
    monkeypatch.setattr(definitions, "LARGE_ROWS", 8)
    texts = fuzz(300, 9)
    assert differing(trained(), texts + texts) == []


def test_time_is_linear_in_the_length_of_a_piece():
    kernel = KernelEncoder(trained())
    kernel.encode(pa.array(["a" * 100]))

    def seconds(text):
        column = pa.array([text])
        start = time.process_time()
        kernel.encode(column)
        return time.process_time() - start

    letters = "".join(random.Random(1).choices("thequickbrownfox", k=1_000_000))
    for text in ("a" * 1_000_000, " " * 1_000_000, letters):
        assert seconds(text) < 40 * max(seconds(text[:100_000]), 0.004)
        assert seconds(text) < 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
        ({"chain": [split(r"\w+"), LEVEL]}, r"pattern \w+"),
        ({"chain": [{"type": "WhitespaceSplit"}]}, "pre-tokenizer WhitespaceSplit"),
        ({"chain": [LEVEL | {"add_prefix_space": True}]}, "add_prefix_space"),
        ({"added_tokens": [added("x", 5, lstrip=True)]}, "lstrip of the added token 'x'"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(settings, reason):
    with pytest.raises(Unsupported) as refused:
        KernelEncoder(changed(**settings))
    assert reason in str(refused.value)


def test_bytes_without_a_token_are_refused_where_the_library_fails():
    with pytest.raises(Unsupported, match="no token for its unk_token '<none>'"):
        KernelEncoder(without("a", unk_token="<none>"))
    with pytest.raises(Unsupported, match="byte_fallback of byte-level pieces"):
        KernelEncoder(without("a", byte_fallback=True))
    unused = without(byte_characters(UNUSED), unk_token="<none>", byte_fallback=True)
    assert differing(unused, fuzz(100, 32)) == []


def test_text_that_is_not_utf8_is_refused():
    broken = pa.StringArray.from_buffers(
        1, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xc3(")
    )
    with pytest.raises(pa.ArrowInvalid):
        KernelEncoder(trained()).encode(broken)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_same_ids_on_fifty_thousand_strings(name):
    assert differing(changed(CHAINS[name]), fuzz(25_000, 1) + known(fuzz(25_000, 2))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", INCOMPLETE)
def test_same_ids_on_fifty_thousand_strings_without_some_bytes(name):
    values, model = INCOMPLETE[name]
    tokenizer = without(byte_characters(values), **model)
    assert differing(tokenizer, fuzz(25_000, 33) + known(fuzz(25_000, 35))) == []


@pytest.mark.slow
def test_same_ids_on_real_text():
    """Python sources and what SABIA_TEST_DATA holds, 20 MB, under every pattern in turn."""
    root = Path(np.__file__).parents[1]  # the installed packages
    files = sorted(root.rglob("*.py"))[::4]
    if data := os.environ.get("SABIA_TEST_DATA"):
        files = [
            p for e in ("txt", "html", "conllu") for p in sorted(Path(data).rglob(f"*.{e}"))
        ] + files
    texts, size = [], 0
    for path in files:
        texts.append(path.read_text("utf-8", "replace"))
        size += len(texts[-1])
        if size > 21_000_000:
            break
    assert size > 20_000_000
    for name in CHAINS:
        tokenizer = changed(CHAINS[name])
        for start in range(0, len(texts), 200):
            assert differing(tokenizer, texts[start : start + 200]) == []


def test_every_pattern_is_known_once():
    assert len(known_patterns()) == 2 + 4 * 3
