"""The bytes that each token of a vocabulary stands for within a text."""

import json
from collections.abc import Collection

from sabia.core.errors import UsageError
from sabia.core.text.tokenize.bpe_patterns import flattened
from sabia.core.text.tokenize.bpe_tables import byte_of_character
from sabia.core.text.tokenize.tokenizer import Tokenizer

SPACE = "\u2581"  # of SentencePiece
BYTE_LEVEL, FALLBACK = "ByteLevel", "ByteFallback"
CHARACTERS = frozenset({"Replace", FALLBACK, "Fuse", "Strip", "Metaspace"})


def decoder_steps(tokenizer: Tokenizer) -> list[str]:
    """The types of the steps by which a tokenizer decodes."""
    steps = flattened(json.loads(tokenizer.definition).get("decoder"), "decoders")
    return [step["type"] for step in steps]


def token_bytes(
    tokenizer: Tokenizer, size: int, marks: Collection[str] = ()
) -> tuple[list[bytes], list[bool]]:
    """For the ids 0..size-1: (their bytes, whether a text that begins with them is decoded so).

    Ids without a token have none, nor have special tokens but the `marks`. Raises UsageError for a
    decoder whose texts are not the bytes of their tokens one after another.
    """
    steps = decoder_steps(tokenizer)
    if not (set(steps) == {BYTE_LEVEL} or (steps and set(steps) <= CHARACTERS)):
        kind = " + ".join(dict.fromkeys(steps)) or "none"
        raise UsageError(
            f"tokenizer: texts cannot be bound to a grammar with its decoder ({kind}; expected "
            "ByteLevel, or that of SentencePiece's BPE)"
        )
    byte_of = byte_of_character() if BYTE_LEVEL in steps else {}
    texts = list[bytes]()
    for token in range(size):
        spelled = tokenizer.backend.id_to_token(token) or ""
        if token in tokenizer.special_ids and spelled not in marks:
            texts.append(b"")
        elif byte_of:
            known = all(character in byte_of for character in spelled)
            texts.append(bytes(byte_of[c] for c in spelled) if known else spelled.encode())
        else:
            texts.append(_piece(spelled, FALLBACK in steps))
    stripped = not byte_of and {"Strip", "Metaspace"} & set(steps)
    return texts, [not (stripped and text.startswith(b" ")) for text in texts]


def _piece(spelled: str, fallback: bool) -> bytes:
    """The bytes of a piece of SentencePiece."""
    if fallback and len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
        return bytes([int(spelled[3:5], 16)])
    return spelled.replace(SPACE, " ").encode()
