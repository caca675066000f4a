"""What a client binds samples to: `response_format` of the API of OpenAI, and `structured_outputs`
of vLLM (a JSON Schema, a regular expression, or texts to choose from)."""

import json
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.generate.call_formats import REASONING
from sabia.core.generate.reasoning import opened_by_prompt
from sabia.core.grammar.guide import Guide, Vocabulary
from sabia.core.grammar.json_schema import json_schema
from sabia.core.grammar.nodes import Node, Repeat, alt, byte_set, literal, seq, until
from sabia.core.grammar.regular import regular
from sabia.core.text.tokenize.token_bytes import token_bytes
from sabia.core.text.tokenize.tokenizer import Tokenizer

KEPT = 16  # grammars
MOST_BYTES = 64 << 10  # of a grammar, as JSON
THINK = next(one for one in REASONING if one[2])
BLANKS = Repeat(byte_set(1 << ord("\n") | 1 << ord(" ")), 0, 4)  # after reasoning


class ResponseFormats:
    """Grammars on the vocabulary of a model; the last KEPT are kept."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """size: number of the model's logits."""
        self._tokenizer, self._size = tokenizer, size
        self._kept = lru_cache(KEPT)(self._made)

    def of_chat(self, wanted: Mapping[str, Any], prompt: str) -> Guide | None:
        """The guide of a `response_format`; reasoning may come before the text that it binds.

        prompt: the rendered conversation. Raises UsageError.
        """
        kind = wanted.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            schema: object = {"type": "object"}
        elif kind == "json_schema":
            given = wanted.get("json_schema")
            if not isinstance(given, dict) or "schema" not in given:
                raise UsageError("json_schema: expected an object with a schema")
            schema = given["schema"]
        else:
            raise UsageError(f"type {json.dumps(kind)} (expected text, json_object or json_schema)")
        return self._guide({"json": schema}, *self._reasoning(prompt))

    def of_structure(self, wanted: Mapping[str, Any]) -> Guide | None:
        """The guide of `structured_outputs`. Raises UsageError."""
        if len(wanted) != 1 or set(wanted) - {"json", "regex", "choice"}:
            raise UsageError("expected one of json, regex and choice")
        return self._guide(wanted)

    def _reasoning(self, prompt: str) -> tuple[str, str]:
        """(what opens reasoning in the turn after a prompt, '' if the prompt has opened it; what
        closes it, '' if the model does not reason)."""
        if closing := opened_by_prompt(prompt):
            return "", closing
        template = self._tokenizer.chat_template or ""
        for opening, _, prompted in REASONING:
            if opening in template and not prompted:
                raise UsageError("is not supported with the channels of this model's chat template")
        return THINK[:2] if THINK[0] in template else ("", "")

    def _guide(self, wanted: Mapping[str, Any], opening: str = "", closing: str = "") -> Guide:
        text = json.dumps([wanted, opening, closing])
        if len(text) > MOST_BYTES:
            raise UsageError(f"{len(text):,} bytes of JSON (expected at most {MOST_BYTES:,})")
        return self._kept(text)

    def _made(self, text: str) -> Guide:
        """The guide of what `_guide` writes as JSON."""
        wanted, opening, closing = json.loads(text)
        root = _structure(wanted)
        if closing:
            reasoned = seq(literal(opening), until(closing), BLANKS, root)
            root = alt(root, reasoned) if opening else reasoned
        return Guide(root, self.vocabulary, next(iter(wanted)))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """That of the model."""
        return Vocabulary(*token_bytes(self._tokenizer, self._size, THINK[:2]))


def _structure(wanted: Mapping[str, Any]) -> Node:
    """The grammar of one of the three kinds."""
    ((kind, value),) = wanted.items()
    if kind == "json":
        if isinstance(value, str):  # vLLM takes it as text, too
            try:
                value = json.loads(value)
            except ValueError as error:
                raise UsageError(f"json: {error}") from None
        return json_schema(value)
    if kind == "regex":
        if not isinstance(value, str):
            raise UsageError("regex: expected a string")
        return regular(value)
    texts = value if isinstance(value, list) else []
    if not texts or not all(isinstance(one, str) and one for one in texts):
        raise UsageError("choice: expected a list of texts")
    try:
        return alt(*map(literal, texts))
    except UnicodeEncodeError:
        raise UsageError("choice: a text has an unpaired surrogate") from None
