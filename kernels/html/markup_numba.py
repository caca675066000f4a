"""The scanner's reading of markup: names, attributes, class hints, comments, raw text.

Every function takes a byte position and returns the position after what it read.
"""

import numpy as np

from sabia.kernels.html import layout
from sabia.kernels.html.definitions import WORD_SEED
from sabia.kernels.runtime.numba_jit import njit

U = np.uint64
_SEED = U(WORD_SEED)
_jit = njit(nogil=True, boundscheck=False)
_CLASS, _ID, _ROLE, _ITEMPROP = b"class", b"id", b"role", b"itemprop"
_HREF_NAME, _REL, _NOFOLLOW, _STYLE = b"href", b"rel", b"nofollow", b"style"
_HIDDEN, _ARIA, _TRUE, _NONE = b"hidden", b"aria-hidden", b"true", b"display:none"


@_jit
def is_markup(data, i, n):
    """Whether the `<` at i begins a tag or a comment."""
    if i + 1 >= n:
        return False
    c = data[i + 1]
    return 97 <= (c | 32) <= 122 or (c == layout.SLASH and i + 2 < n) or c == 33 or c == 63


@_jit
def find(data, i, n, wanted):
    """The first position from i on of the byte `wanted`, or n."""
    while i < n and data[i] != wanted:
        i += 1
    return i


@_jit
def after_comment(data, i, n):
    """The position after a comment or declaration whose `<!` or `<?` ends at i."""
    if not (i + 1 < n and data[i] == 45 and data[i + 1] == 45):
        return find(data, i, n, layout.GT) + 1
    # `<!-->` and `<!--->` are empty comments
    i += 2
    if i < n and data[i] == layout.GT:
        return i + 1
    if i + 1 < n and data[i] == 45 and data[i + 1] == layout.GT:
        return i + 2
    while i < n:
        i = find(data, i, n, 45)
        j = i
        while j < n and data[j] == 45:
            j += 1
        # `--!>` ends a comment too
        if j - i >= 2 and j < n and data[j] == 33:
            j += 1
        if j < n and data[j] == layout.GT and j - i >= 2:
            return j + 1
        i = max(j, i + 1)
    return n


@_jit
def raw_end(data, i, n, name):
    """Where `</name` begins after i, the name being that at `name`; the end if nowhere."""
    length = 0
    while name + length < n and 97 <= (data[name + length] | 32) <= 122:
        length += 1
    while i < n:
        i = find(data, i, n, layout.LT)
        if i + 2 + length <= n and data[i + 1] == layout.SLASH:
            k = 0
            while k < length and (data[i + 2 + k] | 32) == (data[name + k] | 32):
                k += 1
            # the byte after the name must end it
            after = data[i + 2 + length] if i + 2 + length < n else layout.GT
            if k == length and (after <= 32 or after in (layout.GT, layout.SLASH)):
                return i
        i += 1
    return n


@_jit
def read_name(data, i, n, tag_keys, tag_values):
    """(position after the name, tag number, packed name); names of more than ten letters have
    none."""
    key, start = U(0), i
    while i < n:
        c = data[i]
        if c in (layout.GT, layout.SLASH) or c <= 32:
            break
        code = 63  # no name that is known has it
        if 97 <= (c | 32) <= 122:
            code = c & 31  # letters 1 to 26, either case
        elif 48 <= c <= 57:
            code = c - 16  # digits 32 to 41
        key = key << U(6) | U(code)  # six bits a letter, as `_packed` in tables
        i += 1
    if i - start > 10 or key == 0:
        return i, 0, 0
    slot = ((key * _SEED) >> U(40)) % U(len(tag_keys))  # the slot that `_hashed` in tables gives
    while tag_keys[slot] != 0 and tag_keys[slot] != key:
        slot = (slot + U(1)) % U(len(tag_keys))
    return i, tag_values[slot], np.int64(key)


@_jit
def read_attributes(data, i, n, attributes, automaton, hints):
    """Read attributes up to `>`; returns the position after it."""
    while i < n:
        c = data[i]
        if c == layout.GT:
            return i + 1
        if c <= 32 or c == layout.SLASH:
            i += 1
            continue
        name = i
        i += 1
        while (
            i < n
            and data[i] > 32
            and data[i] != layout.SLASH
            and data[i] != layout.GT
            and data[i] != layout.EQUALS
        ):
            i += 1
        name_end = i
        while i < n and data[i] <= 32:
            i += 1
        start = end = i
        if i < n and data[i] == layout.EQUALS:
            i += 1
            while i < n and data[i] <= 32:
                i += 1
            if i < n and (data[i] == layout.QUOTE or data[i] == layout.APOSTROPHE):
                start = i + 1
                end = find(data, start, n, data[i])
                i = end + 1
            else:
                start = i
                while i < n and data[i] > 32 and data[i] != layout.GT:
                    i += 1
                end = i
        _attribute(data, name, name_end, start, end, attributes, automaton, hints)
    return n


@_jit
def _attribute(data, name, name_end, start, end, attributes, automaton, hints):
    length = name_end - name
    if length == 4:
        if attributes[layout.A_HREF_END] == 0 and _is(data, name, name_end, _HREF_NAME):
            attributes[layout.A_HREF], attributes[layout.A_HREF_END] = start, end
        elif _is(data, name, name_end, _ROLE):
            attributes[layout.A_HINTS] |= _hints(data, start, end, automaton, hints)
    elif length == 5:
        if _is(data, name, name_end, _CLASS):
            attributes[layout.A_HINTS] |= _hints(data, start, end, automaton, hints)
        elif _is(data, name, name_end, _STYLE) and _contains(data, start, end, _NONE):
            attributes[layout.A_UNSEEN] = 1
    elif (length == 2 and _is(data, name, name_end, _ID)) or (
        length == 8 and _is(data, name, name_end, _ITEMPROP)
    ):
        attributes[layout.A_HINTS] |= _hints(data, start, end, automaton, hints)
    elif length == 3 and _is(data, name, name_end, _REL):
        attributes[layout.A_NOFOLLOW] = _contains(data, start, end, _NOFOLLOW)
    elif (length == 6 and _is(data, name, name_end, _HIDDEN)) or (
        length == 11 and _is(data, name, name_end, _ARIA) and _is(data, start, end, _TRUE)
    ):
        attributes[layout.A_UNSEEN] = 1


@_jit
def _is(data, start, end, word):
    """Whether data[start:end] spells a word of small letters, in any case."""
    if end - start != len(word):
        return False
    for k in range(len(word)):
        c = data[start + k]
        if (c | 32 if 65 <= c <= 90 else c) != word[k]:
            return False
    return True


@_jit
def _contains(data, start, end, word):
    """Whether the value has the word, blanks left out, in any case; 400 bytes are looked at."""
    matched = 0
    for k in range(start, min(end, start + layout.VALUE_BYTES)):
        c = data[k]
        if c <= 32:
            continue
        letter = c | 32 if 65 <= c <= 90 else c  # lower case
        if letter == word[matched]:
            matched += 1
            if matched == len(word):
                return True
        else:
            matched = 1 if letter == word[0] else 0
    return False


@_jit
def _hints(data, start, end, automaton, hints):
    """The bits of all hints in a value."""
    state, bits, small = automaton[0, 0], np.int64(0), False
    for k in range(start, min(end, start + layout.VALUE_BYTES)):
        c = data[k]
        code = 0
        if 97 <= c <= 122:
            code = c - 96
        elif 65 <= c <= 90:
            code = c - 64
            # a capital after a small letter is a boundary: code 0
            if small:
                state = automaton[state, 0]
                bits |= hints[state]
        small = 97 <= c <= 122
        state = automaton[state, code]
        bits |= hints[state]
    return bits | hints[automaton[state, 0]]
