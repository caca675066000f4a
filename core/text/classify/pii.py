"""Find personal data in text, count it by kind, and mask it.

Kinds; where two matches overlap, the kind that comes first here wins:
    email    name@host with a dotted host of letters, digits and hyphens
    iban     country code, two check digits, groups of letters and digits; remainder 1 modulo 97
    card     13 to 19 digits, also in groups, of an issuer's range (Visa, Mastercard, American
             Express, Discover, Diners, JCB, Elo, Hipercard) with a valid Luhn digit
    cnpj     14 digits, plain or NN.NNN.NNN/NNNN-NN, with valid check digits
    cpf      11 digits, plain or NNN.NNN.NNN-NN, with valid check digits
    ip       IPv4 and IPv6 addresses that are public (no private, reserved or local ones)
    phone    + and 8 to 15 digits (E.164), also in groups; Brazilian ones with area code:
             (NN) 9NNNN-NNNN, (NN) NNNN-NNNN, or NN 9NNNN-NNNN
No letter or digit may be adjacent to a number. A mask is the kind in brackets, `[email]`, so
masking is idempotent. Every pattern has a bounded length, so the time is linear in the text.
ISO 13616 (IBAN), ISO/IEC 7812 (cards), ITU-T E.164; Receita Federal (CPF, CNPJ).
"""

import ipaddress
import re
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

KINDS = ("email", "iban", "card", "cnpj", "cpf", "ip", "phone")
NAMES = tuple(f"pii_{kind}" for kind in KINDS)

_EMAIL = re.compile(
    r"(?<![\w.+-])[\w.+-]{1,64}@(?=[^\s@]{4,255})(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)"
    r"{1,8}[A-Za-z]{2,24}(?![\w-])"
)
_IBAN = re.compile(r"(?<!\w)[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?!\w)")
_IPV4 = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?!\w|\.[0-9])")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_PHONE = re.compile(
    r"(?<![\w+])\+[0-9]{1,3}[ .\-]?(?:\([0-9]{1,4}\)[ .\-]?)?[0-9](?:[ .\-]?[0-9]){4,13}(?!\w)"
    r"|(?<![\w(])\(0?[1-9][0-9]\) ?(?:9 ?[0-9]{4}|[2-5][0-9]{3})[ \-]?[0-9]{4}(?!\w)"
    r"|(?<![\w.+/-])[1-9][0-9] 9[0-9]{4}[ \-]?[0-9]{4}(?!\w)"
)
_CARD_LENGTHS = {  # issuer ranges as prefixes → lengths
    **dict.fromkeys(["4"], (13, 16, 19)),
    **dict.fromkeys([str(p) for p in (*range(51, 56), *range(2221, 2721))], (16,)),
    **dict.fromkeys(["34", "37"], (15,)),
    **dict.fromkeys(["6011", "65", *map(str, range(644, 650))], (16, 19)),
    **dict.fromkeys(["36", "38", "39", *map(str, range(300, 306))], (14,)),
    **dict.fromkeys([str(p) for p in range(3528, 3590)], (16, 19)),
    **dict.fromkeys(["5067", "509", "6277", "6362", "6363", "606282", "3841"], (16,)),
}
Span = tuple[int, int, str]


def luhn(digits: str) -> bool:
    """Whether the last digit is the right check digit (ISO/IEC 7812)."""
    total = 0
    for index, char in enumerate(reversed(digits)):
        value = int(char) * (1 + index % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0


def is_card(digits: str) -> bool:
    """Whether the digits have an issuer's range and length, and a valid Luhn digit."""
    lengths = (_CARD_LENGTHS.get(digits[:size], ()) for size in (1, 2, 3, 4, 6))
    return any(len(digits) in allowed for allowed in lengths) and luhn(digits)


def _checks(digits: str, size: int, top: int) -> bool:
    """Whether there are two right digits after `size` digits, which are not all the same: weights
    2, 3, … top from the right, modulo 11."""
    if len(digits) != size + 2:
        return False
    for length in (size, size + 1):
        weights = [2 + index % (top - 1) for index in range(length)]
        pairs = zip(reversed(digits[:length]), weights, strict=True)
        rest = sum(int(char) * weight for char, weight in pairs) % 11
        if int(digits[length]) != (0 if rest < 2 else 11 - rest):
            return False
    return len(set(digits)) > 1


def is_iban(text: str) -> bool:
    """Whether the remainder modulo 97 is 1, with the first four characters moved to the end and
    letters as 10 … 35."""
    bare = text.replace(" ", "")
    if not 15 <= len(bare) <= 34:
        return False
    return int("".join(str(int(char, 36)) for char in bare[4:] + bare[:4])) % 97 == 1


def _is_public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _start_of(pattern: str) -> re.Pattern[str]:
    """The first digit of a number without adjacent letters or digits, overlapping ones included."""
    return re.compile(rf"(?<!\w)(?<![0-9][.,/])(?=(?:{pattern})(?!\w)(?![.,/][0-9]))[0-9]")


_CNPJ, _CPF = partial(_checks, size=12, top=9), partial(_checks, size=9, top=11)
_NUMBERS: tuple[tuple[str, re.Pattern[str], re.Pattern[str], Callable[[str], bool]], ...] = tuple(
    (kind, _start_of(pattern), re.compile(pattern), is_valid)
    for kind, pattern, is_valid in (
        ("card", r"[0-9]{13,19}", is_card),
        ("card", r"[0-9]{4}(?P<gap>[ -])[0-9]{4}(?P=gap)[0-9]{4}(?P=gap)[0-9]{1,7}", is_card),
        ("card", r"[0-9]{4}(?P<gap>[ -])[0-9]{6}(?P=gap)[0-9]{4,5}", is_card),
        ("cnpj", r"[0-9]{14}|[0-9]{2}\.[0-9]{3}\.[0-9]{3}/[0-9]{4}-[0-9]{2}", _CNPJ),
        ("cpf", r"[0-9]{11}|[0-9]{3}\.[0-9]{3}\.[0-9]{3}[-/][0-9]{2}", _CPF),
    )
)


_SINGLE: tuple[tuple[str, re.Pattern[str], Callable[[str], bool], str], ...] = (
    ("email", _EMAIL, lambda _: True, "@"),
    ("iban", _IBAN, is_iban, ""),
    ("ip", _IPV4, _is_public, "."),
    ("ip", _IPV6, _is_public, ":"),
    ("phone", _PHONE, lambda _: True, ""),
)


def find(text: str) -> list[Span]:
    """(start, end, kind) of the personal data in a text, in order and without overlap."""
    candidates: list[Span] = []
    digits = any(map(text.__contains__, "0123456789"))
    for kind, pattern, is_valid, needed in _SINGLE:
        if (digits or kind == "email") and needed in text:
            spans = (match.span() for match in pattern.finditer(text))
            candidates += [(a, b, kind) for a, b in spans if is_valid(text[a:b])]
    for kind, start, whole, is_valid in _NUMBERS if digits else ():
        for first in start.finditer(text):
            match = whole.match(text, first.start())
            if match and is_valid("".join(filter(str.isdecimal, match[0]))):
                candidates.append((*match.span(), kind))
    kept: list[Span] = []
    taken: set[int] = set()
    for begin, end, kind in sorted(candidates, key=lambda span: (KINDS.index(span[2]), span[0])):
        if taken.isdisjoint(range(begin, end)):
            taken.update(range(begin, end))
            kept.append((begin, end, kind))
    return sorted(kept)


def mask(text: str, spans: Sequence[Span]) -> str:
    """The text with each span as its kind in brackets."""
    parts, last = [], 0
    for start, end, kind in spans:
        parts += [text[last:start], f"[{kind}]"]
        last = end
    return "".join([*parts, text[last:]])


def scan(texts: Sequence[str], masked: bool = False) -> tuple[list[str], dict[str, np.ndarray]]:
    """(the texts, masked if requested; counts float64[n] by NAMES)."""
    counts = np.zeros((len(KINDS), len(texts)))
    new_texts = []
    for row, text in enumerate(texts):
        spans = find(text)
        for _, _, kind in spans:
            counts[KINDS.index(kind), row] += 1
        new_texts.append(mask(text, spans) if masked else text)
    return new_texts, dict(zip(NAMES, counts, strict=True))
