"""Convert a `tokenizer.json` to the arrays of sabia.kernels.bpe, or say why that is impossible.

Supported are byte-level BPE models whose splitting patterns are known, compared by their exact
text: GPT-2 and GPT-NeoX, cl100k, Llama-3, Qwen2/3, o200k, Mistral's Tekken, DeepSeek-V3, and steps
before them that isolate digits. Everything else raises Unsupported with its name: normalizers
other than NFC, prefix spaces, `▁` pieces with byte fallback (Llama-2, Gemma), dropout, affixes of
words, added tokens that strip spaces or match whole words only.
"""

import itertools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.kernels.bpe.definitions import Alphabet, Splitting, Tables, Trie
from sabia.kernels.bpe.interface import make_trie, pair_table, word_table
from sabia.kernels.text.unicode_classes import class_table

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WHITE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
DEEPSEEK_PATTERN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{WHITE}"
).replace(r"\"", '"')
CJK_PATTERN = "[一-龥぀-ゟ゠-ヿ]+"
NUMBER_PATTERNS = {r"\p{N}": 1, r"\p{N}{1,3}": 3, r"\p{N}+": 1 << 30}


class Unsupported(Exception):
    """The kernel cannot encode like this tokenizer; the message is a short reason."""


@dataclass(frozen=True)
class Compiled:
    """The arrays of the kernel, and whether texts must be normalized to NFC first."""

    tables: Tables
    nfc: bool


def cl100k_pattern(numbers: str, marks: bool = False) -> str:
    """The pattern of cl100k for the numbers `\\p{N}` (Qwen) or `\\p{N}{1,3}` (Llama-3).

    marks: combining marks are letters (Qwen3.5).
    """
    word, inside = (r"[\p{L}\p{M}]+", r"\p{L}\p{M}") if marks else (r"\p{L}+", r"\p{L}")
    others = rf" ?[^\s{inside}\p{{N}}]+[\r\n]*"
    return f"{CONTRACTIONS}|{_LEAD}{word}|{numbers}|{others}|{WHITE}"


def o200k_pattern(numbers: str, contractions: bool) -> str:
    """The pattern of o200k; Tekken has single digits and no contractions."""
    tail = f"{CONTRACTIONS}?" if contractions else ""
    words = f"{_LEAD}{_UPPER}*{_LOWER}+{tail}|{_LEAD}{_UPPER}+{_LOWER}*{tail}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{WHITE}"


def known_patterns() -> dict[str, tuple[int, int, int]]:
    """Text of each pattern → (family, most digits, letters) of sabia.kernels.bpe.split_numba."""
    from sabia.kernels.bpe.split_numba import (
        CL100K,
        DEEPSEEK,
        GPT2,
        LETTERS,
        MARKED_LETTERS,
        O200K,
    )

    patterns = {GPT2_PATTERN: (GPT2, 0, 0), DEEPSEEK_PATTERN: (DEEPSEEK, 0, 0)}
    for numbers, cap in NUMBER_PATTERNS.items():
        patterns[cl100k_pattern(numbers)] = (CL100K, cap, LETTERS)
        patterns[cl100k_pattern(numbers, marks=True)] = (CL100K, cap, MARKED_LETTERS)
        for contractions in (True, False):
            patterns[o200k_pattern(numbers, contractions)] = (O200K, cap, int(contractions))
    return patterns


def compile_tables(tokenizer: Tokenizer) -> Compiled:
    """Arrays for the kernel; raises Unsupported."""
    definition = json.loads(tokenizer.definition)
    nfc = _normalizer(definition)
    splitting = _splitting(definition)
    model = definition["model"]
    if model.get("type") != "BPE":
        raise Unsupported(f"model {model.get('type')}")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise Unsupported(f"{name} of the model")
    vocab: dict[str, int] = model["vocab"]
    alphabet = _byte_alphabet(model, characters := byte_of_character())
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    ids = itertools.chain.from_iterable((vocab[a], vocab[b], vocab[a + b]) for a, b in merges)
    merged = np.fromiter(ids, np.int64, 3 * len(merges)).reshape(-1, 3)
    pairs = pair_table(merged[:, :2], merged[:, 2])
    words = {}
    if model.get("ignore_merges"):
        for token, number in vocab.items():
            if token and characters.keys() >= set(token):
                words[bytes(characters[c] for c in token)] = number
    tries, table = _tries(definition, tokenizer), word_table(words)
    return Compiled(Tables(alphabet, pairs, splitting, class_table(), table, tries), nfc)


def _byte_alphabet(model: dict[str, Any], characters: dict[str, int]) -> Alphabet:
    """Ids of the single bytes; raises Unsupported.

    The bytes that UTF-8 never uses have no tokens in GPT-NeoX, Pythia and OLMo.
    """
    by_byte = np.full(256, -1, np.int32)
    for character, byte in characters.items():
        by_byte[byte] = model["vocab"].get(character, -1)
    used = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
    if (by_byte[used] >= 0).all():
        return Alphabet(by_byte)
    if model.get("byte_fallback"):
        raise Unsupported("byte_fallback of byte-level pieces")
    return Alphabet(by_byte, unknown=unknown_id(model), fuse=bool(model.get("fuse_unk")))


def unknown_id(model: dict[str, Any]) -> int:
    """The id of the model's unknown token, -1 where it has none; raises Unsupported."""
    token = model.get("unk_token")
    if token is None:
        return -1
    if token not in model["vocab"]:
        raise Unsupported(f"no token for its unk_token {token!r}")
    return model["vocab"][token]


def byte_of_character() -> dict[str, int]:
    """GPT-2's characters for bytes: printable bytes as themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    named = {chr(byte): byte for byte in printable}
    return named | {chr(256 + i): byte for i, byte in enumerate(others)}


def pre_tokenizer_chain(definition: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of the pre-tokenizer, one after another."""
    steps = definition.get("pre_tokenizer") or {}
    return steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]


def split_pattern(step: dict[str, Any]) -> str | None:
    """The regular expression of a step that isolates its matches, else None."""
    whole = step.get("type") == "Split" and step.get("behavior") == "Isolated"
    if not whole or step.get("invert"):
        return None
    return step["pattern"].get("Regex")


def _normalizer(definition: dict[str, Any]) -> bool:
    """True for NFC, False for none."""
    step = definition.get("normalizer")
    if step is None:
        return False
    if step.get("type") == "Sequence" and len(step["normalizers"]) <= 1:
        step = (step["normalizers"] or [None])[0]
        return step is not None and _normalizer({"normalizer": step})
    if step.get("type") != "NFC":
        raise Unsupported(f"normalizer {step.get('type')}")
    return True


def byte_level_pattern(definition: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """(the pattern that splits before the bytes, the steps before it); raises Unsupported."""
    *steps, last = pre_tokenizer_chain(definition) or [{}]
    if last.get("type") != "ByteLevel":
        raise Unsupported(f"pre-tokenizer {last.get('type', 'none')} (not byte-level)")
    if last.get("add_prefix_space"):
        raise Unsupported("add_prefix_space")
    if last.get("use_regex", True):
        return GPT2_PATTERN, steps
    if not steps or (pattern := split_pattern(steps.pop())) is None:
        raise Unsupported("no splitting pattern before the bytes")
    return pattern, steps


def _splitting(definition: dict[str, Any]) -> Splitting:
    main, steps = byte_level_pattern(definition)
    main = main.replace("\r", r"\r").replace("\n", r"\n")
    known = known_patterns().get(main)
    if known is None:
        raise Unsupported(f"pattern {main[:60]}")
    digits, cjk = 0, False
    for step in steps:
        pattern = split_pattern(step)
        if step.get("type") == "Digits" and not digits:
            digits = 1 if step.get("individual_digits") else NUMBER_PATTERNS[r"\p{N}+"]
        elif pattern in NUMBER_PATTERNS and not digits:
            digits = NUMBER_PATTERNS[pattern]
        elif pattern == CJK_PATTERN and not cjk:
            cjk = True
        else:
            raise Unsupported(f"pre-tokenizer {step.get('type')} {pattern or ''}".rstrip())
    return Splitting(*known, digits=digits, cjk=cjk)


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
    try:
        first, second = (make_trie(g if any(n >= 0 for _, n in g) else []) for g in groups)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    return first, second
