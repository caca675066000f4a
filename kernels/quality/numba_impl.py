"""The compiled engine of sabia.kernels.quality: one pass of decoding, then counting, a document.

Properties of characters are bits, 64 of them in a word, so that counts and searches take one step
for 64 characters. Lines and words are hashed as bytes. Sets and counts are open-addressed tables
that are kept for the batch: entries carry the stamp of their set, so that a new set needs no
clearing. A repeated (k+1)-gram holds two repeated k-grams, so that only those are counted; pairs of
words are first counted in a bitmap of their hashes.
"""

import functools

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
from sabia.kernels.text.memory_numba import equal_bytes, flagged, set_bits, trailing_zeros
from sabia.kernels.text.words_numba import (
    decode,
    mark_words,
    next_clear,
    next_set,
    split,
    tables,
    word_hash,
)

U = np.uint64
_M = U(0xA0761D6478BD642F)
_FEED, _RETURN, _DOT, _DOTS = 0x0A, 0x0D, 0x2E, 0x2026
_SHORT, _MIN_WORDS, _MAX_WORD = (
    SHORT_LINE,
    MIN_LINE_WORDS,
    MAX_LINE_WORD,
)
_NAN = np.nan
_LOWERED = 1 << 14  # flag of code points that `str.lower` replaces by another one
_jit = njit(nogil=True, cache=True, boundscheck=False, _nrt=False)
_inline = njit(nogil=True, cache=True, boundscheck=False, _nrt=False, forceinline=True)


def _codes(text: str) -> np.ndarray:
    return np.array([ord(char) for char in text], np.int32)


_PHRASES = _codes("".join(phrase + "\n" for phrase in PHRASES))
_CITED = _codes("[edit]\n[citation needed]\n")
_ENDS = _codes(LINE_ENDS)
_FIRST = np.array([chr(i) in {phrase[0] for phrase in PHRASES} for i in range(128)])
# one in each phrase; without k, which is also the lower case of U+212A
_PARTS = tuple(tuple(map(ord, part)) for part in ("lor", "jav", "f u", "icy", "coo"))


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
def _breaks(codes, flags, size, breaks):
    """Fill breaks with the places of line boundaries; return how many."""
    count = 0
    for block in range(size // 64 + 1):
        rest = flagged(flags, 64 * block, BREAK)
        while rest:
            breaks[count] = 64 * block + trailing_zeros(rest)
            count += 1
            rest &= rest - U(1)
    return count


@_jit
def _paragraphs(codes, raw, first_bytes, low, high, breaks, count, table, stamp):
    """(paragraphs of the stripped text from low to high, those seen before, their characters)."""
    parts, again, characters, first, j = 0, 0, 0, low, 0
    last = _last(count // 2 + 1)
    while j <= count:
        end, run = high, 0
        if j < count and low <= breaks[j] < high:
            end = breaks[j]
            while j + run < count and breaks[j + run] == end + run and codes[end + run] == _FEED:
                run += 1
        elif j < count:
            j += 1
            continue
        if end == high or run >= 2:
            if parts == 0 and end == high:
                return 1, 0, 0  # the only one
            parts += 1
            key = word_hash(raw, first_bytes[first], first_bytes[end])
            if _seen(table, last, stamp, key)[1]:
                again += 1
                characters += end - first
            first = end + run
        j += max(run, 1)
    return parts, again, characters


@_jit
def _paragraph_figures(
    codes, flags, raw, first_bytes, size, spaces, breaks, count, table, stamp, out
):
    """The statistics of paragraphs: out[8:10]."""
    low, high = min(next_clear(spaces, 0), size), size
    while high > low and flags[high - 1] & SPACE:  # strip
        high -= 1
    parts, again, characters = _paragraphs(
        codes, raw, first_bytes, low, high, breaks, count, table, stamp
    )
    # gopher_dup_paragraphs, gopher_dup_paragraph_chars
    out[8], out[9] = _share(again, parts) if size else _NAN, _share(characters, size)


@_jit
def _fed_lines(codes, flags, raw, first_bytes, size, spaces, breaks, count, table, stamp, n, out):
    """The statistics of lines between line feeds: out[10:12] and out[25:29]."""
    parts, again, characters, feeds, start = 0, 0, 0, 0, 0
    lines, ends, short, repeated = 0, 0, 0, 0
    last = _last(count + 1)
    for j in range(count + 1):
        end = breaks[j] if j < count else size
        if j < count and codes[end] != _FEED:
            continue
        feeds += j < count
        if end > start:
            key = word_hash(raw, first_bytes[start], first_bytes[end])
            there = _seen(table, last, stamp, key)[1]
            parts += 1
            if there:
                again += 1
                characters += end - start
            if next_clear(spaces, start) < end:
                lines += 1
                ends += flags[end - 1] & TERMINAL != 0
                short += end - start <= _SHORT
                repeated += end - start if there else 0
        start = end + 1
    if size and codes[0] == _FEED:  # before the first line feeds and after the last: empty parts
        parts += 1
        again += codes[size - 1] == _FEED
    if size and codes[size - 1] == _FEED:
        parts += 1
    # gopher_dup_lines, gopher_dup_line_chars
    out[10], out[11] = _share(again, parts), _share(characters, size)
    # fineweb_punctuated_lines, fineweb_short_lines
    out[25], out[26] = _share(ends, lines), _share(short, lines)
    # fineweb_dup_chars, fineweb_newline_ratio
    out[27], out[28] = _share(repeated, size - feeds), _share(feeds, n)


@_jit
def _repetition(hashes, lengths, n, size, grams, where, slots, once, twice, table, stamp, out):
    """The statistics of n-grams: out[12:21]; return the last stamp used."""
    count = _pairs_twice(hashes, n, grams, where, once, twice)
    for k in range(2, 11):
        stamp += U(1)
        if k > 2:  # a repeated k-gram holds two repeated (k-1)-grams (from k = 6 on: 4-grams)
            count = _adjacent(where, count)
            for j in range(count):
                i = where[j]
                grams[i] = grams[i] * _M + hashes[i + k - 1]  # hash of the k-gram from word i
        if k <= 4:
            characters, count = _top(grams, where, count, slots, lengths, n, k, table, stamp)
            out[10 + k] = _share(characters, size)
            continue
        repeated = _repeated(grams, where, count, lengths, k, table, stamp)
        for later in range(k, 11):
            out[10 + later] = _share(repeated, size)
        if repeated == 0:
            break
    return stamp


@_jit
def _pairs_twice(hashes, n, grams, where, once, twice):
    """Fill grams with the hashes of pairs of words, `where` with the places of those whose bit of
    the bitmaps is set twice; return how many."""
    last = min(64 * once.shape[0], 8 * (_last(n) + 1)) - 1
    once[: last // 64 + 1], twice[: last // 64 + 1] = U(0), U(0)
    for i in range(n - 1):
        grams[i] = hashes[i] * _M + hashes[i + 1]
        place = np.int64(grams[i] & U(last))
        bit = U(1) << U(place & 63)
        twice[place >> 6] |= once[place >> 6] & bit
        once[place >> 6] |= bit
    count = 0
    for i in range(n - 1):
        place = np.int64(grams[i] & U(last))
        where[count] = i
        count += np.int64(twice[place >> 6] >> U(place & 63)) & 1
    return count


@_jit
def _adjacent(where, count):
    """Keep those of the ascending places that the next place follows; return how many."""
    kept = 0
    for j in range(count - 1):
        i = where[j]
        where[kept] = i
        kept += where[j + 1] == i + 1
    return kept


@_jit
def _top(grams, where, count, slots, lengths, n, k, table, stamp):
    """(times × length of the most frequent k-gram, the earliest of them; the number of repeated
    k-grams, whose places remain in `where`). Only k-grams of `where` can be repeated."""
    if n < k:
        return 0, 0
    best, earliest, last = 1, 0, _last(count)
    for j in range(count):
        i = where[j]
        slot, there = _seen(table, last, stamp, grams[i])
        if not there:
            table[slot, 2], table[slot, 3] = 0, i
        slots[j] = slot
        table[slot, 2] += U(1)
        times, first = np.int64(table[slot, 2]), np.int64(table[slot, 3])
        if times > best or (times == best and first < earliest):
            best, earliest = times, first
    kept = 0
    for j in range(count):
        where[kept] = where[j]
        kept += table[slots[j], 2] > 1
    length = k - 1  # the spaces between the words
    for i in range(earliest, earliest + k):
        length += lengths[i]
    return best * length, kept


@_jit
def _repeated(grams, where, count, lengths, k, table, stamp):
    """Characters in k-grams that came before; such a k-gram is skipped as a whole."""
    characters, behind, last = 0, 0, _last(count)
    for j in range(count):
        i = where[j]
        if i >= behind and _seen(table, last, stamp, grams[i])[1]:
            behind = i + k
            for w in range(i, behind):
                characters += lengths[w]
    return characters


@_jit
def _words(codes, flags, raw, first_bytes, starts, ends, n, hashes, lengths, stops, out):
    """Hash and measure the words; fill out[0:2] and out[6:8]."""
    plain, spelled, letters, alphabetic, stop_bits, filtered = 0, 0, 0, 0, U(0), U(0)
    for s in range(stops.shape[0]):
        filtered |= U(1) << (stops[s] & U(63))
    for w in range(n):
        start, end = starts[w], ends[w]
        hashes[w] = word_hash(raw, first_bytes[start], first_bytes[end])
        lengths[w] = end - start
        symbols, alpha = flags[start] & SYMBOL != 0, flags[start] & ALPHA != 0
        if not alpha:
            for i in range(start + 1, end):
                symbols &= flags[i] & SYMBOL != 0
                alpha |= flags[i] & ALPHA != 0
        alphabetic += alpha
        if not symbols:
            plain += 1
            if not flags[start] & SOLO:
                spelled += 1
                letters += end - start
        if (filtered >> (hashes[w] & U(63))) & U(1):
            for s in range(stops.shape[0]):
                if stops[s] == hashes[w]:
                    stop_bits |= U(1) << U(s)  # bit s: stop word s occurs
    there = set_bits(stop_bits)
    out[0], out[1] = plain, _share(letters, spelled)  # word_count, mean_word_length
    # gopher_alpha_words, gopher_stop_words
    out[6], out[7] = _share(alphabetic, n), there if stops.shape[0] else _NAN


@_jit
def _marks(raw, length, suspects, brackets, curlies):
    """Fill the bits of the bytes where a phrase may be, of [ and of {; return the number of #, of …
    and of ://, and whether two dots follow each other."""
    marks, dots, links, double = 0, 0, 0, U(0)
    for block in range(length // 64 + 1):
        i = 64 * block
        suspects[block] = U(0)
        for a, b, c in _PARTS:
            suspects[block] |= (
                equal_bytes(raw, i, a, 0x20)
                & equal_bytes(raw, i + 1, b, 0x20)
                & equal_bytes(raw, i + 2, c, 0x20)
            )
        brackets[block] = equal_bytes(raw, i, 0x5B, 0)
        curlies[block] = equal_bytes(raw, i, 0x7B, 0)
        marks += set_bits(equal_bytes(raw, i, 0x23, 0))
        slashes = equal_bytes(raw, i + 1, 0x2F, 0) & equal_bytes(raw, i + 2, 0x2F, 0)
        links += set_bits(equal_bytes(raw, i, 0x3A, 0) & slashes)
        tail = equal_bytes(raw, i + 1, 0x80, 0) & equal_bytes(raw, i + 2, 0xA6, 0)
        dots += set_bits(equal_bytes(raw, i, 0xE2, 0) & tail)
        double |= equal_bytes(raw, i, _DOT, 0) & equal_bytes(raw, i + 1, _DOT, 0)
    return marks, dots, links, double != U(0)


@_jit
def _characters(codes, raw, length, flags, size, spaces, suspects, brackets, curlies, n, out):
    """The statistics of characters: out[2:4] and out[29:32]; see `_marks`."""
    marks, dots, links, double = _marks(raw, length, suspects, brackets, curlies)
    i = 0 if double else size
    while i < size:
        if codes[i] == _DOT and codes[i + 1] == _DOT and codes[i + 2] == _DOT:
            dots += 1
            i += 2
        i += 1
    blank, capitals, alphabetic, code, blocks = 0, 0, 0, 0, size // 64 + 1
    for block in range(blocks):
        blank += set_bits(spaces[block])
        capitals += set_bits(flagged(flags, 64 * block, _LOWERED))
        alphabetic += set_bits(flagged(flags, 64 * block, ALPHA))
        code += set_bits(flagged(flags, 64 * block, CODE))
    out[2], out[3] = _share(marks, n), _share(dots, n)  # gopher_hash_ratio, gopher_ellipsis_ratio
    # upper_ratio, links, code_marks
    out[29], out[30] = _share(capitals, alphabetic), _share(links, n)
    out[31] = _share(code, 64 * blocks - blank)


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
def _lines(
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
    out[4], out[5] = _share(bullets, lines), _share(dots, lines)
    # c4_kept_lines, c4_sentences, c4_lorem_ipsum, c4_curly_bracket
    out[21], out[22], out[23], out[24] = _share(kept, lines), sentences, lorem, bracket


@njit(nogil=True, cache=True)
def _measure(
    data, offsets, flag_table, lower, slots, points, pairs, units, stops, bounds, which, out
):
    most = 0
    for d in range(offsets.shape[0] - 1):
        most = max(most, offsets[d + 1] - offsets[d])
    raw, blocks = np.zeros(most + 192, np.uint8), most // 64 + 4
    suspects, brackets = np.empty(blocks, np.uint64), np.empty(blocks, np.uint64)
    curlies = np.empty(blocks, np.uint64)
    codes, flags = np.empty(2 * most + 256, np.int32), np.empty(2 * most + 256, np.uint16)
    letters, spaces = np.empty(2 * blocks, np.uint64), np.empty(2 * blocks, np.uint64)
    first_bytes, breaks = np.empty(most + 8, np.int32), np.empty(most + 1, np.int32)
    starts, ends = np.empty(most + 1, np.int32), np.empty(most + 1, np.int32)
    firsts, lasts = np.empty(most + 1, np.int32), np.empty(most + 1, np.int32)
    grams, where = np.empty(most + 1, np.uint64), np.empty(most + 1, np.int32)
    places = np.empty(most + 1, np.int32)
    hashes, lengths = np.empty(most + 1, np.uint64), np.empty(most + 1, np.int32)
    once = np.empty((_last(most) + 1) // 8, np.uint64)
    twice = np.empty((_last(most) + 1) // 8, np.uint64)
    stamp = U(0)
    table = np.zeros(
        (_last(most + 1) + 1, 4), np.uint64
    )  # key, stamp of its set, count, first index
    for d in range(offsets.shape[0] - 1):
        length = offsets[d + 1] - offsets[d]
        raw[:length] = data[offsets[d] : offsets[d + 1]]
        raw[length : length + 128] = 0
        size = decode(raw, 0, length, flag_table, codes, flags, first_bytes)
        mark_words(codes, flags, 0, size, letters, spaces)
        n = split(
            codes, flags, letters, spaces, 0, size, slots, points, pairs, units, starts, ends, 0
        )
        words = stops[bounds[which[d]] : bounds[which[d] + 1]] if which[d] >= 0 else stops[:0]
        _words(codes, flags, raw, first_bytes, starts, ends, n, hashes, lengths, words, out[d])
        count = _breaks(codes, flags, size, breaks)
        stamp += U(1)
        _paragraph_figures(
            codes, flags, raw, first_bytes, size, spaces, breaks, count, table, stamp, out[d]
        )
        stamp += U(1)
        _fed_lines(
            codes, flags, raw, first_bytes, size, spaces, breaks, count, table, stamp, n, out[d]
        )
        stamp = _repetition(
            hashes, lengths, n, size, grams, where, places, once, twice, table, stamp, out[d]
        )
        _characters(codes, raw, length, flags, size, spaces, suspects, brackets, curlies, n, out[d])
        _lines(
            codes, flags, lower, first_bytes, size, letters, spaces, suspects, brackets, curlies,
            breaks, count, starts, ends, n, slots, points, pairs, units, firsts, lasts, out[d],
        )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _flags() -> np.ndarray:
    """The table of flags with _LOWERED."""
    lower = lower_table()
    return flag_table() | np.where(lower != np.arange(len(lower)), _LOWERED, 0).astype(np.uint16)


def measure(
    data: np.ndarray, offsets: np.ndarray, stop_hashes: np.ndarray, stop_bounds: np.ndarray,
    which: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """float64[n, figures]; see sabia.kernels.quality.interface.measure."""
    out = np.empty((len(offsets) - 1, len(FIGURES)))
    tabled = _flags(), lower_table()
    _measure(data, offsets, *tabled, *tables(), stop_hashes, stop_bounds, which, out)
    return out
