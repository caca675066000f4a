"""Training tokenizers: byte-level BPE, BPE with byte fallback, Unigram; any text decodes back.

`bpe` works on bytes, after a splitting pattern chosen by name. `bpe-fallback` and `unigram` work on
characters with `▁` for a blank, as SentencePiece does; characters too rare for the vocabulary are
spelled in the 256 byte tokens (a literal ▁ decodes as a blank: that is lossy in every such
tokenizer). All have every number in single digits or in groups of three, special tokens at ids
from 0 on, and reserved ones for later use. The same texts in the same order give the same BPE file;
Unigram's scores differ in the third decimal from one training to the next, as the library sums them
in the order of a randomly seeded hash table. Sennrich et al. 2016 (arXiv 1508.07909); Kudo 2018
(arXiv 1804.10959, Unigram); Kudo and Richardson 2018 (arXiv 1808.06226, byte fallback).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.text.bpe_tables import (
    CJK_PATTERN,
    DEEPSEEK_PATTERN,
    GPT2_PATTERN,
    cl100k_pattern,
    o200k_pattern,
)
from sabia.core.text.chatml import CHATML_TEMPLATE, END_OF_TEXT, PAD, TURN_END, TURN_START
from sabia.core.text.role_words import with_role_words

MODELS = ("bpe", "bpe-fallback", "unigram")
PATTERNS = ("cl100k", "o200k", "gpt2", "deepseek")
DIGITS = {"single": r"\p{N}", "three": r"\p{N}{1,3}"}
NORMALIZERS = ("none", "nfc", "nfkc")
BYTES = 256
FIRST_TOKENS = (END_OF_TEXT, PAD, TURN_START, TURN_END)
UNKNOWN = "<unk>"
BLANK = "▁"
_PRINTABLE = [chr(code) for code in range(0x20, 0x7F)]
_BYTE_SCORE_GAP = 20.0  # below every piece, so that no byte token is taken for its spelling


@dataclass(frozen=True)
class TrainingConfig:
    """What to train; `vocab_size` counts all tokens and is rounded up to a `multiple`."""

    vocab_size: int = 32_000
    model: str = "bpe"
    pattern: str = "cl100k"
    digits: str = "single"
    normalize: str = "none"
    reserved: int = 12
    special_tokens: tuple[str, ...] = ()
    min_frequency: int = 2
    multiple: int = 1

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("model", self.model, MODELS),
            ("pattern", self.pattern, PATTERNS),
            ("digits", self.digits, tuple(DIGITS)),
            ("normalize", self.normalize, NORMALIZERS),
        ):
            if value not in choices:
                raise UsageError(f"--{name}: {value!r} (expected {' or '.join(choices)})")
        if self.multiple < 1 or self.reserved < 0 or self.min_frequency < 1:
            raise UsageError(
                f"--vocab-multiple {self.multiple}, --reserved {self.reserved}, --min-frequency "
                f"{self.min_frequency} (expected at least 1, 0 and 1)"
            )
        if len(set(self.specials)) < len(self.specials) or "" in self.specials:
            raise UsageError(f"--special-tokens: {','.join(self.special_tokens)} (each once)")
        least = len(self.specials) + BYTES
        if self.vocab_size < least:
            raise UsageError(
                f"vocabulary too small: {self.vocab_size} (expected at least {least}: "
                f"{len(self.specials)} special tokens and {BYTES} bytes)"
            )

        if self.model != "bpe" and self.pattern != "cl100k":
            raise UsageError(f"--pattern {self.pattern}: {self.model} splits at blanks")
        if self.model == "unigram" and self.min_frequency != 2:
            raise UsageError("--min-frequency: unigram has no merges")

    def changed(self, *but: str) -> str:
        """The first option that is not at its default, '' if none is; `but` those fields."""
        plain = TrainingConfig()
        names = (f.name for f in fields(self) if f.name not in but)
        name = next((n for n in names if getattr(self, n) != getattr(plain, n)), "")
        option = "vocab_multiple" if name == "multiple" else name
        return option and "--" + option.replace("_", "-")

    @property
    def specials(self) -> tuple[str, ...]:
        """Special tokens in the order of their ids, from 0 on."""
        reserved = (f"<|reserved_{i}|>" for i in range(self.reserved))
        unknown = () if self.model == "bpe" else (UNKNOWN,)
        return (*FIRST_TOKENS, *self.special_tokens, *reserved, *unknown)

    @property
    def target(self) -> int:
        """`vocab_size` rounded up."""
        return -(-self.vocab_size // self.multiple) * self.multiple


def train_definition(texts: Iterable[str], config: TrainingConfig) -> str:
    """The text of tokenizer.json trained on `texts`; at most `config.target` tokens, fewer where
    the texts have too few pairs, but always a multiple."""
    if config.model == "bpe":
        definition = with_role_words(_byte_level(texts, config), config.target)
    else:
        definition = _with_blanks(texts, config)
    return _filled(definition, config.multiple)


def tokenizer_config(config: TrainingConfig) -> dict[str, Any]:
    """tokenizer_config.json of a trained tokenizer."""
    unknown = {} if config.model == "bpe" else {"unk_token": UNKNOWN}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        **unknown,
        "additional_special_tokens": [TURN_START, TURN_END, *config.special_tokens],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_prefix_space": False,
        "model_max_length": 1 << 20,
        "chat_template": CHATML_TEMPLATE,
    }


def _byte_level(texts: Iterable[str], config: TrainingConfig) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(_byte_level_steps(config))
    backend.decoder = decoders.ByteLevel()
    _set_normalizer(backend, config, [])
    trainer = trainers.BpeTrainer(
        vocab_size=config.target,
        min_frequency=config.min_frequency,
        special_tokens=list(config.specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return backend.to_str()


def _byte_level_steps(config: TrainingConfig) -> list[Any]:
    from tokenizers import pre_tokenizers

    numbers = DIGITS[config.digits]
    patterns = {
        "cl100k": [cl100k_pattern(numbers)],
        "o200k": [o200k_pattern(numbers, contractions=True)],
        "gpt2": [numbers, GPT2_PATTERN],
        "deepseek": [numbers, CJK_PATTERN, DEEPSEEK_PATTERN],
    }
    steps = [_isolate(pattern) for pattern in patterns[config.pattern]]
    return [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _isolate(pattern: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _set_normalizer(backend: Any, config: TrainingConfig, more: Sequence[Any]) -> None:
    from tokenizers import normalizers

    kinds: Any = {"none": [], "nfc": [normalizers.NFC()], "nfkc": [normalizers.NFKC()]}
    steps = [*kinds[config.normalize], *more]
    if steps:
        backend.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)


def _with_blanks(texts: Iterable[str], config: TrainingConfig) -> str:
    """A SentencePiece-like tokenizer: pieces of characters, bytes for the rest."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    unigram = config.model == "unigram"
    backend = Tokenizer(models.Unigram() if unigram else models.BPE())
    _set_normalizer(backend, config, [normalizers.Replace(" ", BLANK)])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [_isolate(DIGITS[config.digits]), _isolate(rf"{BLANK}+[^{BLANK}\n]*|\n+")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.train_from_iterator(texts, trainer=_piece_trainer(config))
    definition = json.loads(backend.to_str())
    (_unigram_bytes if unigram else _bpe_bytes)(definition["model"], config)
    return json.dumps(definition, ensure_ascii=False, indent=2)


def _piece_trainer(config: TrainingConfig) -> Any:
    from tokenizers import trainers

    shared: dict[str, Any] = {
        "vocab_size": config.target - BYTES,
        "special_tokens": list(config.specials),
        "initial_alphabet": _PRINTABLE,
        "show_progress": False,
    }
    if config.model == "unigram":
        return trainers.UnigramTrainer(unk_token=UNKNOWN, **shared)
    room = config.target - BYTES - len(config.specials)
    most = max(len(_PRINTABLE), room // 2)  # characters; the rest of the room is for merges
    return trainers.BpeTrainer(min_frequency=config.min_frequency, limit_alphabet=most, **shared)


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(BYTES)]


def _bpe_bytes(model: dict[str, Any], _config: TrainingConfig) -> None:
    """Put the byte tokens behind the others, and let unknown characters fall back to them."""
    first = len(model["vocab"])
    model["vocab"] |= {token: first + i for i, token in enumerate(_byte_tokens())}
    model |= {"byte_fallback": True, "unk_token": UNKNOWN, "fuse_unk": True}


def _unigram_bytes(model: dict[str, Any], config: TrainingConfig) -> None:
    least = min(score for _, score in model["vocab"]) - _BYTE_SCORE_GAP
    model["vocab"] += [[token, least] for token in _byte_tokens()]
    model |= {"byte_fallback": True, "unk_id": config.specials.index(UNKNOWN)}


def _filled(definition: str, multiple: int) -> str:
    """The definition with unused special tokens up to the next multiple."""
    content = json.loads(definition)
    size = len(content["model"]["vocab"])
    if not (missing := -size % multiple):
        return definition
    for number in range(size, size + missing):
        token = f"<|unused_{number - size}|>"
        content["added_tokens"].append(
            {"id": number, "content": token, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
        )
        vocab = content["model"]["vocab"]
        if isinstance(vocab, dict):
            vocab[token] = number
        else:
            vocab.append([token, 2 * min(score for _, score in vocab)])
    return json.dumps(content, ensure_ascii=False, indent=2)
