"""BPE of characters, as SentencePiece has it, in arrays for the kernel.

Texts of Llama-2, Mistral and Gemma are not split before their merges, or at blanks only; a blank
is ▁, and a character without a token is its bytes or the unknown token. The kernel splits where no
merge can reach across: between two characters that are not the last of the left and the first of
the right part of any merge. Merges on both sides of such a place do not depend on each other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sabia.core.text.tokenize.bpe_patterns import (
    BLANK,
    BLANK_RUNS_PATTERN,
    Unsupported,
    digits_cut_out,
    normalizer_steps,
    pre_tokenizer_chain,
    refusal,
    split_pattern,
)
from sabia.kernels.bpe.definitions import (
    PREPEND_ALWAYS,
    PREPEND_FIRST,
    PREPEND_NEVER,
    PREPEND_NORMALIZER,
    Alphabet,
    Splitting,
)
from sabia.kernels.bpe.interface import join_bits
from sabia.kernels.text.unicode_classes import CODE_POINTS

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

    nfc, blanks, prepend = _normalizes(definition)
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


def _normalizes(definition: dict[str, Any]) -> tuple[bool, bool, int]:
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
    if "Metaspace" in kinds or _normalizes(definition)[1]:
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
