"""The tokenizer and the chat template of a model in a GGUF file.

Two kinds are written: byte-level BPE (`gpt2`), whose splitting pattern is one that llama.cpp knows
by name, and SentencePiece's BPE with byte fallback (`llama`). Of the latter llama.cpp reads no
merges: it joins the two neighbours whose text is the token with the highest score. That gives the
ids of the merges where every way to divide a token into two tokens is a merge, the merges of a
token follow each other, and all characters are tokens, as in conversions of SentencePiece models;
scores are numbers of merges, negated. Other tokenizers are refused. Rows of the embedding without a
token get the unused token [PADn].
"""

import json
from dataclasses import dataclass
from typing import Any

from gguf import GGUFWriter, TokenType

from sabia.core.errors import UsageError
from sabia.core.text.tokenize.bpe_patterns import GPT2_PATTERN, cl100k_pattern, o200k_pattern
from sabia.core.text.tokenize.tokenizer import Tokenizer

THREE, ONE = r"\p{N}{1,3}", r"\p{N}"
PATTERNS = {GPT2_PATTERN: "gpt-2", cl100k_pattern(THREE): "llama-bpe", cl100k_pattern(ONE): "qwen2"}
PATTERNS |= {o200k_pattern(THREE, True): "gpt-4o", o200k_pattern(ONE, False): "tekken"}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BLANK = "▁"
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
PREPEND = {"type": "Prepend", "prepend": BLANK}


@dataclass(frozen=True)
class Blanks:
    """A tokenizer of SentencePiece's kind: whether a text gets a blank before it, and the scores of
    the tokens that merges make."""

    prefix: bool
    scores: dict[str, float]


def add_vocabulary(writer: GGUFWriter, tokenizer: Tokenizer | None, size: int) -> None:
    """Add the tokens, merges, special tokens and chat template for `size` rows of the embedding.

    Raises UsageError for a tokenizer that has no such form.
    """
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    definition, kind = json.loads(tokenizer.definition), check_vocabulary(tokenizer)
    known = {number: text for text, number in definition["model"]["vocab"].items()}
    kinds = dict.fromkeys(known, TokenType.NORMAL)
    if isinstance(kind, Blanks):
        kinds |= {definition["model"]["vocab"][text]: TokenType.BYTE for text in BYTES}
    for token in definition["added_tokens"]:
        known[token["id"]] = token["content"]
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    tokens = [known.get(number, f"[PAD{number}]") for number in range(size)]
    writer.add_tokenizer_model("llama" if isinstance(kind, Blanks) else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(number, TokenType.UNUSED) for number in range(size)])
    if isinstance(kind, Blanks):
        writer.add_token_scores([kind.scores.get(token, 0.0) for token in tokens])
        writer.add_add_space_prefix(kind.prefix)
        if (unknown := definition["model"].get("unk_token")) in definition["model"]["vocab"]:
            writer.add_unk_token_id(definition["model"]["vocab"][unknown])
    else:
        writer.add_tokenizer_pre(kind)
        writer.add_token_merges([" ".join(pair) for pair in _merges(definition["model"])])
    if tokenizer.bos_id is not None:
        writer.add_bos_token_id(tokenizer.bos_id)
    if tokenizer.eos_id is not None:
        writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.pad_id)
    first = tokenizer.encode("a", bos=True)[:1]
    writer.add_add_bos_token(first == [tokenizer.bos_id])
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def check_vocabulary(tokenizer: Tokenizer) -> str | Blanks:
    """The name of the splitting pattern of byte-level BPE, or of SentencePiece's kind the scores.

    Raises UsageError for a tokenizer that has no form in GGUF files.
    """
    definition = json.loads(tokenizer.definition)
    model, normalizer = definition["model"], definition["normalizer"] or {}
    kind, pattern = model["type"], _pattern(definition["pre_tokenizer"])
    if kind == "BPE" and pattern in PATTERNS and normalizer.get("type", "NFC") == "NFC":
        return PATTERNS[pattern]
    if kind == "BPE" and model.get("byte_fallback"):
        return _blanks(definition)
    kinds = f"{kind}, splitting by {pattern}, normalizer {normalizer.get('type', 'none')}"
    raise UsageError(
        f"--format gguf: the tokenizer is {kinds} (expected SentencePiece's BPE, or byte-level "
        f"BPE, split as by one of {', '.join(PATTERNS.values())})"
    )


def _blanks(definition: dict[str, Any]) -> Blanks:
    model, normalizer = definition["model"], definition["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    before = definition["pre_tokenizer"] or {}
    # a split by blanks, none of which the normalizer leaves (Gemma)
    splits = before and before != {"type": "Split", "pattern": {"String": " "}, "invert": False,
                                   "behavior": "MergedWithPrevious"}  # fmt: skip
    if splits or steps not in ([REPLACE], [PREPEND, REPLACE]):
        raise UsageError(
            f"--format gguf: a BPE tokenizer with byte fallback that splits texts by {before} "
            f"after {steps} (expected blanks replaced by {BLANK}, and no splitting)"
        )
    added = {token["content"] for token in definition["added_tokens"]}
    return Blanks(len(steps) == 2, _scores(model, added))


def _scores(model: dict[str, Any], added: set[str]) -> dict[str, float]:
    """The negated number of the first merge of each token that merges make. Raises UsageError where
    the highest scores would not give the ids of the merges.

    added: tokens that are found in a text before it is merged.
    """
    vocabulary, merges = model["vocab"], _merges(model)
    scores: dict[str, float] = {}
    last = ""
    for number, (left, right) in enumerate(merges):
        text = left + right
        if text != last and text in scores:
            raise _differs(f"merges of {text!r} do not follow each other")
        scores.setdefault(text, -float(number))
        last = text
    pairs = {(left, right) for left, right in merges}
    for text in vocabulary.keys() - {*BYTES, *added}:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if (left in vocabulary and right in vocabulary) != ((left, right) in pairs):
                raise _differs(f"{left!r} and {right!r} are not merged to the token {text!r}")
        if not all(character in vocabulary for character in text):
            raise _differs(f"a character of {text!r} is no token")
    missing = [text for text in BYTES if text not in vocabulary]
    if missing:
        raise _differs(f"there is no token {missing[0]}")
    return scores


def _differs(why: str) -> UsageError:
    return UsageError(
        f"--format gguf: llama.cpp would encode by scores, with other ids: {why} (expected the "
        "merges of a SentencePiece model)"
    )


def _merges(model: dict[str, Any]) -> list[list[str]]:
    return [x.split(" ") if isinstance(x, str) else list(x) for x in model["merges"]]


def _pattern(rule: Any) -> str | None:
    """The regular expression of a byte-level `pre_tokenizer`; None for other kinds."""
    steps = (rule or {}).get("pretokenizers", [rule]) if rule else []
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if steps[0].get("use_regex", True) else None
    if len(steps) == 2 and steps[0]["type"] == "Split" and not steps[-1].get("use_regex", True):
        split = steps[0]
        whole = split["behavior"] == "Isolated" and not split["invert"]
        return split["pattern"].get("Regex") if whole else None
    return None
