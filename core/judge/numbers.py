"""Numbers in text: where the final one stands, and which values its notation may have.

Decimal comma and point, digit groups, fractions (1/2, \\frac{1}{2}, 2\\frac12) and percent are
read.
"""

import math
import re

from sabia.core.errors import BadData

NUMBER = re.compile(
    r"(?<![\w.,])[-+\u2212]?(?:\d[\d.,\u00a0\u202f]*\d|\d|\.\d+)(?:[eE][-+]?\d+)?"
    r"(?:\s*/\s*\d+)?(?:\s*%)?"
)
HASHES = re.compile(r"####\s*(.+)")
_PART = r"\s*(?:\{\s*([-+\u2212]?\d+)\s*\}|(\d))"  # {12} or 1
_FRACTION = re.compile(r"(?:(?<![\w.,])(\d+)\s*)?\\[dt]?frac" + _PART + _PART)
_UNREAD = re.compile(r"\\(?:[dt]?frac|sqrt(?:\[[^\]{]*\])?)\s*")
EXPRESSION = "\ufffc"
REL_TOLERANCE = 1e-6


def readings(token: str) -> set[float]:
    """Possible values of a written number: '1.234' is 1.234 or, with digit groups, 1234."""
    token = re.sub(r"[\s\u00a0\u202f]", "", token).replace("\u2212", "-")
    if token.endswith("%"):
        token = token[:-1]
    top, _, bottom = token.partition("/")
    if bottom:
        return {value / float(bottom) for value in readings(top) if float(bottom)}
    values = set()
    for plain in _plain_forms(top):
        try:
            values.add(float(plain))
        except ValueError:
            continue
    return values


def _plain_forms(token: str) -> list[str]:
    """Forms that Python parses, one for each meaning of the separators."""
    marks = [mark for mark in token if mark in ".,"]
    if not marks:
        return [token]
    last, groups = marks[-1], "," if marks[-1] == "." else "."
    if len(set(marks)) == 2:
        return [token.replace(groups, "").replace(last, ".")] if marks.count(last) == 1 else []
    if len(marks) > 1:
        return [token.replace(last, "")] if re.search(r"\d[.,]\d{3}\Z", token) else []
    decimal = token.replace(",", ".")
    grouped = re.fullmatch(r"[-+]?[1-9]\d{0,2}[.,]\d{3}", token)
    return [decimal, token.replace(last, "")] if grouped else [decimal]


def final_number(text: str) -> str | None:
    """The final number of a text: in its last \\boxed{}, after its last ####, else the last one."""
    text = plain_fractions(text)
    return _marked_number(text) or _last_number(text)


def plain_fractions(text: str) -> str:
    """The text with \\frac{1}{2} as 1/2."""
    return _FRACTION.sub(_plain_fraction, text)


def _plain_fraction(match: re.Match[str]) -> str:
    """\\frac{1}{2} as 1/2 and 2\\frac{1}{2} as 5/2."""
    whole, *parts = match.groups()
    top, bottom = (int((braced or digit).replace("\u2212", "-")) for braced, digit in
                   (parts[:2], parts[2:]))  # fmt: skip
    if bottom < 0:
        top, bottom = -top, -bottom
    if whole is None:
        return f"{top}/{bottom}"
    return f"{int(whole) * bottom + top}/{bottom}"


def _last_number(text: str) -> str | None:
    """The last number; None if a root, or a fraction that is not one of numbers, follows it."""
    text = _without_expressions(text)
    numbers = list(NUMBER.finditer(text))
    return numbers[-1][0] if numbers and EXPRESSION not in text[numbers[-1].end() :] else None


def _without_expressions(text: str) -> str:
    """The text with EXPRESSION for each root and each fraction that is left, with its arguments."""
    parts, end = [], 0
    while (match := _UNREAD.search(text, end)) is not None:
        parts += [text[end : match.start()], EXPRESSION]
        end = match.end()
        while end >= 0 and text.startswith("{", end):
            end = _closed(text, end)
        if end < 0:  # the text was cut in it
            return "".join(parts)
    return "".join([*parts, text[end:]])


def _closed(text: str, opened: int) -> int:
    """The index behind the brace that closes the one at `opened`, -1 without one."""
    depth = 0
    for at in range(opened, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return at + 1
    return -1


def boxed(text: str) -> str | None:
    """What is inside the last \\boxed{…}, None without a complete one."""
    start = text.rfind("\\boxed")
    opened = text.find("{", start)
    if start < 0 or opened < 0 or text[start + 6 : opened].strip():
        return None
    end = _closed(text, opened)
    return None if end < 0 else text[opened + 1 : end - 1]


def _marked_number(text: str) -> str | None:
    hashes = HASHES.findall(text)
    for inside in (boxed(text), hashes[-1] if hashes else None):
        if inside and (value := _last_number(inside)):
            return value
    return None


def number(text: str, reference: str) -> bool:
    """The text's final number has the reference's value (relative tolerance 1e-6)."""
    expected = _reference_values(reference)
    given = final_number(text)
    return given is not None and any(
        math.isclose(value, want, rel_tol=REL_TOLERANCE, abs_tol=1e-12)
        for value in readings(given)
        for want in expected
    )


def _reference_values(reference: str) -> set[float]:
    """The value of a reference: a number, or a worked answer that marks one."""
    try:
        return {float(reference)}
    except ValueError:
        plain = plain_fractions(reference)
        whole = NUMBER.fullmatch(plain.strip())
        marked = whole[0] if whole else _marked_number(plain)
    if not marked or not (values := readings(marked)):
        raise BadData(
            f"not a number: reference {reference!r:.80} (expected a number, or a text that marks "
            "one by #### or \\boxed{})"
        )
    return values
