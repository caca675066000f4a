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
from sabia.core.generate.message_forms import Messages, forms, left_out, text_of, written
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
    return _settled(messages, tokenizer, add_generation_prompt, tools, variables)[0]


def render_with_mask(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    **variables: object,
) -> tuple[list[int], list[int]]:
    """(ids[T], mask[T]) of a conversation; mask is 1 on what the assistant writes.

    Raises BadData if the assistant wrote nothing, or if the template rewrites earlier turns (it may
    drop old reasoning) and has no generation blocks: `render_rows` splits such conversations.
    """
    text, spans = assistant_spans(messages, tokenizer, tools, **variables)
    return _masked(text, spans, tokenizer)


def render_rows(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    **variables: object,
) -> list[tuple[list[int], list[int]]]:
    """`render_with_mask` as one row, or one row per assistant turn if turns are rewritten.

    A row of the second kind ends with its turn and has the mask on that turn alone.
    """
    rows = _row_texts(messages, tokenizer, tools, variables)
    return [_masked(text, spans, tokenizer) for text, spans in rows]


def render_answer(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    **variables: object,
) -> tuple[list[int], list[int]]:
    """(ids[T], mask[T]); mask is 1 on what the assistant writes in the last message alone."""
    text, marked, form = _settled(messages, tokenizer, False, tools, variables)
    before, _ = rendered(form[:-1], tokenizer, False, tools, variables)
    if GENERATION_MARK.search(tokenizer.chat_template or "") and text.startswith(before):
        spans = [span for span in marked if span[0] >= len(before)]
    else:
        spans = [_turn_span(form, len(form) - 1, text, tokenizer, tools, variables)]
    return _masked(text, spans, tokenizer)


def row_texts(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Tools = None, **variables: object
) -> list[str]:
    """The texts that `render_rows` encodes."""
    return [text for text, _ in _row_texts(messages, tokenizer, tools, variables)]


def _row_texts(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Tools, variables: Mapping[str, Any]
) -> list[tuple[str, list[Span]]]:
    """(text, spans of what the assistant writes in it) of each row."""
    text, marked, form = _settled(messages, tokenizer, False, tools, variables)
    try:
        return [(text, _spans(form, text, marked, tokenizer, tools, variables))]
    except NotPrefixPreserving:
        turns = [i for i, message in enumerate(form) if message["role"] == "assistant"]
    rows = []
    for turn in turns:
        text, _ = rendered(form[: turn + 1], tokenizer, False, tools, variables)
        rows.append((text, [_turn_span(form, turn, text, tokenizer, tools, variables)]))
    return rows


def turn_text(
    messages: Sequence[Message], tokenizer: Tokenizer, tools: Tools = None, **variables: object
) -> str:
    """What the assistant writes in the last message, with its end of turn."""
    text, _, form = _settled(messages, tokenizer, False, tools, variables)
    start = _turn_start(form, len(form) - 1, text, tokenizer, tools, variables)
    if start is None:
        raise NotPrefixPreserving("the chat template writes no generation prompt before the turn")
    return text[start:]


class NotPrefixPreserving(BadData):
    """A template that renders the first turns differently when others follow."""


def assistant_spans(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    **variables: object,
) -> tuple[str, list[Span]]:
    """(text, half-open character spans of what the assistant writes in it)."""
    text, marked, form = _settled(messages, tokenizer, False, tools, variables)
    return text, _spans(form, text, marked, tokenizer, tools, variables)


def _settled(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    add_generation_prompt: bool,
    tools: Tools,
    variables: Mapping[str, Any],
) -> tuple[str, list[Span], Messages]:
    """(text, spans of generation blocks, messages) in the first form that is rendered whole."""
    errors, reasons = list[str](), list[str]()
    for form in forms(messages):
        try:
            text, spans = rendered(form, tokenizer, add_generation_prompt, tools, variables)
            reason = left_out(
                form, text, lambda given: rendered(given, tokenizer, False, tools, variables)[0]
            )
        except BadData as error:
            errors.append(str(error))
            continue
        if not reason:
            return text, spans, form
        reasons.append(reason)
    raise BadData((reasons or errors)[0])


def _spans(
    form: Messages, text: str, marked: list[Span], tokenizer: Tokenizer, tools: Tools,
    variables: Mapping[str, Any],
) -> list[Span]:  # fmt: skip
    if GENERATION_MARK.search(tokenizer.chat_template or ""):
        return marked
    turns = [i for i, message in enumerate(form) if message["role"] == "assistant"]
    return [_turn_span(form, i, text, tokenizer, tools, variables) for i in turns]


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


def _turn_span(
    form: Messages, turn: int, text: str, tokenizer: Tokenizer, tools: Tools,
    variables: Mapping[str, Any],
) -> Span:  # fmt: skip
    """Span of one assistant turn in `text`."""
    after, _ = rendered(form[: turn + 1], tokenizer, False, tools, variables)
    start = _turn_start(form, turn, after, tokenizer, tools, variables)
    if start is None or not text.startswith(after):
        raise NotPrefixPreserving(
            f"the chat template rewrites earlier turns: message {turn} (expected a template whose "
            "text only grows, or one with {% generation %} marks)"
        )
    answer = text_of(form[turn]).rpartition("</think>")[2]
    if not written(answer, "".join(after[start:].split())):
        raise BadData(f"the chat template leaves out the content of message {turn}")
    return start, len(after)


def _turn_start(
    form: Messages, turn: int, after: str, tokenizer: Tokenizer, tools: Tools,
    variables: Mapping[str, Any],
) -> int | None:  # fmt: skip
    """Where in `after`, the text that ends with it, the assistant begins to write a turn."""
    prompts = []
    switched = THINKING not in variables and THINKING in (tokenizer.chat_template or "")
    for more in ({}, {THINKING: False}, {THINKING: True}) if switched else ({},):
        prompt, _ = rendered(form[:turn], tokenizer, True, tools, {**variables, **more})
        if after.startswith(prompt):
            return len(prompt)
        prompts.append(prompt)
    header = len(rendered(form[:turn], tokenizer, False, tools, variables)[0]) if turn else 0
    # the generation prompt goes on in another way than the turn: it begins where they part
    pairs = enumerate(zip(prompts[0], after, strict=False))
    start = next((at for at, (a, b) in pairs if a != b), min(len(prompts[0]), len(after)))
    if (tag := after.rfind("<", header, start)) > after.rfind(">", header, start):
        start = tag  # not inside a token such as <think>
    content = form[turn].get("content")
    if isinstance(content, str) and (body := content.strip()):
        marked = {**form[turn], "content": content.replace(body, f"{START}{body}{END}", 1)}
        text, _ = rendered([*form[:turn], marked], tokenizer, False, tools, variables)
        if START in text and text.replace(START, "").replace(END, "") == after:
            start = min(start, text.index(START))
    return start if start > header else None
