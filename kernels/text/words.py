"""Text as the words of the Gopher, C4 and FineWeb filters: the rules and the reference.

The rules follow those of spaCy's blank English tokenizer, which datatrove uses, closely enough that
figures agree (tests and bench_heuristics compare them). White space splits a text into chunks; a
code point of a script without spaces is a chunk by itself. These are split off a chunk, in turn:
    prefixes   two dots or more, AFFIX, CURRENCY, ICON, one of § % = — –, and + before no digit;
    suffixes   two dots or more, AFFIX, ICON, — –, 's ’s, + CURRENCY or a unit after a digit, a dot
               after a lower-case letter, digit, quote, other punctuation or two capitals.
The rest is one word if it is listed (SPECIAL: abbreviations; contractions are split in two) or
looks like an address; else it is split at infixes, which are words themselves: dots (two or more),
…, ICON, + - * ^ between digits, a dot from lower to upper case, a comma or hyphens between letters,
and : < > = / before a letter. Lines never share a word.
"""

import functools
import re

from sabia.kernels.text.character_flags import (
    AFFIX,
    ALPHA,
    CURRENCY,
    DIGIT,
    HAN,
    ICON,
    LOWER,
    QUOTE,
    SOLO,
    SPACE,
    SYMBOL,
    UPPER,
    flag_table,
)
from sabia.kernels.text.folding import SOLO_END, TABLE_SIZE
from sabia.kernels.text.reference import MASK64, mix_int

WORD_BASE, BLOCK_BASE = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
LONGEST_SPECIAL = 9
LONGEST_UNIT = 4
_NOT = """ai are ca could dare did do does had has have is may might must need ought sha should was
were wo would"""
_PRONOUNS = "i you he she it we they there that this who what when where why how"
_ENDINGS = ("'ll", "'ve", "'d", "'re", "'m")
_MODALS = "could might must should would"
_WHOLE = """
Adm. Apr. Ariz. Ark. Aug. Bros. C++ Calif. Co. Colo. Conn. Corp. D.C. Dec. Dr. E.g. Feb. Fla. Ga.
Gen. Gov. I.e. Ill. Inc. Jan. Jr. Jul. Jun. Ltd. Mar. Mass. Messrs. Mich. Minn. Mo. Mr. Mrs. Ms. Mt.
N.C. N.J. N.Y. Nov. O'clock Oct. Pa. Ph.D. Prof. Rep. Rev. Sen. Sep. Sept. St. Va. Wash. a.m. and/or
co. e.g. i.e. ma'am o'clock p.m. v.s. vs. w/o
"""
_BARE_SAFE = frozenset(["ill", "well", "hell", "shell", "wed", "shed", "were", "here", "whore"])
_FACES = """:) :-) :( :-( ;) ;-) :D :-D :P :-P :/ :-/ :O :] [: ): (: (; :* <3 8) :') '' 's 'S 'd
're 'll 'em 'cause"""
_UNITS = """km m dm cm mm ha nm yd in ft kg g mg t lb oz kmh mph hPa Pa mbar mb MB kb KB gb GB tb TB
T G M K % м км кг г"""
UNITS = frozenset(_UNITS.split())  # endings that are split from the digit before them


@functools.lru_cache(maxsize=1)
def specials() -> dict[str, int]:
    """Listed chunk → where it is split in two (0: it is one word)."""
    entries = dict.fromkeys([*_WHOLE.split(), *_FACES.split()], 0)
    entries |= {f"{letter}.": 0 for letter in "abcdefghijklmnopqrstuvwxyz"}
    for base in _NOT.split():
        entries |= {base + end: len(base) for end in ("n't", "n’t", "nt")}
    for base in _PRONOUNS.split():
        for end in _ENDINGS[: 5 if base == "i" else 4]:
            bare = {base + end[1:]} - _BARE_SAFE
            for whole in {base + end, base + end.replace("'", "’")} | bare:
                entries[whole] = len(base)
    for base in _MODALS.split():
        entries |= {base + end: len(base) for end in ("'ve", "’ve", "ve")}
    entries |= {"cannot": 3, "gonna": 3, "gotta": 3, "let's": 3, "let’s": 3}
    titled = {word.capitalize(): at for word, at in entries.items() if at}
    entries |= titled
    for hour in range(1, 13):
        entries |= {f"{hour}{half}": len(str(hour)) for half in ("am", "pm", "a.m.", "p.m.")}
    return {word: at for word, at in entries.items() if len(word) <= LONGEST_SPECIAL}


def chunk_hash(text: str) -> int:
    """The hash of a listed chunk: its code points as a polynomial, mixed (case counts)."""
    total = 0
    for char in text:
        total = total * WORD_BASE + ord(char) + 1
    return mix_int(total)


def word_hash(text: str) -> int:
    """The hash of a word or line: its UTF-8 eight bytes at a time, mixed (case counts)."""
    data = text.encode("utf-8", "surrogatepass")
    total = len(data) * WORD_BASE & MASK64
    for start in range(0, len(data), 8):
        block = int.from_bytes(data[start : start + 8], "little")
        total = (total ^ block) * BLOCK_BASE & MASK64
        total ^= total >> 32
    return mix_int(total)


def flags_of(char: str) -> int:
    """The flags of one code point, also beyond the table."""
    code = ord(char)
    if code < TABLE_SIZE:
        return int(flag_table()[code])
    return HAN if code < SOLO_END else SYMBOL


def chunks(text: str) -> list[tuple[int, int]]:
    """Spans of the chunks of a text."""
    spans, start = [], -1
    for position, char in enumerate(text):
        flags = flags_of(char)
        if flags & (SPACE | SOLO):
            if start >= 0:
                spans.append((start, position))
            start = -1
            if flags & SOLO:
                spans.append((position, position + 1))
        elif start < 0:
            start = position
    return spans + ([(start, len(text))] if start >= 0 else [])


def words(text: str) -> list[str]:
    """The words of a text in order."""
    return [word for start, end in chunks(text) for word in _parted(text[start:end])]


def _parted(chunk: str) -> list[str]:
    head: list[str] = []
    tail: list[str] = []
    while chunk and chunk not in specials():
        cut = _prefix(chunk)
        if cut:
            head.append(chunk[:cut])
            chunk = chunk[cut:]
            if chunk in specials():
                break
        keep = len(chunk) - _suffix(chunk)
        if keep < len(chunk):
            tail.append(chunk[keep:])
            chunk = chunk[:keep]
        elif not cut:
            break
    return head + _middle(chunk) + tail[::-1]


def _prefix(chunk: str) -> int:
    """Length of the prefix of a chunk, or 0."""
    dots = len(chunk) - len(chunk.lstrip("."))
    if dots:
        return dots if dots > 1 else 0
    if chunk[0] == "+":
        return int(not (len(chunk) > 1 and flags_of(chunk[1]) & DIGIT))
    return int(bool(flags_of(chunk[0]) & (AFFIX | CURRENCY | ICON)) or chunk[0] in "§%=—–")


def _suffix(chunk: str) -> int:
    """Length of the suffix of a chunk, or 0."""
    if not chunk:
        return 0
    dots = len(chunk) - len(chunk.rstrip("."))
    if dots > 1:
        return dots
    if len(chunk) > 1 and chunk[-1] in "sS" and chunk[-2] in "'’":
        return 2
    last = flags_of(chunk[-1])
    before = flags_of(chunk[-2]) if len(chunk) > 1 else 0
    if dots:
        strong = before & (LOWER | DIGIT | AFFIX) or (len(chunk) > 1 and chunk[-2] in "%²-+")
        capitals = before & UPPER and len(chunk) > 2 and flags_of(chunk[-3]) & UPPER
        return int(bool(strong or capitals))
    if last & (AFFIX | ICON) or chunk[-1] in "—–":
        return 1
    if before & DIGIT and (last & CURRENCY or chunk[-1] == "+"):
        return 1
    lengths = range(1, min(LONGEST_UNIT, len(chunk) - 1) + 1)
    fits = (n for n in lengths if flags_of(chunk[-n - 1]) & DIGIT and chunk[-n:] in UNITS)
    return max(fits, default=0)


_HOST = re.compile(r"([^@/?#:]+)(?::([^/?#]*))?(?:[/?#].*)?", re.DOTALL)


def is_address(text: str) -> bool:
    """Whether a text looks like a URL or an e-mail address: `scheme://`, user and path are
    optional, the host ends in two or more lower-case letters after a dot."""
    starts, behind = [0, _after_user(text, 0)], text.find("://", 2)
    if behind > 0 and all(char in "+.-_" or flags_of(char) & (ALPHA | DIGIT)
                          for char in text[:behind]):  # fmt: skip
        starts += [behind + 3, _after_user(text, behind + 3)]
    return any(_is_host(text[start:]) for start in starts)


def _after_user(text: str, start: int) -> int:
    """Behind the first @ with something before it, else `start`."""
    at = text.find("@", start)
    return at + 1 if at > start else start


def _is_host(text: str) -> bool:
    """Whether a text is a host, optionally with a port and a path."""
    match = _HOST.fullmatch(text)
    if not match:
        return False
    host, port = match.groups()
    if port is not None and not (
        2 <= len(port) <= 5 and all(flags_of(char) & DIGIT for char in port)
    ):
        return False
    labels = host.split(".")
    if len(labels) < 2 or len(labels[-1]) < 2:
        return False
    body = all(
        label and not any(_no_host(char) for char in label) and label[0] not in "-_"
        for label in labels[:-1]
    )
    return body and all(flags_of(char) & LOWER and char != "'" for char in labels[-1])


def _no_host(char: str) -> bool:
    """True for ASCII code points that host names do not contain."""
    return char < "\x80" and not (char.isalnum() or char in "-_")


def _middle(chunk: str) -> list[str]:
    if not chunk:
        return []
    at = specials().get(chunk)
    if at is not None:
        return [chunk[:at], chunk[at:]] if at else [chunk]
    if is_address(chunk):
        return [chunk]
    parts, start, position = [], 0, 0
    while position < len(chunk):
        length = _infix(chunk, position)
        if length:
            parts += [chunk[start:position], chunk[position : position + length]]
            start = position + length
        position += max(length, 1)
    return [part for part in [*parts, chunk[start:]] if part]


def _infix(chunk: str, position: int) -> int:
    """Length of the infix at a position of a chunk, or 0."""
    char, rest = chunk[position], chunk[position:]
    dots = len(rest) - len(rest.lstrip("."))
    if dots > 1:
        return dots
    if char == "…" or flags_of(char) & ICON:
        return 1
    before = flags_of(chunk[position - 1]) if position else 0
    after = flags_of(chunk[position + 1]) if position + 1 < len(chunk) else 0
    if (
        char in "+-*^"
        and before & DIGIT
        and (after & DIGIT or chunk[position + 1 : position + 2] == "-")
    ):
        return 1
    if char == ".":
        return int(bool(before & (LOWER | QUOTE) and after & (UPPER | QUOTE)))
    if char == ",":
        return int(bool(before & ALPHA and after & ALPHA))
    if not before & (ALPHA | DIGIT):
        return 0
    if char in ":<>=/":
        return int(bool(after & ALPHA))
    dashes = re.match(r"-{1,3}|—{1,2}|–|~", rest)
    if not dashes:
        return 0
    end = position + dashes.end()
    return dashes.end() if end < len(chunk) and flags_of(chunk[end]) & ALPHA else 0
