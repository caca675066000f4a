"""The compiled engine of sabia.kernels.quality: one pass of decoding, then counting, a document.

Sets and counts are open-addressed tables that are kept for the batch: entries carry the stamp of
their set, so that a new set needs no clearing. A repeated (k+1)-gram holds a repeated
k-gram, so the counts stop at the first k without one.
"""

import numpy as np

from sabia.kernels.quality.definitions import (
    FIGURES,
    LINE_ENDS,
    MAX_LINE_WORD,
    MIN_LINE_WORDS,
    PHRASES,
    SHORT_LINE,
)
from sabia.kernels.runtime.numba_jit import njit
from sabia.kernels.text.character_flags import (
    ALPHA,
    BREAK,
    CODE,
    SOLO,
    SPACE,
    SYMBOL,
    TERMINAL,
    flag_table,
    lower_table,
)
from sabia.kernels.text.utf8_numba import mix
from sabia.kernels.text.words import WORD_BASE
from sabia.kernels.text.words_numba import decode, split, tables, word_hash

U = np.uint64
_P, _M = U(WORD_BASE), U(0xD6E8FEB86659FD93)
_FEED, _HASH, _DOT, _DOTS = 0x0A, 0x23, 0x2E, 0x2026
_SHORT, _MIN_WORDS, _MAX_WORD = (
    SHORT_LINE,
    MIN_LINE_WORDS,
    MAX_LINE_WORD,
)
_NAN = np.nan
_jit = njit(nogil=True, cache=True, boundscheck=False, _nrt=False)
_inline = njit(nogil=True, cache=True, boundscheck=False, _nrt=False, forceinline=True)


def _codes(text: str) -> np.ndarray:
    return np.array([ord(char) for char in text], np.int32)


_PHRASES = _codes("".join(phrase + "\n" for phrase in PHRASES))
_CITED = _codes("[edit]\n[citation needed]\n")
_ENDS = _codes(LINE_ENDS)
_FIRST = np.array([chr(i) in {phrase[0] for phrase in PHRASES} for i in range(128)])


@_inline
def _share(part, whole):
    return part / whole if whole else _NAN


@_inline
def _seen(table, last, stamp, key):
    """Slot of a key in the set `stamp` of slots 0 to last, and whether it was in the set; the key
    is added."""
    slot = np.int64(key & U(last))  # linear probing; slots of other stamps are free
    while table[slot, 1] == stamp:
        if table[slot, 0] == key:
            return slot, True
        slot = (slot + 1) & last
    table[slot, 0], table[slot, 1] = key, stamp
    return slot, False


@_inline
def _last(count):
    """The last slot of a table for `count` keys: 2**b - 1, at least twice as many."""
    last = 63
    while last < 2 * count:
        last = 2 * last + 1
    return last


@_jit
def _span_hash(codes, start, end):
    total = U(end - start)
    for i in range(start, end):
        total = total * _P + U(codes[i] + 1)  # sum of (code + 1) * P**(length-1-i)
    return mix(total)


@_jit
def _parts(codes, start, end, least, table, stamp):
    """(parts between runs of `least` line feeds or more, those seen before, their characters)."""
    parts, again, characters, first, i = 0, 0, 0, start, start
    last = _last((end - start) // 2 + 1)
    while i <= end:
        run = 0
        while i + run < end and codes[i + run] == _FEED:  # a run of line feeds
            run += 1
        if i == end or run >= least:
            parts += 1
            if _seen(table, last, stamp, _span_hash(codes, first, i))[1]:
                again += 1
                characters += i - first
            first = i + run
        i += max(run, 1)
    return parts, again, characters


@_jit
def _repetition(codes, flags, size, hashes, lengths, n, grams, runs, slots, table, stamp, out):
    """Fill out[8:21]; return the last stamp used."""
    low, high = 0, size
    while low < high and flags[low] & SPACE:  # strip
        low += 1
    while high > low and flags[high - 1] & SPACE:
        high -= 1
    for level, (a, b, least) in enumerate(((low, high, 2), (0, size, 1))):
        stamp += U(1)
        parts, again, characters = _parts(codes, a, b, least, table, stamp)
        # share of paragraphs or lines seen before
        out[8 + 2 * level] = _share(again, parts) if size else _NAN
        out[9 + 2 * level] = _share(characters, size)
    for i in range(n):
        grams[i], runs[i] = hashes[i], n
    for k in range(2, 11):
        for i in range(n - k + 1):
            grams[i] = grams[i] * _M + hashes[i + k - 1]  # hash of the k-gram from word i
        stamp += U(1)
        if k <= 4:
            out[10 + k] = _share(_top(grams, runs, slots, lengths, n, k, table, stamp), size)
            continue
        repeated = _repeated(grams, runs, lengths, n, k, table, stamp)
        for later in range(k, 11):
            out[10 + later] = _share(repeated, size)
        if repeated == 0:
            break
    return stamp


@_jit
def _top(grams, runs, slots, lengths, n, k, table, stamp):
    """Times × length of the most frequent k-gram, the earliest of them.

    runs[i] is the number of consecutive places from i with a repeated (k-1)-gram, afterwards with a
    repeated k-gram; a k-gram can be repeated only where it is 2 or more.
    """
    if n < k:
        runs[:n] = 0
        return 0
    best, earliest, last = 1, 0, _last(n)
    for i in range(n - k + 1):
        slots[i] = -1
        if runs[i] < 2:
            continue
        slot, there = _seen(table, last, stamp, mix(grams[i]))
        if not there:
            table[slot, 2], table[slot, 3] = 0, i
        slots[i] = slot
        table[slot, 2] += U(1)
        times, first = np.int64(table[slot, 2]), np.int64(table[slot, 3])
        if times > best or (times == best and first < earliest):
            best, earliest = times, first
    for i in range(n - 1, -1, -1):
        repeated = i + k <= n and slots[i] >= 0 and table[slots[i], 2] > 1
        runs[i] = (runs[i + 1] + 1 if i + 1 < n else 1) if repeated else 0
    length = k - 1  # the spaces between the words
    for i in range(earliest, earliest + k):
        length += lengths[i]
    return best * length


@_jit
def _repeated(grams, runs, lengths, n, k, table, stamp):
    """Characters in k-grams that came before; such a k-gram is skipped as a whole. runs[i] is the
    number of repeated 4-grams from i: a repeated k-gram has k - 3."""
    characters, i, last = 0, 0, _last(n)
    while i + k <= n:
        if runs[i] >= k - 3 and _seen(table, last, stamp, mix(grams[i]))[1]:
            for j in range(i, i + k):
                characters += lengths[j]
            i += k
        else:
            i += 1
    return characters


@_jit
def _words(codes, flags, size, starts, ends, n, hashes, lengths, stops, out):
    """Hash and measure the words; fill out[0:8] but the statistics of lines."""
    plain, spelled, letters, alphabetic, stop_bits = 0, 0, 0, 0, U(0)
    for w in range(n):
        start, end = starts[w], ends[w]
        hashes[w], lengths[w] = word_hash(codes, start, end), end - start
        symbols, alpha = True, False
        for i in range(start, end):
            symbols &= flags[i] & SYMBOL != 0
            alpha |= flags[i] & ALPHA != 0
        alphabetic += alpha
        if not symbols:
            plain += 1
            if not flags[start] & SOLO:
                spelled += 1
                letters += end - start
        for s in range(stops.shape[0]):
            if stops[s] == hashes[w]:
                stop_bits |= U(1) << U(s)  # bit s: stop word s occurs
    marks, dots, i = 0, 0, 0
    while i < size:
        marks += codes[i] == _HASH
        dots += codes[i] == _DOTS
        if i + 2 < size and codes[i] == _DOT and codes[i + 1] == _DOT and codes[i + 2] == _DOT:
            dots += 1
            i += 2
        i += 1
    there = 0
    for s in range(stops.shape[0]):
        there += np.int64((stop_bits >> U(s)) & U(1))
    out[0], out[1] = plain, _share(letters, spelled)  # word_count, mean_word_length
    out[2], out[3] = _share(marks, n), _share(dots, n)  # gopher_hash_ratio, gopher_ellipsis_ratio
    # gopher_alpha_words, gopher_stop_words
    out[6], out[7] = _share(alphabetic, n), there if stops.shape[0] else _NAN


@_jit
def _next_line(codes, flags, start, size):
    """(end of the line that begins at start, start of the next), as str.splitlines has it."""
    end = start
    while end < size and not flags[end] & BREAK:
        end += 1
    after = end + 1
    if end + 1 < size and codes[end] == 0x0D and codes[end + 1] == _FEED:
        after += 1
    return end, after


@_jit
def _phrase(codes, position, end, phrases):
    """(number of the phrase at `position`, its length), or (-1, 0); a line feed ends each
    phrase."""
    start, number = 0, 0
    while start < phrases.shape[0]:
        j = 0
        while position + j < end and phrases[start + j] == codes[position + j]:
            j += 1
        if phrases[start + j] == _FEED:
            return number, j
        while phrases[start + j] != _FEED:
            j += 1
        start += j + 1
        number += 1
    return -1, 0


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
    return _phrase(codes, i, end, _CITED)[1]


@_jit
def _uncited(codes, flags, lower, low, high, copy_start):
    """Copy a line without citations behind the document; return the copy's end (`copy_start` if
    none)."""
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
        codes[top], flags[top], lower[top] = codes[i], flags[i], lower[i]
        top += 1
        i += 1
    return top, True


@_jit
def _line_rule(codes, flags, lower, low, high, copy_start):
    """(rule that refuses a stripped line, its start and end without citations); rules: 0 keep,
    1 long word, 2 no terminal, 3 few words, 4 lorem ipsum, 5 javascript, 6 bracket, 7 policy."""
    words, run = 0, 0
    for i in range(low, high):
        run = 0 if flags[i] & SPACE else run + 1
        words += run == 1
        if run > _MAX_WORD:  # MAX_LINE_WORD
            return 1, low, high
    top, cited = _uncited(codes, flags, lower, low, high, copy_start)
    if cited:
        low, high = copy_start, top
    ended = False
    for code in _ENDS:
        ended |= high > low and codes[high - 1] == code
    if not ended or _ends_in_dots(codes, low, high):
        return 2, low, high
    if words < _MIN_WORDS:
        return 3, low, high
    rule = 0
    for i in range(low, high):
        code = lower[i]
        if code == 0x7B:
            rule |= 4
        elif code < 128 and _FIRST[code]:
            number = _phrase(lower, i, high, _PHRASES)[0]
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
def _lines(
    codes, flags, lower, size, starts, ends, n, slots, points, pairs, units, firsts, lasts, out
):
    """The line statistics of Gopher and C4: out[4:6] and out[21:25]."""
    lines, bullets, dots, kept, sentences, lorem, bracket = 0, 0, 0, 0, 0, 0, 0
    start, word = 0, 0
    while start < size:
        end, after = _next_line(codes, flags, start, size)
        low, high = start, end
        while low < high and flags[low] & SPACE:  # strip
            low += 1
        while high > low and flags[high - 1] & SPACE:
            high -= 1
        lines += 1
        if high > low:
            bullets += codes[low] == 0x2022 or codes[low] == 0x2D
            dots += codes[high - 1] == _DOTS or _ends_in_dots(codes, low, high)
        first = word
        while word < n and starts[word] < end:
            word += 1
        rule, low, high = _line_rule(codes, flags, lower, low, high, size)
        lorem |= rule == 4
        bracket |= rule == 6
        if rule == 0:
            kept += 1
            if low >= size:
                count = split(
                    codes, flags, low, high, slots, points, pairs, units, firsts, lasts, 0
                )
                sentences += _sentences(codes, flags, firsts, lasts, 0, count)
            else:
                sentences += _sentences(codes, flags, starts, ends, first, word)
        start = after
    # gopher_bullet_lines, gopher_ellipsis_lines
    out[4], out[5] = _share(bullets, lines), _share(dots, lines)
    # c4_kept_lines, c4_sentences, c4_lorem_ipsum, c4_curly_bracket
    out[21], out[22], out[23], out[24] = _share(kept, lines), sentences, lorem, bracket


@_jit
def _feeds(codes, flags, lower, size, n, table, stamp, out):
    """The statistics of FineWeb and of characters: out[25:32]."""
    lines, ends, short, again, feeds, start = 0, 0, 0, 0, 0, 0
    ink, capitals, alphabetic, links, marks = 0, 0, 0, 0, 0
    blank, last = True, _last(size // 2 + 1)
    for i in range(size + 1):
        if i == size or codes[i] == _FEED:
            feeds += i < size
            if not blank:
                lines += 1
                ends += flags[i - 1] & TERMINAL != 0
                short += i - start <= _SHORT
                if _seen(table, last, stamp, _span_hash(codes, start, i))[1]:
                    again += i - start
            start, blank = i + 1, True
            continue
        flag = flags[i]
        ink += flag & SPACE == 0
        blank &= flag & SPACE != 0
        alphabetic += flag & ALPHA != 0
        marks += flag & CODE != 0
        capitals += lower[i] != codes[i]
        if codes[i] == 0x3A and i + 2 < size and codes[i + 1] == 0x2F and codes[i + 2] == 0x2F:
            links += 1
    # fineweb_punctuated_lines, fineweb_short_lines
    out[25], out[26] = _share(ends, lines), _share(short, lines)
    # fineweb_dup_chars, fineweb_newline_ratio
    out[27], out[28] = _share(again, size - feeds), _share(feeds, n)
    # upper_ratio, links, code_marks
    out[29], out[30], out[31] = _share(capitals, alphabetic), _share(links, n), _share(marks, ink)


@njit(nogil=True, cache=True)
def _measure(
    data, offsets, flag_table, lower_table, slots, points, pairs, units, stops, bounds, which, out
):
    most = 0
    for d in range(offsets.shape[0] - 1):
        most = max(most, offsets[d + 1] - offsets[d])
    codes, lower = np.empty(2 * most + 1, np.int32), np.empty(2 * most + 1, np.int32)
    flags = np.empty(2 * most + 1, np.uint16)
    starts, ends = np.empty(most + 1, np.int32), np.empty(most + 1, np.int32)
    firsts, lasts = np.empty(most + 1, np.int32), np.empty(most + 1, np.int32)
    grams, runs = np.empty(most + 1, np.uint64), np.empty(most + 1, np.int32)
    places = np.empty(most + 1, np.int32)
    hashes, lengths = np.empty(most + 1, np.uint64), np.empty(most + 1, np.int32)
    stamp = U(0)
    table = np.zeros(
        (_last(most + 1) + 1, 4), np.uint64
    )  # key, stamp of its set, count, first index
    for d in range(offsets.shape[0] - 1):
        size = decode(
            data, offsets[d], offsets[d + 1], flag_table, lower_table, codes, flags, lower
        )
        n = split(codes, flags, 0, size, slots, points, pairs, units, starts, ends, 0)
        words = stops[bounds[which[d]] : bounds[which[d] + 1]] if which[d] >= 0 else stops[:0]
        _words(codes, flags, size, starts, ends, n, hashes, lengths, words, out[d])
        stamp = _repetition(
            codes, flags, size, hashes, lengths, n, grams, runs, places, table, stamp, out[d]
        )
        _lines(
            codes, flags, lower, size, starts, ends, n, slots, points, pairs, units, firsts, lasts,
            out[d],
        )  # fmt: skip
        stamp += U(1)
        _feeds(codes, flags, lower, size, n, table, stamp, out[d])


def measure(
    data: np.ndarray, offsets: np.ndarray, stop_hashes: np.ndarray, stop_bounds: np.ndarray,
    which: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """float64[n, figures]; see sabia.kernels.quality.interface.measure."""
    out = np.empty((len(offsets) - 1, len(FIGURES)))
    tabled = flag_table(), lower_table()
    _measure(data, offsets, *tabled, *tables(), stop_hashes, stop_bounds, which, out)
    return out
