"""The splitting patterns of byte-level BPE as compiled functions over UTF-8 bytes.

Each returns where the match that starts at byte i ends, within [i, end), exactly as the regular
expression would (leftmost, first alternative that matches, greedy with backtracking), without a
regular-expression engine. `end` is the end of the text for look-ahead, as it is for the engine.

gpt2      '(?:s|t|re|ve|m|ll|d)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+
cl100k    (?i:'s|…)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,cap}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*
          |\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+, where `letters` may be \\p{L} or [\\p{L}\\p{M}]
o200k     words by case: U = [Lu Lt Lm Lo M], W = [Ll Lm Lo M]:
          [^\\r\\n\\p{L}\\p{N}]?U*W+(?i:'s|…)?|[^\\r\\n\\p{L}\\p{N}]?U+W*(?i:'s|…)?|numbers
          | ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|white space as cl100k
deepseek  [ASCII mark][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+
          | ?[\\p{P}\\p{S}]+[\\r\\n]*|white space as cl100k; what matches nothing stays together
characters  no pattern, or one that splits at blanks (NO_CUTS, AT_BLANKS, AT_RUNS); and between
          characters that no merge joins: merges on one side do not depend on the other, so that no
          id changes, and pre-tokens stay short, whatever the length of the text

The bytes are valid UTF-8 with at least 8 readable bytes behind them. Classes: text.unicode_classes.
Arrays are given by their addresses: a call with arrays costs more than most matches.
"""

import numpy as np

from sabia.kernels.bpe.definitions import BLANK, HASH_FACTOR, METASPACE
from sabia.kernels.runtime.numba_jit import njit
from sabia.kernels.text.memory_numba import byte_at, int_at, trailing_zeros, word_at
from sabia.kernels.text.unicode_classes import (
    CJK,
    CLASS_BITS,
    LETTER,
    LOWER,
    MARK,
    NEWLINE,
    NUMBER,
    OTHER,
    PUNCT,
    SPACE,
    UPPER,
)

GPT2, CL100K, O200K, DEEPSEEK, CHARACTERS = range(5)
# before each blank; or before and behind runs of line feeds, and before runs of blanks
NO_CUTS, AT_BLANKS, AT_RUNS = range(3)
LETTERS = 1 << UPPER | 1 << LOWER | 1 << LETTER
MARKED_LETTERS = LETTERS | 1 << MARK
_NUMBERS = 1 << NUMBER
_WHITE = 1 << SPACE | 1 << NEWLINE
_NEWLINES = 1 << NEWLINE
_MARKS = 1 << PUNCT
_ALL = (1 << 9) - 1
_UPPERS = 1 << UPPER | 1 << LETTER | 1 << MARK
_LOWERS = 1 << LOWER | 1 << LETTER | 1 << MARK
_BOTH = 1 << LETTER | 1 << MARK
_NO_LEAD = _NEWLINES | LETTERS | _NUMBERS  # what [^\r\n\p{L}\p{N}] leaves out
_DEEPSEEK_LEAD = 1 << OTHER | 1 << SPACE | 1 << MARK | 1 << NUMBER
_APOSTROPHE, _SLASH, _LINE_FEED = 39, 47, 10
_FOLD, _SEVEN, _HIGH, _FROM_A, _BEHIND_Z = (
    np.uint64(byte * 0x0101010101010101) for byte in (0x20, 0x7F, 0x80, 0x1F, 0x05)
)
_FACTOR = np.uint64(HASH_FACTOR)
_jit = njit(nogil=True, boundscheck=False)
_inline = njit(nogil=True, forceinline=True)


@_inline
def code_at(data, i):
    """(code point, bytes) at i."""
    c = byte_at(data, i)
    if c < 0x80:
        return c, 1
    second = byte_at(data, i + 1) & 0x3F  # payload of a continuation byte: 6 bits
    if c < 0xE0:
        return ((c & 0x1F) << 6) | second, 2
    low = (second << 6) | (byte_at(data, i + 2) & 0x3F)
    if c < 0xF0:
        return ((c & 0x0F) << 12) | low, 3
    return ((c & 0x07) << 18) | (low << 6) | (byte_at(data, i + 3) & 0x3F), 4


@_inline
def entry_at(data, i, classes):
    """(table entry, bytes) of the code point at i."""
    code, size = code_at(data, i)
    return byte_at(classes, code), size


@_inline
def _bit_at(data, i, classes):
    """(1 << class, bytes) of the code point at i."""
    entry, size = entry_at(data, i, classes)
    return np.int64(1) << (entry & CLASS_BITS), size


@_jit
def _run(data, i, end, classes, mask):
    """The end of the code points from i whose classes are in the mask."""
    while i < end:
        bit, size = _bit_at(data, i, classes)
        if not bit & mask:
            break
        i += size
    return i


@_inline
def _word_letters(data, i):
    """How many of the eight bytes from i are ASCII letters before the first that is none: in a
    byte's low seven bits folded to lower case, adding 0x1F sets the high bit from `a` on, and
    adding 5 sets it behind `z`."""
    word = word_at(data, i)
    low = (word | _FOLD) & _SEVEN  # seven bits of each byte, in lower case
    # high bit of each byte from a to z below 0x80
    letters = (low + _FROM_A) & ~(low + _BEHIND_Z) & ~word & _HIGH
    return trailing_zeros(letters ^ _HIGH) >> 3


@_inline
def _letters(data, i, end, classes, mask):
    """`_run` for a mask that has all ASCII letters and nothing else of ASCII."""
    while i < end:
        size = _word_letters(data, i)
        i += size
        if size == 8:
            continue
        if i >= end or byte_at(data, i) < 0x80:
            break
        bit, size = _bit_at(data, i, classes)
        if not bit & mask:
            break
        i += size
    return min(i, end)


@_jit
def _numbers(data, i, end, classes, cap):
    """The end of at most `cap` numbers from i."""
    while i < end and cap > 0:
        bit, size = _bit_at(data, i, classes)
        if bit != _NUMBERS:
            break
        i += size
        cap -= 1
    return i


@_jit
def _contraction(data, i, end, any_case):
    """Bytes of 's 't 're 've 'm 'll 'd at i, else 0; any case includes the long s."""
    if i + 1 >= end or byte_at(data, i) != _APOSTROPHE:
        return 0
    fold = 0x20 if any_case else 0
    a = byte_at(data, i + 1) | fold
    if a == 115 or a == 116 or a == 109 or a == 100:  # s, t, m, d
        return 2
    # U+017F, the long s
    if any_case and byte_at(data, i + 1) == 0xC5 and byte_at(data, i + 2) == 0xBF and i + 2 < end:
        return 3
    if i + 2 >= end:
        return 0
    b = byte_at(data, i + 2) | fold
    # re, ve, ll
    pair = (a == 114 and b == 101) or (a == 118 and b == 101) or (a == 108 and b == 108)
    return 3 if pair else 0


@_jit
def _white(data, i, end, classes, lines):
    """White space from i: to its last line end if `lines`; else all but a last one before text."""
    last, line_end, q = i, -1, i
    while q < end:
        bit, size = _bit_at(data, q, classes)
        if not bit & _WHITE:
            break
        last = q
        q += size
        if bit == _NEWLINES:
            line_end = q
    if lines and line_end >= 0:
        return line_end
    # \s+(?!\S): the last code point before text is left out
    return last if q < end and last > i else q


@_jit
def _gpt2(data, i, end, classes):
    size = _contraction(data, i, end, False)  # 's 't 're 've 'm 'll 'd
    if size:
        return i + size
    # an optional blank before the match
    j = i + 1 if byte_at(data, i) == BLANK and i + 1 < end else i
    bit, size = _bit_at(data, j, classes)
    if bit & _WHITE:
        return _white(data, i, end, classes, False)
    mask = np.int64(_ALL & ~(LETTERS | _NUMBERS | _WHITE))
    if bit & LETTERS:
        return _letters(data, j + size, end, classes, LETTERS)
    if bit == _NUMBERS:
        mask = np.int64(_NUMBERS)
    return _run(data, j + size, end, classes, mask)


@_jit
def _cl100k(data, i, end, classes, cap, letters):
    size = _contraction(data, i, end, True)  # (?i:'s|...)
    if size:
        return i + size
    bit, size = _bit_at(data, i, classes)
    if bit & letters:
        return _letters(data, i + size, end, classes, letters)
    if bit == _NUMBERS:
        return _numbers(data, i, end, classes, cap)
    j, next_bit, next_size = i + size, np.int64(0), 0
    if j < end:
        next_bit, next_size = _bit_at(data, j, classes)
        if next_bit & letters and bit != _NEWLINES:
            return _letters(data, j + next_size, end, classes, letters)  # [^\r\n\p{L}\p{N}]?\p{L}+
    others = _ALL & ~(letters | _NUMBERS | _WHITE)  # [^\s\p{L}\p{N}]
    if byte_at(data, i) == BLANK and next_bit & others:
        j += next_size
    elif bit & _WHITE:
        return _white(data, i, end, classes, True)
    return _run(data, _run(data, j, end, classes, others), end, classes, _NEWLINES)


@_jit
def _cased(data, i, end, classes):
    """The end of U*W+ from i, or -1."""
    q, both_end = i, -1
    while q < end:
        bit, size = _bit_at(data, q, classes)
        if not bit & _UPPERS:
            if bit & _LOWERS:
                return _run(data, q + size, end, classes, _LOWERS)  # W*
            break
        q += size
        if bit & _BOTH:  # such a code point may be the W of U*W+
            both_end = q
    return both_end


@_jit
def _o200k(data, i, end, classes, cap, contractions):
    bit, size = _bit_at(data, i, classes)
    lead, stop = not bit & _NO_LEAD, -1
    if lead:
        stop = _cased(data, i + size, end, classes)  # [^\r\n\p{L}\p{N}]U*W+
    if stop < 0:
        stop = _cased(data, i, end, classes)  # U*W+ without the lead
    if stop < 0 and lead:
        # lead, then U+; W* would have matched above
        after = _run(data, i + size, end, classes, _UPPERS)
        stop = after if after > i + size else -1
    if stop < 0 and bit & _UPPERS:
        stop = _run(data, i, end, classes, _UPPERS)  # U+
    if stop >= 0:
        return stop + (_contraction(data, stop, end, True) if contractions else 0)
    if bit == _NUMBERS:
        return _numbers(data, i, end, classes, cap)
    others, j = _ALL & ~(LETTERS | _NUMBERS | _WHITE), i
    if bit & _WHITE:
        j = i + 1
        if byte_at(data, i) != BLANK or j >= end or not _bit_at(data, j, classes)[0] & others:
            return _white(data, i, end, classes, True)
    j = _run(data, j, end, classes, others)
    while j < end and (
        byte_at(data, j) == _SLASH or byte_at(data, j) == 10 or byte_at(data, j) == 13
    ):
        j += 1
    return j


@_jit
def _deepseek_match(data, i, end, classes):
    """The end of the match at i, or -1."""
    bit, size = _bit_at(data, i, classes)
    j = i + size
    next_bit = _bit_at(data, j, classes)[0] if j < end else np.int64(0)
    if bit == _MARKS and byte_at(data, i) < 0x80:
        q = j
        while q < end and 97 <= byte_at(data, q) | 0x20 <= 122:  # [A-Za-z]+
            q += 1
        if q > j:
            return q
    if bit & MARKED_LETTERS or (bit & _DEEPSEEK_LEAD and next_bit & MARKED_LETTERS):
        return _letters(data, j, end, classes, MARKED_LETTERS)
    if bit == _MARKS or (byte_at(data, i) == BLANK and next_bit == _MARKS):
        return _run(data, _run(data, j, end, classes, _MARKS), end, classes, _NEWLINES)
    return _white(data, i, end, classes, True) if bit & _WHITE else -1


@_jit
def _deepseek(data, i, end, classes):
    stop = _deepseek_match(data, i, end, classes)
    if stop >= 0:
        return stop
    while i < end:
        i += _bit_at(data, i, classes)[1]
        if i < end and _deepseek_match(data, i, end, classes) >= 0:
            break
    return i


@_inline
def _join_bit(mask, left, right):
    """(word, bit) of a pair of ids in `joins`, which has mask + 1 words."""
    key = (np.uint64(left) << np.uint64(32)) ^ np.uint64(np.uint32(right))
    h = (key * _FACTOR) >> np.uint64(32)
    return np.int64((h >> np.uint64(6)) & mask), np.uint64(1) << (h & np.uint64(63))


@_jit
def fill_joins(joins, pairs):
    """Set the bits of pairs int32[n, 2] of ids."""
    for k in range(len(pairs)):
        word, bit = _join_bit(np.uint64(len(joins) - 1), pairs[k, 0], pairs[k, 1])
        joins[word] |= bit


@_inline
def _is_cut(left, right, cuts):
    """Whether the pattern splits between two code points, in which a blank may be METASPACE."""
    blank = right in (BLANK, METASPACE)
    if cuts == AT_BLANKS or not blank:
        return blank or (cuts == AT_RUNS and (left == _LINE_FEED) != (right == _LINE_FEED))
    return left not in (BLANK, METASPACE)


@_jit
def characters_end(data, i, end, cuts, by_character, joins, mask):
    """The end of the characters from i that merges may join; ASCII letters count as joined."""
    left, size = code_at(data, i)
    while True:
        i += size
        if 97 <= left | 0x20 <= 122:
            while i < end:
                letters = _word_letters(data, i)
                i += letters
                if letters < 8:
                    break
            left = byte_at(data, i - 1)
        if i >= end:
            return end
        right, size = code_at(data, i)
        if cuts != NO_CUTS and _is_cut(left, right, cuts):
            return i
        word, bit = _join_bit(mask, int_at(by_character, left), int_at(by_character, right))
        if not word_at(joins, 8 * word) & bit:
            return i
        left = right


@_jit
def split_end(data, i, end, classes, family, cap, letters):
    """The end of the piece that starts at i; `letters` is o200k's "contractions" as 1 or 0."""
    if family == GPT2:
        return _gpt2(data, i, end, classes)
    if family == CL100K:
        return _cl100k(data, i, end, classes, cap, letters)
    if family == O200K:
        return _o200k(data, i, end, classes, cap, letters)
    return _deepseek(data, i, end, classes)


@_jit
def part_end(data, i, end, classes, digits, cjk):
    """The end of the part that earlier steps cut out at i: at most `digits` numbers, a run of
    kana and Han if `cjk`, or the text between those."""
    q = i
    while q < end:
        entry, size = entry_at(data, q, classes)
        number = digits > 0 and entry & CLASS_BITS == NUMBER
        if number or (cjk and entry & CJK):
            break
        q += size
    if q > i:
        return q
    if digits > 0:
        q = _numbers(data, i, end, classes, digits)
        if q > i:
            return q
    while q < end:
        entry, size = entry_at(data, q, classes)
        if not entry & CJK:
            break
        q += size
    return q
