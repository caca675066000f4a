"""The tokenizer and the chat template of a model in a GGUF file.

Byte-level BPE is written, whose splitting pattern is one that llama.cpp knows by name; other
tokenizers are refused. Rows of the embedding without a token get the unused token [PADn].
"""

import json
from typing import Any

from gguf import TokenType

from sabia.core.errors import UsageError
from sabia.core.text.tokenize.bpe_patterns import GPT2_PATTERN, cl100k_pattern, o200k_pattern
from sabia.core.text.tokenize.tokenizer import Tokenizer

THREE, ONE = r"\p{N}{1,3}", r"\p{N}"
PATTERNS = {GPT2_PATTERN: "gpt-2", cl100k_pattern(THREE): "llama-bpe", cl100k_pattern(ONE): "qwen2"}
PATTERNS |= {o200k_pattern(THREE, True): "gpt-4o", o200k_pattern(ONE, False): "tekken"}


def add_vocabulary(writer: Any, tokenizer: Tokenizer | None, size: int) -> None:
    """Add the tokens, merges, special tokens and chat template for `size` rows of the embedding.

    Raises UsageError for a tokenizer that has no such form.
    """
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    definition = json.loads(tokenizer.definition)
    pattern = check_vocabulary(tokenizer)
    known = {number: text for text, number in definition["model"]["vocab"].items()}
    kinds = dict.fromkeys(known, TokenType.NORMAL)
    for token in definition["added_tokens"]:
        known[token["id"]] = token["content"]
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PATTERNS[pattern])
    writer.add_token_list([known.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([kinds.get(number, TokenType.UNUSED) for number in range(size)])
    merges = definition["model"]["merges"]
    writer.add_token_merges([x if isinstance(x, str) else " ".join(x) for x in merges])
    if tokenizer.bos_id is not None:
        writer.add_bos_token_id(tokenizer.bos_id)
    if tokenizer.eos_id is not None:
        writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.pad_id)
    first = tokenizer.encode("a", bos=True)[:1]
    writer.add_add_bos_token(first == [tokenizer.bos_id])
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def check_vocabulary(tokenizer: Tokenizer) -> str:
    """The splitting pattern; raises UsageError for a tokenizer that has no form in GGUF files."""
    definition = json.loads(tokenizer.definition)
    kind, pattern = definition["model"]["type"], _pattern(definition["pre_tokenizer"])
    normalizer = (definition["normalizer"] or {}).get("type", "NFC")
    if kind == "BPE" and pattern in PATTERNS and normalizer == "NFC":
        return str(pattern)
    kinds = f"{kind}, splitting by {pattern}, normalizer {normalizer}"
    raise UsageError(
        f"--format gguf: the tokenizer is {kinds} (expected byte-level BPE, split as by one of "
        f"{', '.join(PATTERNS.values())})"
    )


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
