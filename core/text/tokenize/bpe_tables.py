"""Convert a `tokenizer.json` to the arrays of sabia.kernels.bpe, or say why that is impossible.

Supported are byte-level BPE models whose splitting patterns are known (bpe_patterns): GPT-2,
GPT-NeoX with Pythia and OLMo, cl100k, Llama-3, Qwen2/3, o200k, Mistral's Tekken, DeepSeek-V3, and
steps before them that isolate digits; and BPE models of characters (character_tables) as those of
Llama-2, Mistral and Gemma. Everything else raises Unsupported with its name: other normalizers,
byte-level prefix spaces, dropout, affixes of words, added tokens that strip spaces or match whole
words only.
"""

import itertools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from sabia.core.text.tokenize.bpe_patterns import (
    Unsupported,
    byte_level_splitting,
    normalizer_steps,
    pre_tokenizer_chain,
)
from sabia.core.text.tokenize.character_tables import (
    USED_BYTES,
    character_alphabet,
    character_splitting,
    unknown_id,
)
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.kernels.bpe.definitions import Alphabet, Tables, Trie
from sabia.kernels.bpe.interface import make_trie, pair_table, word_table
from sabia.kernels.text.unicode_classes import class_table


@dataclass(frozen=True)
class Compiled:
    """The arrays of the kernel, whether texts must be normalized to NFC first, and whether they are
    split by the classes of their characters."""

    tables: Tables
    nfc: bool
    classes: bool


def compile_tables(tokenizer: Tokenizer) -> Compiled:
    """Arrays for the kernel; raises Unsupported."""
    definition = json.loads(tokenizer.definition)
    model = definition["model"]
    if model.get("type") != "BPE":
        raise Unsupported(f"model {model.get('type')}")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise Unsupported(f"{name} of the model")
    vocab: dict[str, int] = model["vocab"]
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    if pre_tokenizer_chain(definition)[-1].get("type") == "ByteLevel":
        nfc, splitting = _normalizes(definition), byte_level_splitting(definition)
        characters = byte_of_character()
        alphabet, classes = _byte_alphabet(model, characters), True
    else:
        nfc, splitting = character_splitting(definition)
        alphabet = character_alphabet(definition, merges)
        characters, classes = {}, splitting.digits > 0
    ids = itertools.chain.from_iterable((vocab[a], vocab[b], vocab[a + b]) for a, b in merges)
    merged = np.fromiter(ids, np.int64, 3 * len(merges)).reshape(-1, 3)
    pairs = pair_table(merged[:, :2], merged[:, 2])
    table = word_table(_whole_tokens(vocab, characters) if model.get("ignore_merges") else {})
    tries = _tries(definition, tokenizer)
    tables = Tables(alphabet, pairs, splitting, class_table(), table, tries)
    return Compiled(tables, nfc, classes)


def _whole_tokens(vocab: dict[str, int], characters: dict[str, int]) -> dict[bytes, int]:
    """UTF-8 of the tokens, or their bytes where characters stand for bytes → id."""
    if not characters:
        return {token.encode(): number for token, number in vocab.items() if token}
    return {
        bytes(characters[c] for c in token): number
        for token, number in vocab.items()
        if token and characters.keys() >= set(token)
    }


def _byte_alphabet(model: dict[str, Any], characters: dict[str, int]) -> Alphabet:
    """Ids of the single bytes; raises Unsupported.

    The bytes that UTF-8 never uses have no tokens in GPT-NeoX, Pythia and OLMo.
    """
    by_byte = np.full(256, -1, np.int32)
    for character, byte in characters.items():
        by_byte[byte] = model["vocab"].get(character, -1)
    if (by_byte[USED_BYTES] >= 0).all():
        return Alphabet(by_byte)
    if model.get("byte_fallback"):
        raise Unsupported("byte_fallback of byte-level pieces")
    return Alphabet(by_byte, unknown=unknown_id(model), fuse=bool(model.get("fuse_unk")))


def byte_of_character() -> dict[str, int]:
    """GPT-2's characters for bytes: printable bytes as themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    named = {chr(byte): byte for byte in printable}
    return named | {chr(256 + i): byte for i, byte in enumerate(others)}


def _normalizes(definition: dict[str, Any]) -> bool:
    """True for NFC, False for no normalizer; raises Unsupported."""
    steps = normalizer_steps(definition)
    for step in steps:
        if step.get("type") != "NFC":
            raise Unsupported(f"normalizer {step.get('type')}")
    return bool(steps)


def _tries(definition: dict[str, Any], tokenizer: Tokenizer) -> tuple[Trie, Trie]:
    """Tries of added tokens matched before normalisation, and after it.

    A special token written in a document stays ordinary text, but it is matched as a whole: no
    other token matches inside it. Where all are special the trie is empty.
    """
    groups: tuple[list[tuple[bytes, int]], ...] = ([], [])
    normalizer = tokenizer.backend.normalizer
    for token in definition.get("added_tokens", []):
        odd = [name for name in ("single_word", "lstrip", "rstrip") if token[name]]
        if odd and not token["special"]:
            raise Unsupported(f"{odd[0]} of the added token {token['content']!r}")
        late = bool(token["normalized"])
        text = token["content"]
        if late and normalizer is not None:
            text = normalizer.normalize_str(text)
        if text:
            number: Any = -2 if token["special"] else tokenizer.token_id(token["content"])
            groups[late].append((text.encode(), number))
    # ▁ for blanks
    metaspace = any(step["type"] == "Replace" for step in normalizer_steps(definition))
    try:
        first, second = (
            make_trie(group if any(number >= 0 for _, number in group) else [], blanks)
            for group, blanks in zip(groups, (False, metaspace), strict=True)
        )
    except ValueError as error:
        raise Unsupported(str(error)) from error
    return first, second
