"""Train tokenizers: byte-level BPE, BPE with byte fallback, Unigram; all texts decode losslessly.

`bpe` works on bytes, after a splitting pattern chosen by name. `bpe-fallback` and `unigram` work on
characters with `▁` for a space, as SentencePiece does; characters too rare for the vocabulary are
encoded by the 256 byte tokens (a literal ▁ decodes as a space, as in every such tokenizer). Numbers
are split into single digits or groups of three. Special tokens have the ids from 0 on; reserved
ones are for later use. By default the ids 0..15 are <|endoftext|> <|pad|> <|im_start|> <|im_end|>
and the reserved tokens. The same texts in the same order give the same BPE file; Unigram's scores
differ in the third decimal between trainings, as the library sums them in the order of a randomly
seeded hash table. Sennrich et al. 2016 (arXiv 1508.07909); Kudo 2018
(arXiv 1804.10959, Unigram); Kudo and Richardson 2018 (arXiv 1808.06226, byte fallback).

The role names of the chat template become single tokens of a byte-level tokenizer: `assistant` is
rare in a corpus, so a small vocabulary would split it at the start of every turn. After training,
merges that join its pieces are appended, and as many of the last trained merges are removed; the
encoding of other text changes only where it used a removed merge.

The tokenizers carry the ChatML chat template. One message is
`<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`. Tools are announced in the system message and called in
the form that Qwen and Hermes models use (`<tool_call>{json}</tool_call>`; results come back in a
user turn as `<tool_response>`), so that servers parse the calls without a setting. No turn of the
assistant looks ahead, so masks by prefix difference work.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from sabia.core.errors import UsageError
from sabia.core.options.tokenize import TokenizerTraining
from sabia.core.text.tokenize.bpe_patterns import (
    BLANK,
    BLANK_RUNS_PATTERN,
    CJK_PATTERN,
    DEEPSEEK_PATTERN,
    GPT2_PATTERN,
    cl100k_pattern,
    o200k_pattern,
)
from sabia.core.text.tokenize.tokenizer import TURN_END, Tokenizer

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
TURN_START = "<|im_start|>"

CHATML_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' and messages[0].content %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- '# Tools\\n\\nYou may call functions. Their signatures, one JSON object a line:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call write a JSON object with the name and the arguments:\\n' }}
{{- '<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first and tools %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}
{%- if message.content or not loop.first %}
{{- '\\n' }}
{%- endif %}
{{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
{%- if function.arguments is string %}
{{- function.arguments }}
{%- else %}
{{- function.arguments | tojson }}
{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


DIGITS = {"single": r"\p{N}", "three": r"\p{N}{1,3}"}
BYTES = 256
FIRST_TOKENS = (END_OF_TEXT, PAD, TURN_START, TURN_END)
UNKNOWN = "<unk>"
_PRINTABLE = [chr(code) for code in range(0x20, 0x7F)]
_BYTE_SCORE_GAP = 20.0  # byte tokens score lower than every piece, so pieces are preferred
ROLE_WORDS = ("user", "assistant", "system", "tool")


def with_role_words(definition: str, vocab_size: int) -> str:
    """The definition (tokenizer.json) with ROLE_WORDS as tokens, at most `vocab_size` in all.

    It is unchanged where the vocabulary has too few trained merges to remove.
    """
    trained = json.loads(definition)
    vocab, merges = trained["model"]["vocab"], trained["model"]["merges"]
    for dropped in range(len(merges) + 1):
        size = len(vocab) - dropped
        trained["model"]["vocab"] = {token: i for token, i in vocab.items() if i < size}
        trained["model"]["merges"] = merges[: len(merges) - dropped]
        if size + _join_words(trained) <= vocab_size:
            return json.dumps(trained, ensure_ascii=False, indent=2)
    return definition


def _join_words(definition: dict[str, Any]) -> int:
    """Add the merges that make each word one token; returns the number of new tokens."""
    model, before = definition["model"], len(definition["model"]["vocab"])
    for word in ROLE_WORDS:
        pieces = _pieces(word, model["merges"])
        for end in range(1, len(pieces)):
            left = "".join(pieces[:end])
            model["merges"].append([left, pieces[end]])
            model["vocab"].setdefault(left + pieces[end], len(model["vocab"]))
    return len(model["vocab"]) - before


def _pieces(word: str, merges: list[list[str]]) -> list[str]:
    """The pieces of a word after all merges, in their order (the definition of BPE)."""
    rank = {tuple(pair): number for number, pair in enumerate(merges)}
    pieces = list(word)
    while len(pieces) > 1:
        pairs = [(rank.get((a, b), len(rank)), i) for i, (a, b) in enumerate(pairwise(pieces))]
        best, i = min(pairs)
        if best == len(rank):
            break
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces


def specials(options: TokenizerTraining) -> tuple[str, ...]:
    """Special tokens in the order of their ids, from 0 on. Raises UsageError."""
    reserved = (f"<|reserved_{i}|>" for i in range(options.reserved))
    unknown = () if options.model == "bpe" else (UNKNOWN,)
    tokens = (*FIRST_TOKENS, *added_tokens(options), *reserved, *unknown)
    if len(set(tokens)) < len(tokens):
        raise UsageError(f"--special-tokens: {options.special_tokens!r} (expected each once)")
    return tokens


def added_tokens(options: TokenizerTraining) -> tuple[str, ...]:
    """The special tokens that the user gave."""
    return tuple(filter(None, options.special_tokens.split(",")))


def target(options: TokenizerTraining) -> int:
    """The vocabulary size, rounded up to the multiple. Raises UsageError where it is too small."""
    count = len(specials(options))
    if options.vocab_size < count + BYTES:
        raise UsageError(
            f"--vocab-size: {options.vocab_size} is too small (expected at least {count + BYTES}: "
            f"{count} special tokens and {BYTES} bytes)"
        )
    return -(-options.vocab_size // options.vocab_multiple) * options.vocab_multiple


def train(texts: Iterable[str], options: TokenizerTraining) -> Tokenizer:
    """Train a tokenizer on the texts in their order.

    It has at most `target` tokens: fewer where the texts have too few pairs, but always a multiple.
    A byte-level tokenizer holds each role of a conversation (user, assistant, system, tool) as a
    single token. Raises UsageError where `target` does.
    """
    if options.model == "bpe":
        definition = with_role_words(_byte_level(texts, options), target(options))
    else:
        definition = _with_blanks(texts, options)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        **({} if options.model == "bpe" else {"unk_token": UNKNOWN}),
        "additional_special_tokens": [TURN_START, TURN_END, *added_tokens(options)],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_prefix_space": False,
        "model_max_length": 1 << 20,
    }
    return Tokenizer(_fill_up(definition, options.vocab_multiple), config, CHATML_TEMPLATE)


def train_bpe(texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens with the default options.

    Raises UsageError where `vocab_size` cannot hold the special tokens and the bytes.
    """
    return train(texts, TokenizerTraining(vocab_size=vocab_size, min_frequency=min_frequency))


def _byte_level(texts: Iterable[str], options: TokenizerTraining) -> str:
    backend = Backend(models.BPE())
    numbers = DIGITS[options.digits]
    patterns = {
        "cl100k": [cl100k_pattern(numbers)],
        "o200k": [o200k_pattern(numbers, contractions=True)],
        "gpt2": [numbers, GPT2_PATTERN],
        "deepseek": [numbers, CJK_PATTERN, DEEPSEEK_PATTERN],
    }
    steps = [_isolate(pattern) for pattern in patterns[options.pattern]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    _set_normalizer(backend, options, [])
    trainer = trainers.BpeTrainer(
        vocab_size=target(options),
        min_frequency=options.min_frequency,
        special_tokens=list(specials(options)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return backend.to_str()


def _isolate(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _set_normalizer(backend: Any, options: TokenizerTraining, more: Sequence[Any]) -> None:
    kinds: Any = {"none": [], "nfc": [normalizers.NFC()], "nfkc": [normalizers.NFKC()]}
    steps = [*kinds[options.normalize], *more]
    if steps:
        backend.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)


def _with_blanks(texts: Iterable[str], options: TokenizerTraining) -> str:
    """A tokenizer like SentencePiece's: pieces of characters, bytes for the rest."""
    unigram = options.model == "unigram"
    backend = Backend(models.Unigram() if unigram else models.BPE())
    _set_normalizer(backend, options, [normalizers.Replace(" ", BLANK)])
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [_isolate(DIGITS[options.digits]), _isolate(BLANK_RUNS_PATTERN)]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    settings: dict[str, Any] = {
        "vocab_size": target(options) - BYTES,
        "special_tokens": list(specials(options)),
        "initial_alphabet": _PRINTABLE,
        "show_progress": False,
    }
    if unigram:
        trainer: Any = trainers.UnigramTrainer(unk_token=UNKNOWN, **settings)
    else:
        pieces = target(options) - BYTES - len(specials(options))
        characters = max(len(_PRINTABLE), pieces // 2)  # the other pieces are merges
        trainer = trainers.BpeTrainer(
            min_frequency=options.min_frequency, limit_alphabet=characters, **settings
        )
    backend.train_from_iterator(texts, trainer=trainer)
    definition = json.loads(backend.to_str())
    model = definition["model"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(BYTES)]
    if unigram:
        lowest = min(score for _, score in model["vocab"]) - _BYTE_SCORE_GAP
        model["vocab"] += [[token, lowest] for token in byte_tokens]
        model |= {"byte_fallback": True, "unk_id": specials(options).index(UNKNOWN)}
    else:
        first = len(model["vocab"])
        model["vocab"] |= {token: first + i for i, token in enumerate(byte_tokens)}
        model |= {"byte_fallback": True, "unk_token": UNKNOWN, "fuse_unk": True}
    return json.dumps(definition, ensure_ascii=False, indent=2)


def _fill_up(definition: str, multiple: int) -> str:
    """The definition with unused special tokens added up to the next multiple."""
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
