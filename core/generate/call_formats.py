"""How model families write tool calls and reasoning, read back from text.

A format has an opening and a closing text around each call and a reader of what is between them. It
gives [(name, arguments)], or None where the text is not of the format. All take time linear in the
text. Arguments that a format writes without types (`<parameter=a>37`) get the type that the tool's
JSON schema has for them, else that of the JSON value they are.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Call = tuple[str, Any]  # name, arguments: an object
Types = Mapping[str, Mapping[str, str]]  # tool → parameter → type of its JSON schema
Reader = Callable[[str, Types], list[Call] | None]

# (opening, closing, whether the prompt may have opened it)
REASONING = (
    ("<think>", "</think>", True),
    ("<|channel|>analysis<|message|>", "<|end|>", False),
    ("<|channel>thought\n", "<channel|>", False),
    ("to=self<|message|>", "<|eom|>", False),
)
# what stands between the parts of a turn and belongs to none
FRAMES = re.compile(
    r"<｜tool▁calls▁(?:begin|end)｜>|<\|tool_response>|</?atem:function_calls>|<\|start\|>assistant"
    r"|<\|channel\|>(?:final|commentary(?: json)?|analysis)<\|message\|>|<\|eom\|>"
    r"|to=[\w.-]{1,200}<\|message\|>"
)
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)(?=:)")
_JSON = {"true": True, "false": False, "null": None}
_PYTHON = {"True": True, "False": False, "None": None}


def split_calls(text: str, types: Types) -> tuple[str, list[Call]] | None:
    """(the text without its calls, the calls) by the first format that the text has; None else."""
    for opening, closing, reader in FORMATS:
        if opening not in text:
            continue
        rest, calls, end = list[str](), list[Call](), 0
        while (start := text.find(opening, end)) >= 0:
            rest.append(text[end:start])
            stop = text.find(closing, start := start + len(opening))
            if stop < 0:
                return None  # the text was cut in a call
            read = reader(text[start:stop], types)
            if read is None:
                return None
            calls, end = calls + read, stop + len(closing)
        return "".join([*rest, text[end:]]), calls
    call = _named(text, "parameters") if text.lstrip().startswith("{") else None  # Llama 3
    return None if call is None else ("", [call])


def _named(text: str, arguments: str) -> Call | None:
    """A JSON object with a name and arguments."""
    value = _json(text)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments)
    return (value["name"], given) if isinstance(given, dict) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object(name: str, text: str) -> list[Call] | None:
    value = _json(text)
    return [(name.strip(), value)] if isinstance(value, dict) else None


def _tool_call(text: str, types: Types) -> list[Call] | None:
    """Between <tool_call> tags: JSON (Qwen, Hermes), function tags (Qwen3.5) or key tags (GLM)."""
    body = text.strip()
    if body.startswith("{"):
        call = _named(body, "arguments")
        return None if call is None else [call]
    if body.startswith("<function=") and body.endswith("</function>"):
        name, _, rest = body[len("<function=") : -len("</function>")].partition(">")
        return _tagged(name, rest, ("<parameter=", ">", "</parameter>"), types, "\n")
    name, mark, rest = body.partition("<arg_key>")
    return _keyed(name.strip(), mark + rest, types)


def _tagged(
    name: str, text: str, tags: tuple[str, str, str], types: Types, around: str
) -> list[Call] | None:
    """Arguments <tag KEY>VALUE</tag>; `around`: one of it at each end of a value is no part."""
    opening, middle, closing = tags
    arguments, end = dict[str, Any](), 0
    while (start := text.find(opening, end)) >= 0:
        key, separator, _ = text[start + len(opening) :].partition(middle)
        begin = start + len(opening) + len(key) + len(middle)
        end = text.find(closing, begin)
        if not separator or end < 0 or key in arguments:
            return None
        value = text[begin:end]
        if around:
            value = value.removeprefix(around).removesuffix(around)
        arguments[key] = _typed(value, types.get(name, {}).get(key, ""))
        end += len(closing)
    return [(name, arguments)] if name and not text[end:].strip() else None


def _keyed(name: str, text: str, types: Types) -> list[Call] | None:
    """GLM: <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value>."""
    parts = re.split(r"<arg_key>|</arg_key>\s*<arg_value>|</arg_value>", text)
    keys, values, between = parts[1::3], parts[2::3], parts[0::3]
    if len(keys) != len(values) or any(part.strip() for part in between) or not name:
        return None
    known = types.get(name, {})
    return [(name, {k: _typed(v, known.get(k, "")) for k, v in zip(keys, values, strict=True)})]


def _typed(text: str, kind: str) -> Any:
    """A value that is written without quotes."""
    if kind == "string":
        return text
    if text in _PYTHON:
        return _PYTHON[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _deepseek(text: str, _types: Types) -> list[Call] | None:
    """function<sep>NAME, then a fenced JSON object."""
    _, _, rest = text.partition("<｜tool▁sep｜>")
    name, _, fenced = rest.partition("\n")
    return _object(name, fenced.strip().removeprefix("```json").removesuffix("```"))


def _harmony(text: str, _types: Types) -> list[Call] | None:
    """gpt-oss: NAME<|channel|>commentary json<|message|>JSON."""
    head, separator, body = text.partition("<|message|>")
    return _object(head.partition("<|channel|>")[0], body) if separator else None


def _gemma(text: str, _types: Types) -> list[Call] | None:
    """Gemma 4: NAME{key:value}, JSON with bare keys and strings between <|"|>."""
    name, brace, body = text.partition("{")
    parts = (brace + body).split('<|"|>')
    written = [
        json.dumps(part) if number % 2 else _BARE_KEY.sub(_quoted, part)
        for number, part in enumerate(parts)
    ]
    return _object(name, "".join(written).replace("None", "null"))


def _quoted(match: re.Match[str]) -> str:
    return match[1] + json.dumps(match[2])


def _pythonic(text: str, _types: Types) -> list[Call] | None:
    """LFM2: a list of Python calls with keywords, whose objects are JSON."""
    try:
        tree = ast.parse(f"[{text}]", mode="eval").body
        return [_call_of(node) for node in tree.elts]  # type: ignore[attr-defined]  # a list
    except (SyntaxError, ValueError, RecursionError, MemoryError, AttributeError):
        return None


class _Words(ast.NodeTransformer):
    """The words of JSON as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:  # called by that name
        return ast.Constant(_JSON[node.id]) if node.id in _JSON else node


def _call_of(node: object) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(not k.arg for k in node.keywords):
        raise ValueError("not a call with keywords")
    given = {str(k.arg): ast.literal_eval(_Words().visit(k.value)) for k in node.keywords}
    return ast.unparse(node.func), given


def _atem(text: str, types: Types) -> list[Call] | None:
    """Muse: NAME"> and parameters with quoted names."""
    name, separator, rest = text.partition('">')
    tags = ('<atem:parameter name="', '">', "</atem:parameter>")
    return _tagged(name, rest, tags, types, "") if separator else None


# (opening, closing, reader of what is between them)
FORMATS: tuple[tuple[str, str, Reader], ...] = (
    ("<tool_call>", "</tool_call>", _tool_call),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek),
    ("<|tool_call>call:", "<tool_call|>", _gemma),
    ("<|tool_call_start|>[", "]<|tool_call_end|>", _pythonic),
    ("to=functions.", "<|call|>", _harmony),
    ('<atem:invoke name="', "</atem:invoke>", _atem),
)
