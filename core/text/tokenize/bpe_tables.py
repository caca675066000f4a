"""Convert a `tokenizer.json` to the arrays of sabia.kernels.bpe, or say why that is impossible.

Supported are byte-level BPE models whose splitting patterns are known (bpe_patterns): GPT-2,
GPT-NeoX with Pythia and OLMo, cl100k, Llama-3, Qwen2/3, o200k, Mistral's Tekken, DeepSeek-V3, and
steps before them that isolate digits; and BPE models of characters as those of Llama-2, Mistral and
Gemma. Everything else raises Unsupported with its name: other normalizers, byte-level prefix
spaces, dropout, affixes of words, added tokens that strip spaces or match whole words only.

BPE of characters is that of SentencePiece. Texts of Llama-2, Mistral and Gemma are not split before
their merges, or at blanks only; a blank is ▁, and a character without a token is its bytes or the
unknown token. The kernel splits where no merge can reach across: between two characters that are
not the last of the left and the first of the right part of any merge. Merges on both sides of such
a place do not depend on each other.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sabia.core.text.tokenize.bpe_patterns import (
    BLANK,
    BLANK_RUNS_PATTERN,
    Unsupported,
    byte_level_splitting,
    digits_cut_out,
    normalizer_steps,
    pre_tokenizer_chain,
    refusal,
    split_pattern,
)
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.kernels.bpe.definitions import (
    PREPEND_ALWAYS,
    PREPEND_FIRST,
    PREPEND_NEVER,
    PREPEND_NORMALIZER,
    Alphabet,
    Splitting,
    Tables,
    Trie,
)
from sabia.kernels.bpe.interface import join_bits, make_trie, pair_table, word_table
from sabia.kernels.text.unicode_classes import CODE_POINTS, class_table

# the bytes that occur in UTF-8
USED_BYTES = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
_SCHEMES = {"always": PREPEND_ALWAYS, "first": PREPEND_FIRST, "never": PREPEND_NEVER}


def unknown_id(model: dict[str, Any]) -> int:
    """The id of the model's unknown token, -1 where it has none; raises Unsupported."""
    token = model.get("unk_token")
    if token is None:
        return -1
    if token not in model["vocab"]:
        raise Unsupported(f"no token for its unk_token {token!r}")
    return model["vocab"][token]


def character_splitting(definition: dict[str, Any]) -> tuple[bool, Splitting]:
    """(whether texts are normalized to NFC, how the kernel splits them); raises Unsupported."""
    from sabia.kernels.bpe.split_numba import AT_BLANKS, AT_RUNS, CHARACTERS, NO_CUTS

    nfc, blanks, prepend = _normalization(definition)
    cuts, digits, metaspace = NO_CUTS, 0, False
    for step in filter(None, pre_tokenizer_chain(definition)):
        kind = step.get("type")
        if kind == "Metaspace" and not (digits or metaspace):
            if prepend != PREPEND_NEVER:
                raise Unsupported("pre-tokenizer Metaspace after Prepend")
            if step["replacement"] != BLANK:
                raise Unsupported(f"pre-tokenizer Metaspace of {step['replacement']!r}")
            metaspace, cuts = True, AT_BLANKS if step.get("split", True) else NO_CUTS
            prepend = _SCHEMES[step.get("prepend_scheme", "always")]
        elif kind == "Split" and step["pattern"] == {"String": " "} and (blanks or metaspace):
            pass  # no blank is left to split at (Gemma)
        elif split_pattern(step) == BLANK_RUNS_PATTERN and blanks and not metaspace:
            cuts = AT_RUNS
        elif not digits and (cap := digits_cut_out(step)):
            digits = cap
        else:
            raise refusal(step)
    return nfc, Splitting(CHARACTERS, cuts, digits=digits, prepend=prepend)


def _normalization(definition: dict[str, Any]) -> tuple[bool, bool, int]:
    """(NFC, whether a blank becomes ▁, PREPEND_…) of the normalizer; raises Unsupported."""
    nfc, blanks, prepend = False, False, PREPEND_NEVER
    for step in normalizer_steps(definition):
        if step["type"] == "NFC":
            nfc = True
        elif step["type"] == "Replace" and (step["pattern"], step["content"]) == (
            {"String": " "}, BLANK
        ):  # fmt: skip
            blanks = True
        elif step["type"] == "Prepend" and step["prepend"] == BLANK and not prepend:
            prepend = PREPEND_NORMALIZER
        else:
            raise Unsupported(f"normalizer {step['type']}")
    if prepend and not blanks:
        raise Unsupported("normalizer Prepend without Replace")
    return nfc, blanks, prepend


def character_alphabet(definition: dict[str, Any], merges: Sequence[Sequence[str]]) -> Alphabet:
    """Ids of single characters, and which of them merges join; raises Unsupported."""
    model = definition["model"]
    vocab: dict[str, int] = model["vocab"]
    by_character, by_byte = np.full(CODE_POINTS, -1, np.int32), np.full(256, -1, np.int32)
    for token, number in vocab.items():
        if len(token) == 1:
            by_character[ord(token)] = number
    kinds = {step.get("type") for step in pre_tokenizer_chain(definition)}
    if "Metaspace" in kinds or _normalization(definition)[1]:
        if BLANK not in vocab:
            raise Unsupported(f"no token for {BLANK}")
        by_character[ord(" ")] = vocab[BLANK]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else []
    by_byte[: len(byte_tokens)] = [vocab.get(token, -1) for token in byte_tokens]
    unknown, fuse = unknown_id(model), bool(model.get("fuse_unk"))
    complete = bool((by_byte[USED_BYTES] >= 0).all())
    single = {model.get("unk_token"), *byte_tokens}
    dropped = unknown < 0 and not complete  # what is left on both sides may merge
    if dropped or model.get("ignore_merges") or any(single & {*merge} for merge in merges):
        joins = np.full(1, -1, np.int64).view(np.uint64)
    else:
        ends = [(ord(left[-1]), ord(right[0])) for left, right in merges]
        pairs = by_character[np.array(ends, np.int64).reshape(-1, 2)]
        pairs = np.unique(pairs[(pairs >= 0).all(axis=1)], axis=0)
        if not complete and (fuse or (by_byte >= 0).any()):  # the order of a run matters
            pairs = np.concatenate([pairs, [[-1, -1]]])
        joins = join_bits(pairs)
    return Alphabet(by_byte, by_character, unknown, fuse, joins)


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
