"""Kinds of tokenizers: round trips, digits, special tokens, sizes, and what transformers reads."""

import pytest

from sabia.core.errors import UsageError
from sabia.core.options.tokenize import TokenizerTraining
from sabia.core.text.tokenize.bpe_encoder import KernelEncoder
from sabia.core.text.tokenize.tokenizer_training import specials, target, train

MODELS, PATTERNS = (TokenizerTraining.table[name].choices for name in ("model", "pattern"))
TEXTS = [
    f"The sum of {a} and {b * 137} is {a + b}.\n A soma é {a + b}; não é difícil, d'água e Água."
    for a in range(14)
    for b in range(14)
]
HARD = [
    "",
    " ",
    "  x \n\n y\t",
    "漢字😀 é",
    "<0x0A> 1234567",
    "\u0000\u200b",
    "WON'T  12.5",
    "~" * 90,
]


def trained(**settings):
    return train(TEXTS, TokenizerTraining(**({"vocab_size": 700} | settings)))


@pytest.mark.parametrize("model", MODELS)
def test_any_text_decodes_back(model):
    tokenizer = trained(model=model)
    for text in HARD + TEXTS[:20]:
        assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text
    assert tokenizer.vocab_size <= 700
    first = specials(TokenizerTraining(model=model))[:4]
    assert [tokenizer.token_id(t) for t in first] == [0, 1, 2, 3]
    if model != "bpe":
        assert tokenizer.token_id("<unk>") not in tokenizer.encode_ordinary("漢\u0001字😀")


@pytest.mark.parametrize("model", ["bpe", "bpe-fallback"])
def test_training_is_deterministic(model):
    assert trained(model=model).definition == trained(model=model).definition


@pytest.mark.parametrize("model", MODELS)
def test_transformers_reads_every_kind(model, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the judge of the ids")
    tokenizer = trained(model=model)
    tokenizer.save(tmp_path)
    judge = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in HARD + TEXTS[:5]:
        assert judge(text)["input_ids"] == tokenizer.encode(text)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_by_name_are_what_the_kernel_knows(pattern):
    for digits, most in (("single", 1), ("three", 3)):
        tokenizer = trained(pattern=pattern, digits=digits)
        KernelEncoder(tokenizer)
        pieces = [p for p, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str("a 1234567")]
        numbers = [p.strip("Ġ") for p in pieces if any(c.isdigit() for c in p)]
        assert "".join(numbers) == "1234567" and max(map(len, numbers)) == most


@pytest.mark.parametrize("model", ["bpe", "bpe-fallback"])
def test_size_is_a_multiple_and_special_tokens_are_as_asked(model):
    kind = {"vocab_multiple": 128, "reserved": 2, "special_tokens": "<a>,<b>", "model": model}
    tokenizer = trained(vocab_size=5000, **kind)  # more than the texts give
    assert tokenizer.vocab_size % 128 == 0 and tokenizer.vocab_size < 5000
    assert [tokenizer.token_id(t) for t in ("<a>", "<b>", "<|reserved_1|>")] == [4, 5, 7]
    assert tokenizer.encode("<b>") == [5] and tokenizer.token_id("<|reserved_2|>") is None
    filled = [t for t in tokenizer.backend.get_vocab() if t.startswith("<|unused_")]
    assert {tokenizer.token_id(t) for t in filled} <= tokenizer.special_ids


def test_normalisation_and_least_count():
    assert trained(normalize="nfc").encode("e\u0301") == trained(normalize="nfc").encode("é")
    assert trained(normalize="nfkc").encode("ﬁ") == trained(normalize="nfkc").encode("fi")
    few = ["abab cdcd"] * 3 + ["efef"]
    sizes = [
        train(few, TokenizerTraining(vocab_size=600, min_frequency=n)).vocab_size for n in (2, 4, 9)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "wordpiece"}, "expected bpe, bpe-fallback or unigram"),
        ({"pattern": "bert"}, "expected cl100k"),
        ({"model": "unigram", "pattern": "gpt2"}, "--pattern: only with --model bpe"),
        ({"model": "unigram", "min_frequency": 2}, "--min-frequency: only with --model bpe"),
        ({"special_tokens": "<a>,<a>"}, "each once"),
        (
            {"vocab_size": 280, "reserved": 30},
            "280 is too small .expected at least 290",
        ),
        ({"vocab_multiple": 0}, "--vocab-multiple: 0 is out of range"),
    ],
)
def test_usage_errors_say_what_to_do(settings, message):
    with pytest.raises(UsageError, match=message):
        target(TokenizerTraining.read(settings))
