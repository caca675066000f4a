"""The rules of Gopher and C4 on lines, those of `str.splitlines`."""

import numpy as np

from sabia.kernels.quality.definitions import LINE_ENDS, MAX_LINE_WORD, MIN_LINE_WORDS, PHRASES
from sabia.kernels.quality.repetition_numba import share
from sabia.kernels.runtime.numba_jit import njit
from sabia.kernels.text.character_flags import SPACE, SYMBOL, TERMINAL
from sabia.kernels.text.memory_numba import trailing_zeros
from sabia.kernels.text.words_numba import mark_words, next_clear, next_set, split

U = np.uint64
_FEED, _RETURN, _DOT, _DOTS = 0x0A, 0x0D, 0x2E, 0x2026
_MIN_WORDS, _MAX_WORD = MIN_LINE_WORDS, MAX_LINE_WORD
_jit = njit(nogil=True, boundscheck=False, _nrt=False)
_inline = njit(nogil=True, boundscheck=False, _nrt=False, forceinline=True)


def _codes(text: str) -> np.ndarray:
    return np.array([ord(char) for char in text], np.int32)


_PHRASES = _codes("".join(phrase + "\n" for phrase in PHRASES))
_CITED = _codes("[edit]\n[citation needed]\n")
_ENDS = _codes(LINE_ENDS)
_FIRST = np.array([chr(i) in {phrase[0] for phrase in PHRASES} for i in range(128)])


@_inline
def _any(bits, low, high):
    """Whether a bit from low to high is set."""
    while low < high:
        rest = bits[low >> 6] >> U(low & 63)
        if rest:
            return low + trailing_zeros(rest) < high
        low = ((low >> 6) + 1) << 6
    return False


@_jit
def _phrase(codes, lower, position, end, phrases):
    """(number of the phrase at `position`, its length), or (-1, 0); a line feed ends each phrase.
    lower: the table of lower case, in which the code points are compared, or none."""
    start, number = 0, 0
    while start < phrases.shape[0]:
        j = 0
        while position + j < end and phrases[start + j] == _small(codes, position + j, lower):
            j += 1
        if phrases[start + j] == _FEED:
            return number, j
        while phrases[start + j] != _FEED:
            j += 1
        start += j + 1
        number += 1
    return -1, 0


@_inline
def _small(codes, i, lower):
    code = np.int64(codes[i])
    return np.int64(lower[code]) if lower is not None and code < lower.shape[0] else code


@_inline
def _ends_in_dots(codes, low, high):
    three = high - low >= 3 and codes[high - 1] == _DOT and codes[high - 2] == _DOT
    return three and codes[high - 3] == _DOT


@_jit
def _citation(codes, i, end):
    """Length of `[12]`, `[]`, `[edit]` or `[citation needed]` at i, else 0."""
    j = i + 1
    while j < end and 0x30 <= codes[j] <= 0x39:
        j += 1
    if j < end and codes[j] == 0x5D:
        return j + 1 - i
    return _phrase(codes, None, i, end, _CITED)[1]


@_jit
def _uncited(codes, flags, low, high, copy_start):
    """Copy a line without citations behind the document; return the copy's end (`copy_start` if
    none) and whether there are citations."""
    cited, i, top = False, low, copy_start
    while i < high and not cited:
        cited = codes[i] == 0x5B and _citation(codes, i, high) > 0
        i += 1
    if not cited:
        return copy_start, False
    i = low
    while i < high:
        size = _citation(codes, i, high) if codes[i] == 0x5B else 0
        if size:
            i += size
            continue
        codes[top], flags[top] = codes[i], flags[i]
        top += 1
        i += 1
    return top, True


@_jit
def _line_rule(
    codes, flags, lower, spaces, first_bytes, suspects, brackets, curlies, low, high, copy_start
):
    """(rule that refuses a stripped line, its start and end without citations); rules: 0 keep,
    1 long word, 2 no terminal, 3 few words, 4 lorem ipsum, 5 javascript, 6 bracket, 7 policy."""
    words, i = 0, low
    while i < high and (words < _MIN_WORDS or high - low > _MAX_WORD):
        end = min(next_set(spaces, i), high)
        if end - i > _MAX_WORD:  # MAX_LINE_WORD
            return 1, low, high
        words += 1
        i = next_clear(spaces, end)
    a, b = np.int64(first_bytes[low]), np.int64(first_bytes[high])
    top, cited = copy_start, False
    if _any(brackets, a, b):
        top, cited = _uncited(codes, flags, low, high, copy_start)
    if cited:
        low, high = copy_start, top
    ended = False
    for code in _ENDS:
        ended |= high > low and codes[high - 1] == code
    if not ended or _ends_in_dots(codes, low, high):
        return 2, low, high
    if words < _MIN_WORDS:
        return 3, low, high
    if not cited and not _any(suspects, a, b) and not _any(curlies, a, b):
        return 0, low, high
    rule = 0
    for i in range(low, high):
        code = _small(codes, i, lower)
        if code == 0x7B:
            rule |= 4
        elif code < 128 and _FIRST[code]:
            number = _phrase(codes, lower, i, high, _PHRASES)[0]
            if number == 0:
                return 4, low, high
            rule |= 8 if number == 1 else 2 if number > 1 else 0
    return 5 if rule & 8 else 6 if rule & 4 else 7 if rule & 2 else 0, low, high


@_jit
def _sentences(codes, flags, starts, ends, first, last):
    count, ended = 1, False
    for w in range(first, last):
        if ends[w] - starts[w] == 1 and flags[starts[w]] & TERMINAL:
            ended = True
        elif ended:
            symbols = True
            for i in range(starts[w], ends[w]):
                symbols &= flags[i] & SYMBOL != 0
            if not symbols:
                count, ended = count + 1, False
    return count


@_jit
def line_figures(
    codes, flags, lower, first_bytes, size, letters, spaces, suspects, brackets, curlies, breaks,
    count, starts, ends, n, slots, points, pairs, units, firsts, lasts, out,
):  # fmt: skip
    """The line statistics of Gopher and C4: out[4:6] and out[21:25]."""
    lines, bullets, dots, kept, sentences, lorem, bracket = 0, 0, 0, 0, 0, 0, 0
    start, word, copy_start = 0, 0, 64 * (size // 64 + 1)
    for j in range(count + 1):
        end = breaks[j] if j < count else size
        if end < start or start >= size:  # the line feed after a carriage return; the end
            continue
        after = end + 1
        if end + 1 < size and codes[end] == _RETURN and codes[end + 1] == _FEED:
            after += 1
        low, high = min(next_clear(spaces, start), end), end
        while high > low and flags[high - 1] & SPACE:  # strip
            high -= 1
        lines += 1
        if high > low:
            bullets += codes[low] == 0x2022 or codes[low] == 0x2D
            dots += codes[high - 1] == _DOTS or _ends_in_dots(codes, low, high)
        first = word
        while word < n and starts[word] < end:
            word += 1
        rule, low, high = _line_rule(
            codes, flags, lower, spaces, first_bytes, suspects, brackets, curlies, low, high,
            copy_start,
        )  # fmt: skip
        lorem |= rule == 4
        bracket |= rule == 6
        if rule == 0:
            kept += 1
            if low >= size:
                mark_words(codes, flags, low, high, letters, spaces)
                words = split(
                    codes, flags, letters, spaces, low, high, slots, points, pairs, units, firsts,
                    lasts, 0,
                )  # fmt: skip
                sentences += _sentences(codes, flags, firsts, lasts, 0, words)
            else:
                sentences += _sentences(codes, flags, starts, ends, first, word)
        start = after
    # gopher_bullet_lines, gopher_ellipsis_lines
    out[4], out[5] = share(bullets, lines), share(dots, lines)
    # c4_kept_lines, c4_sentences, c4_lorem_ipsum, c4_curly_bracket
    out[21], out[22], out[23], out[24] = share(kept, lines), sentences, lorem, bracket
