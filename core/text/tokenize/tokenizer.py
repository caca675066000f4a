"""A tokenizer loaded from any `tokenizer.json`; its ids are those of transformers."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.shards.atomic import write_atomic

# The end-of-turn tokens of model families.
TURN_END = "<|im_end|>"  # of ChatML
TURN_ENDS = (TURN_END, "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>")
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
FILES = ("tokenizer.json", "tokenizer_config.json")


class Tokenizer:
    """A tokenizer with its chat template; immutable, picklable, thread-safe."""

    def __init__(
        self,
        definition: str,
        config: dict[str, Any],
        chat_template: str | None = None,
        extra_stop_ids: Sequence[int] = (),
    ) -> None:
        """`definition` is the text of tokenizer.json, `config` the content of its config file."""
        self.definition = definition
        self.config = config
        self.chat_template = chat_template
        self._extra_stop_ids = tuple(extra_stop_ids)

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[Any, ...]]:
        return Tokenizer, (
            self.definition, self.config, self.chat_template, self._extra_stop_ids
        )  # fmt: skip

    @cached_property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer`; it encodes special tokens in a text as special tokens."""
        return _backend(self.definition)

    @cached_property
    def _ordinary(self) -> Any:
        backend = _backend(self.definition)
        backend.encode_special_tokens = True  # the library's name for "as ordinary text"
        return backend

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Ids of a text with special tokens in it (a rendered chat, a prompt).

        `bos` applies the tokenizer's post-processor (Llama: it adds the BOS token).
        """
        return self.backend.encode(text, add_special_tokens=bos).ids

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of an untrusted text: special tokens written in it are encoded as ordinary text."""
        return self._ordinary.encode(text, add_special_tokens=False).ids

    def encode_ordinary_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_ordinary` of each text."""
        encoded = self._ordinary.encode_batch_fast(list(texts), add_special_tokens=False)
        return [item.ids for item in encoded]

    def encode_ordinary_with_offsets(
        self, texts: Sequence[str]
    ) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
        """(`encode_ordinary` of each text, for each id its half-open span of characters)."""
        encoded = self._ordinary.encode_batch(list(texts), add_special_tokens=False)
        return [item.ids for item in encoded], [item.offsets for item in encoded]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(`encode(text)`, for each id its half-open span of characters of the text)."""
        encoded = self.backend.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, or None."""
        return self.backend.token_to_id(token)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id, added tokens included, plus one: the least number of embedding rows."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """The special token of each role: {"eos_token": "<|endoftext|>", …}."""
        tokens = {role: self.config.get(role) for role in SPECIAL_ROLES}
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
        return {role: token for role, token in texts.items() if token is not None}

    @cached_property
    def eos_id(self) -> int | None:
        """End of document; None where the tokenizer has no such token."""
        return self._role_id("eos_token")

    @cached_property
    def bos_id(self) -> int | None:
        """Begin of document; None where the tokenizer has no such token."""
        return self._role_id("bos_token")

    @cached_property
    def pad_id(self) -> int:
        """Padding; without such a token the end-of-document token, else 0."""
        for role in ("pad_token", "eos_token"):
            if (number := self._role_id(role)) is not None:
                return number
        return 0

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a generated turn: end of document, end of turn, the model's own list."""
        turn_ends = [self.token_id(token) for token in TURN_ENDS]
        ids = [self.eos_id, *turn_ends, *self._extra_stop_ids]
        return tuple(sorted({number for number in ids if number is not None}))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all added tokens marked special."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of all added tokens marked special."""
        added = self.backend.get_added_tokens_decoder()
        return tuple(token.content for token in added.values() if token.special)

    @cached_property
    def fingerprint(self) -> str:
        """128-bit hash of definition and template, as 32 hex digits."""
        text = json.dumps([self.definition, self.chat_template], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json in the format of transformers."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        config = dict(self.config)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        write_atomic(folder / FILES[0], self.definition.encode())
        write_atomic(folder / FILES[1], text.encode())

    def _role_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.token_id(token)


def load_tokenizer(path: str | Path, option: str = "") -> Tokenizer:
    """Load `tokenizer.json`, or a directory that holds one (a Hugging Face model directory).

    Raises UsageError, which names the `option` that gave the path, where there is none; BadData
    where a file is malformed.
    """
    location = Path(path)
    folder = location if location.is_dir() else location.parent
    definition = location / FILES[0] if location.is_dir() else location
    if not definition.is_file():
        what = f"{option}: {path} has no tokenizer" if option else f"no tokenizer: {path}"
        raise UsageError(
            f"{what} (expected tokenizer.json or a directory with one{_hint(location)})"
        )
    config = _read_json(folder / FILES[1])
    special = _read_json(folder / "special_tokens_map.json")
    stops = _read_json(folder / "generation_config.json").get("eos_token_id", [])
    stops = tuple(stops) if isinstance(stops, list) else (stops,)
    text = definition.read_text("utf-8")
    tokenizer = Tokenizer(text, {**special, **config}, _template(folder, config), stops)
    try:
        _ = tokenizer.backend
    except Exception as error:  # the library raises plain Exception for every malformed file
        raise BadData(f"cannot read tokenizer: {definition} ({_one_line(error)})") from error
    return tokenizer


def _hint(location: Path) -> str:
    """A hint where the directory exists under the other name; earlier versions used another one."""
    for name, other in (("tokenizer", "_tokenizer"), ("_tokenizer", "tokenizer")):
        if location.name == name and (location.with_name(other) / FILES[0]).is_file():
            return f"; there is {location.with_name(other)}"
    return ""


def _backend(definition: str) -> Any:
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(definition)
    backend.no_truncation()  # some published files truncate or pad by default
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file, {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BadData(f"not JSON: {path} ({_one_line(error)})") from error
    if not isinstance(content, dict):
        raise BadData(f"not a JSON object: {path}")
    return content


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """The default chat template: chat_template.jinja (transformers 5), else the config's."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        by_name = {item["name"]: item["template"] for item in template}
        return by_name.get("default", next(iter(by_name.values()), None))
    return template


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
