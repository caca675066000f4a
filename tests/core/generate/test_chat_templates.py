"""Families of chat templates: every plain answer is learnt, no call is damaged or dropped silently.

The templates below have the shapes of published ones and are written for these tests. Where the
package trl is installed, its copies of the published templates are tested too.
"""

import importlib.util
import json
import random
from functools import cache
from pathlib import Path

import pytest

from sabia.core.errors import BadData
from sabia.core.generate import chat
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe

SPECIAL = (
    "<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>", "<|calls|>", "<|/calls|>",
    "<|observation|>", "<|tool|>",
)  # fmt: skip
# The generation prompt opens a reasoning that no finished turn has; calls are concatenated text.
DEEPSEEK = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>' + m.content }}
{%- elif m.role == 'tool' %}{{- '<|tool|>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '<|assistant|>' + (m.content or '') + '<|calls|>' }}
{%- for call in m.tool_calls %}
{{- call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```' }}
{%- endfor %}{{- '<|/calls|><|end|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- endif %}
"""
# The same, but an empty reasoning is written into the finished turn, and prompted on request.
NEMOTRON = """\
{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|assistant|>\\n' }}
{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}
{%- else %}{{- '<think></think>' }}{%- endif %}{{- m.content | trim }}
{%- for call in m.tool_calls or [] %}
{{- '<|calls|>' + call.function.name }}
{%- for name, value in call.function.arguments | items %}
{{- '\\n<' + name + '>' + (value if value is string else value | tojson) }}
{%- endfor %}{{- '<|/calls|>' }}
{%- endfor %}{{- '<|end|>\\n' }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' + ('<think>\\n' if enable_thinking else '<think></think>') }}
{%- endif %}
"""
# Arguments as JSON: those that are text already come out in quotes. One call a turn.
LLAMA = """\
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|assistant|>\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|end|>' }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content | trim + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
WITHOUT_TOOLS = """\
{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
# No token ends a turn; that of the next role does.
GLM = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|observation|>\\n' + m.content }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '<|calls|>' + call.function.name + (call.function.arguments | tojson) }}
{%- endfor %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
# Content as a list of parts; a text is left out.
VISION = """\
{%- for m in messages %}{{- '<|' + m.role + '|>' }}
{%- for part in m.content %}{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}
{{- '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
SHAPES = {"deepseek": DEEPSEEK, "nemotron": NEMOTRON, "llama": LLAMA, "vision": VISION,
          "without tools": WITHOUT_TOOLS, "glm": GLM}  # fmt: skip


def published() -> dict[str, str]:
    spec = importlib.util.find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else Path("/none")
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


@cache
def with_template(template: str) -> Tokenizer:
    base = train_bpe(["What is it? It is 95. add 37 + 58 assistant user tool"] * 9, 400)
    definition = json.loads(base.definition)
    count = base.vocab_size
    added = [{"id": count + n, "content": text, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False, "special": True}
             for n, text in enumerate(SPECIAL)]  # fmt: skip
    definition["added_tokens"] = [*definition["added_tokens"], *added]
    return Tokenizer(json.dumps(definition), {**base.config, "bos_token": "<s>"}, template)


def written(rows, tokenizer) -> list[str]:
    return [
        tokenizer.decode([i for i, kept in zip(ids, mask, strict=True) if kept])
        for ids, mask in rows
    ]


def question(text: str = "What is it?") -> dict:
    return {"role": "user", "content": text}


def answer(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def call(arguments, name: str = "add") -> dict:
    return {"type": "function", "id": "c1", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("name", [*SHAPES, *published()])
def test_a_plain_question_and_answer_is_learnt(name):
    tokenizer = with_template({**SHAPES, **published()}[name])
    chosen = random.Random(0)
    words = ["It", "<b>", "is", "95.", "<", "ok\n\n", "{a}", "the <|x", "None", "\u00e7", "no"]
    for _ in range(40):
        text = " ".join(chosen.choices(words, k=chosen.randint(1, 6))).strip()
        rows = chat.render_rows([question(), answer(text)], tokenizer)
        (learnt,) = written(rows, tokenizer)
        head, _, end = learnt.rpartition(text)
        assert text in learnt
        assert "What" not in learnt
        if name in SHAPES:
            assert (head.strip("\n"), end) in (("", "<|end|>"), ("", ""))
        turns = [question(), answer(text), question("and now?"), answer(text)]
        rows = chat.render_rows(turns, tokenizer)
        learnt = "".join(written(rows, tokenizer))
        assert learnt.count(text) >= 2
        assert "now?" not in learnt


def test_the_turn_begins_with_what_the_assistant_writes():
    for name, expected in (
        ("deepseek", "<b>No.<|end|>"),  # its prompt and the answer both begin with <
        ("nemotron", "<b>No.<|end|>"),
        ("glm", "<b>No.<|user|>"),
    ):
        turns = [question(), answer("<b>No."), question("why?"), answer("<b>No.")]
        tokenizer = with_template(SHAPES[name])
        (learnt,) = written(chat.render_rows(turns, tokenizer), tokenizer)
        assert learnt == expected + ("<b>No." if name == "glm" else expected)
    tokenizer = with_template(NEMOTRON)
    rows = chat.render_rows([question(), answer("No.", reasoning_content="Hm.")], tokenizer)
    assert written(rows, tokenizer) == ["Hm.\n</think>\nNo.<|end|>"]
    tokenizer = with_template(DEEPSEEK)
    rows = chat.render_rows([question(), answer(None, tool_calls=[call("{}")])], tokenizer)
    assert written(rows, tokenizer) == ["<|calls|>add\n```json\n{}\n```<|/calls|><|end|>"]


def arguments(chosen: random.Random) -> dict:
    values = [7, -1.5, True, False, None, "x", "say \"so\" & 'no'", "two\nlines",
              "\u00e7\U0001f600", [1, "a"], {"b": [2]}, ""]  # fmt: skip
    return {f"key_{n}": chosen.choice(values) for n in range(chosen.randint(0, 4))}


@pytest.mark.parametrize("name", ["deepseek", "nemotron", "llama", "glm"])
def test_arguments_as_text_and_as_objects_give_the_same_tokens(name):
    tokenizer, chosen = with_template(SHAPES[name]), random.Random(1)
    for _ in range(150):
        given = arguments(chosen)
        text = json.dumps(given, ensure_ascii=False)
        rows = [
            chat.render_rows(
                [question("add"), answer(content, tool_calls=calls), *after], tokenizer
            )
            for content in ("", None)
            for calls in ([call(given)], [call(text)], json.dumps([call(text)]))
            for after in ([{"role": "tool", "content": "95", "name": "add"}],)
        ]
        (learnt,) = written(rows[0], tokenizer)
        assert all(row == rows[0] for row in rows)
        assert "add" in learnt
        if name != "nemotron":
            assert text in learnt
            assert f'"{text}' not in learnt


def test_a_template_that_drops_calls_gives_a_reject():
    for name, calls, content in (
        ("without tools", 1, ""),
        ("without tools", 1, "add"),  # the name is in the text
        ("llama", 2, ""),
        ("vision", 1, ""),
    ):
        turns = [question("add"), answer(content, tool_calls=[call({"a": 1})] * calls)]
        with pytest.raises(
            BadData, match=r"call of 'add' in message 1|one call at once|leaves out"
        ):
            chat.render_rows(turns, with_template(SHAPES[name]))
        with pytest.raises(BadData):
            chat.render([*turns, question()], with_template(SHAPES[name]), True)


def test_a_lost_answer_or_question_is_named():
    deaf = "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% endfor %}<|assistant|>"
    with pytest.raises(BadData, match="leaves out the content of message 0"):
        chat.render([question()], with_template(deaf), True)
    silent = WITHOUT_TOOLS.replace("m.content", "(m.content if m.role == 'user' else 'x')")
    with pytest.raises(BadData, match="leaves out the content of message 1"):
        chat.render_rows([question(), answer("It is 95.")], with_template(silent))


def test_calls_that_are_none_are_refused():
    for wrong in ([3], [{"name": None}], "[", [{"function": "add"}]):
        with pytest.raises(BadData):
            chat.render_rows([question(), answer("", tool_calls=wrong)], with_template(LLAMA))
