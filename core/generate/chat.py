"""Chat templates: messages → text → token ids, and the mask of the assistant's tokens.

The mask is 1 on what the assistant writes (content, tool calls, end of turn) and 0 elsewhere, role
headers included. It comes from `{% generation %}` blocks if the template has them, otherwise from
prefix differences: render(messages[:i], add_generation_prompt) must be a prefix of
render(messages[:i+1]), which must be a prefix of the whole text. Where the generation prompt is no
prefix (it opens a reasoning that a plain answer lacks), the turn begins where the two texts part,
and before its content, whose position is looked for with marks. All is verified. An empty mask is
an error, because its loss would be 0 and look like a good one; so is a turn that the template left
out (`message_forms`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sabia.core.errors import BadData
from sabia.core.generate.message_forms import forms, left_out, text_of, written
from sabia.core.generate.template_engine import END, START, Message, Span, Tools, rendered
from sabia.core.text.tokenize.tokenizer import Tokenizer

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
THINKING = "enable_thinking"


def render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    add_generation_prompt: bool = False,
    tools: Tools = None,
    **variables: Any,
) -> str:
    """The conversation as text, by the tokenizer's chat template.

    `tools` are JSON schemas of functions (or their JSON text); `variables` are passed to the
    template (enable_thinking=False, …).
    Raises UsageError without a template, BadData if the template rejects the messages.
    """
    return _Conversation(messages, tokenizer, tools, variables, add_generation_prompt).text


def render_rows(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    **variables: object,
) -> list[tuple[list[int], list[int]]]:
    """(ids[T], mask[T]) of a conversation as one row; mask is 1 on what the assistant writes.

    One row per assistant turn if the template rewrites earlier turns (it may drop old reasoning)
    and has no generation blocks: such a row ends with its turn and has the mask on that turn alone.
    Raises BadData if the assistant wrote nothing.
    """
    rows = _Conversation(messages, tokenizer, tools, variables).rows()
    return [_masked(text, spans, tokenizer) for text, spans in rows]


def render_answer(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    **variables: object,
) -> tuple[list[int], list[int]]:
    """(ids[T], mask[T]); mask is 1 on what the assistant writes in the last message alone."""
    given = _Conversation(messages, tokenizer, tools, variables)
    before = given.written(given.form[:-1])
    if given.has_marks and given.text.startswith(before):
        spans = [span for span in given.marked if span[0] >= len(before)]
    else:
        spans = [given.turn_span(len(given.form) - 1, given.text)]
    return _masked(given.text, spans, tokenizer)


def row_texts(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Tools = None, **variables: object
) -> list[str]:
    """The texts that `render_rows` encodes."""
    return [text for text, _ in _Conversation(messages, tokenizer, tools, variables).rows()]


def turn_text(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Tools = None, **variables: object
) -> str:
    """What the assistant writes in the last message, with its end of turn."""
    given = _Conversation(messages, tokenizer, tools, variables)
    start = given.turn_start(len(given.form) - 1, given.text)
    if start is None:
        raise NotPrefixPreserving("the chat template writes no generation prompt before the turn")
    return given.text[start:]


class NotPrefixPreserving(BadData):
    """A template that renders the first turns differently when others follow."""


def assistant_spans(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    **variables: object,
) -> tuple[str, list[Span]]:
    """(text, half-open character spans of what the assistant writes in it)."""
    given = _Conversation(messages, tokenizer, tools, variables)
    return given.text, given.spans()


class _Conversation:
    """Messages in the first form that their template renders whole: `form`, its `text`, and
    `marked`, the spans of generation blocks in it."""

    def __init__(
        self, messages: Sequence[Message], tokenizer: Tokenizer, tools: Tools,
        variables: Mapping[str, Any], add_generation_prompt: bool = False,
    ) -> None:  # fmt: skip
        self._given = tokenizer, tools, variables
        self.has_marks = bool(GENERATION_MARK.search(tokenizer.chat_template or ""))
        errors, reasons = list[str](), list[str]()
        for form in forms(messages):
            try:
                text, marked = rendered(form, tokenizer, add_generation_prompt, tools, variables)
                reason = left_out(form, text, self.written)
            except BadData as error:
                errors.append(str(error))
                continue
            if not reason:
                self.form, self.text, self.marked = form, text, marked
                return
            reasons.append(reason)
        raise BadData((reasons or errors)[0])

    def written(self, messages: Sequence[Message], prompt: bool = False, **more: object) -> str:
        """The text of other messages."""
        tokenizer, tools, variables = self._given
        return rendered(messages, tokenizer, prompt, tools, {**variables, **more})[0]

    @property
    def _turns(self) -> list[int]:
        return [i for i, message in enumerate(self.form) if message["role"] == "assistant"]

    def spans(self) -> list[Span]:
        """Half-open character spans of what the assistant writes in the text."""
        if self.has_marks:
            return self.marked
        return [self.turn_span(turn, self.text) for turn in self._turns]

    def rows(self) -> list[tuple[str, list[Span]]]:
        """(text, spans of what the assistant writes in it) of each row."""
        try:
            return [(self.text, self.spans())]
        except NotPrefixPreserving:
            texts = ((turn, self.written(self.form[: turn + 1])) for turn in self._turns)
        return [(text, [self.turn_span(turn, text)]) for turn, text in texts]

    def turn_span(self, turn: int, text: str) -> Span:
        """Span of one assistant turn in `text`."""
        after = self.written(self.form[: turn + 1])
        start = self.turn_start(turn, after)
        if start is None or not text.startswith(after):
            raise NotPrefixPreserving(
                f"the chat template rewrites earlier turns: message {turn} (expected a template "
                "whose text only grows, or one with {% generation %} marks)"
            )
        answer = text_of(self.form[turn]).rpartition("</think>")[2]
        if not written(answer, "".join(after[start:].split())):
            raise BadData(f"the chat template leaves out the content of message {turn}")
        return start, len(after)

    def turn_start(self, turn: int, after: str) -> int | None:
        """Where in `after`, the text that ends with it, the assistant begins to write a turn."""
        tokenizer, _, variables = self._given
        before, prompts = self.form[:turn], []
        switched = THINKING not in variables and THINKING in (tokenizer.chat_template or "")
        for more in ({}, {THINKING: False}, {THINKING: True}) if switched else ({},):
            prompt = self.written(before, prompt=True, **more)
            if after.startswith(prompt):
                return len(prompt)
            prompts.append(prompt)
        header = len(self.written(before)) if turn else 0
        # the generation prompt goes on in another way than the turn: it begins where they part
        pairs = enumerate(zip(prompts[0], after, strict=False))
        start = next((at for at, (a, b) in pairs if a != b), min(len(prompts[0]), len(after)))
        if (tag := after.rfind("<", header, start)) > after.rfind(">", header, start):
            start = tag  # not inside a token such as <think>
        content = self.form[turn].get("content")
        if isinstance(content, str) and (body := content.strip()):
            marked = content.replace(body, f"{START}{body}{END}", 1)
            text = self.written([*before, {**self.form[turn], "content": marked}])
            if START in text and text.replace(START, "").replace(END, "") == after:
                start = min(start, text.index(START))
        return start if start > header else None


def _masked(text: str, spans: list[Span], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    special = tokenizer.special_texts
    spans = [_to_end_of_turn(text, span, special) for span in spans]
    ids, offsets = tokenizer.encode_with_offsets(text)
    mask = [0] * len(ids)
    following = iter(sorted(spans))
    span = next(following, None)
    for i, (start, end) in enumerate(offsets):
        while span is not None and start >= span[1]:
            span = next(following, None)
        if span is None:
            break
        mask[i] = int(max(end, start + 1) > span[0])
    if not any(mask):
        raise BadData(
            "no token of the conversation was written by the assistant (expected an assistant "
            "message with content); the loss would be empty"
        )
    return ids, mask


def _to_end_of_turn(text: str, span: Span, special: tuple[str, ...]) -> Span:
    """The span up to a special token that ends it, without white space after that.

    Where none does, the special token that follows ends the turn (GLM's <|user|>).
    """
    start, end = span
    kept = text[start:end].rstrip()
    if kept.endswith(special):
        return start, start + len(kept)
    follows = max((len(token) for token in special if text.startswith(token, end)), default=0)
    return start, end + follows
