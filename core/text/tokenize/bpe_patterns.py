"""Splitting patterns of BPE tokenizers in `tokenizer.json`, and how the kernel splits by them.

A pattern is known by its exact text. What the kernel cannot do raises Unsupported with its name.
"""

from typing import Any

from sabia.kernels.bpe.definitions import Splitting

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
BLANK = "▁"
BLANK_RUNS_PATTERN = rf"{BLANK}+[^{BLANK}\n]*|\n+"


class Unsupported(Exception):
    """The kernel cannot encode like this tokenizer; the message is a short reason."""


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


def flattened(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or decoder, one after another; `inner` has those of a sequence."""
    if not step:
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [one for part in step[inner] for one in flattened(part, inner)]


def normalizer_steps(definition: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of the normalizer, one after another."""
    return flattened(definition.get("normalizer"), "normalizers")


def digits_cut_out(step: dict[str, Any]) -> int:
    """The most digits in a pre-token if the step isolates numbers, else 0."""
    if step.get("type") == "Digits":
        return 1 if step.get("individual_digits") else NUMBER_PATTERNS[r"\p{N}+"]
    return NUMBER_PATTERNS.get(split_pattern(step) or "", 0)


def refusal(step: dict[str, Any]) -> Unsupported:
    """The reason for a step of a pre-tokenizer that the kernel does not have."""
    return Unsupported(f"pre-tokenizer {step.get('type')} {split_pattern(step) or ''}".rstrip())


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


def byte_level_splitting(definition: dict[str, Any]) -> Splitting:
    """How the kernel splits; raises Unsupported."""
    main, steps = byte_level_pattern(definition)
    main = main.replace("\r", r"\r").replace("\n", r"\n")
    known = known_patterns().get(main)
    if known is None:
        raise Unsupported(f"pattern {main[:60]}")
    digits, cjk = 0, False
    for step in steps:
        if not digits and (cap := digits_cut_out(step)):
            digits = cap
        elif split_pattern(step) == CJK_PATTERN and not cjk:
            cjk = True
        else:
            raise refusal(step)
    return Splitting(*known, digits=digits, cjk=cjk)
