"""The compiled scanner of sabia.kernels.html: one loop over the bytes, a stack of open elements.

`state` holds what is kept between tokens, `stack` one row per open element (html.layout).
Text counts go straight into the row of the current block; a block-level tag closes it if it holds
any text. Compiled code is cached on disk and runs without the GIL.
"""

import numpy as np

from sabia.kernels.html import layout
from sabia.kernels.html.definitions import (
    BLOCK_KIND,
    COLUMNS,
    DEPTH,
    ELEMENT_COLUMNS,
    MARK_COLUMNS,
    MAX_BLOCKS,
    MAX_ELEMENTS,
    MAX_MARKS,
    RAW_KIND,
    UNSEEN_KIND,
    VOID_KIND,
    Tables,
)
from sabia.kernels.html.markup_numba import (
    after_comment,
    find,
    is_markup,
    raw_end,
    read_attributes,
    read_name,
)  # fmt: skip
from sabia.kernels.html.text_numba import read_text
from sabia.kernels.runtime.numba_jit import njit

_jit = njit(nogil=True, boundscheck=False)


def scan(data: np.ndarray, tables: Tables) -> tuple[np.ndarray, ...]:
    """(text, blocks, elements, marks) of sabia.kernels.html.interface.Page."""
    tags = int(np.count_nonzero(data == layout.LT)) + 2  # a bound of blocks, elements and marks
    text = np.empty(len(data) + 8, np.uint8)
    blocks = np.zeros((min(tags, MAX_BLOCKS), len(COLUMNS)), np.int32)
    elements = np.zeros((min(tags, MAX_ELEMENTS), len(ELEMENT_COLUMNS)), np.int32)
    marks = np.zeros((min(tags, MAX_MARKS), len(MARK_COLUMNS)), np.int32)
    state = _scan(data, text, blocks, elements, marks, *tables)
    sizes = state[[layout.OUT, layout.BLOCKS, layout.ELEMENTS, layout.MARKS]].tolist()
    made: list[np.ndarray] = [text, blocks, elements, marks]
    return tuple(table[:size] for table, size in zip(made, sizes, strict=True))


@_jit
def gathered(values, up):
    """Values with those of the elements below added; parents come before children."""
    sums = values.copy()
    for e in range(len(up) - 1, 0, -1):
        for column in range(values.shape[1]):
            sums[up[e], column] += sums[e, column]  # children first: the loop runs backwards
    return sums


@_jit
def _scan(data, text, blocks, elements, marks, kinds, tag_keys, tag_values, tag_kinds, tag_flags,
          closes, stops, walls, automaton, hints, word_keys, word_values):  # fmt: skip
    state = np.zeros(layout.STATE, np.int64)
    stack = np.zeros((DEPTH, layout.STACK), np.int64)  # [DEPTH, STACK]: row 0 is the root
    opened = np.zeros(len(tag_kinds) + 1, np.int64)  # [tags + 1]: open elements of each tag
    attributes = np.zeros(layout.ATTRIBUTES, np.int64)
    state[layout.LINK], state[layout.DEEP], state[layout.ELEMENTS] = -1, 1, 1
    n, i = len(data), 0
    while i < n:
        if data[i] != layout.LT or not is_markup(data, i, n):
            i = read_text(data, i, n, text, blocks, state, stack, kinds, word_keys, word_values)
            continue
        letter = data[i + 1]
        if letter == 33 or letter == 63:  # ! ?
            i = after_comment(data, i + 2, n)
            continue
        closing = letter == layout.SLASH  # an end tag
        # `</` without a letter is skipped up to `>`
        if closing and not (i + 2 < n and 97 <= (data[i + 2] | 32) <= 122):
            i = find(data, i + 2, n, layout.GT) + 1
            continue
        begun = i
        # tag: its number, 0 if unknown, -1 for formatting
        i, tag, key = read_name(data, i + 1 + closing, n, tag_keys, tag_values)
        attributes[:] = 0
        starts = i
        i = read_attributes(data, i, n, attributes, automaton, hints)
        if closing:
            _end(tag, begun, blocks, elements, marks, state, stack, opened, tag_kinds, walls, i)
            continue
        kind = tag_kinds[tag] if tag > 0 else 0
        if tag in (layout.T_META, layout.T_BASE, layout.T_HTML) or key == layout.TIME_KEY:
            _mark(marks, state, layout.T_TIME if key == layout.TIME_KEY else tag, starts, i, i)
        if tag == layout.T_A:
            _open_link(marks, blocks, state, attributes, starts, begun, i)
        elif kind & RAW_KIND:
            end = raw_end(data, i, n, begun + 1)
            if (
                tag == layout.T_TITLE
                and not stack[state[layout.DEEP] - 1, layout.S_FLAGS] & layout.UNSEEN_FLAG
            ):
                _mark(marks, state, tag, starts, i, i)
                if state[layout.MARKS] > 0 and marks[state[layout.MARKS] - 1, layout.M_TAG] == tag:
                    marks[state[layout.MARKS] - 1, layout.M_TEXT_END] = end
            i = end
        elif kind & VOID_KIND:
            _void(tag, kind, blocks, elements, state, stack, text, i)
        elif tag > 0:
            _open(tag, kind, tag_flags, closes, stops, blocks, elements, marks, state, stack,
                  opened, attributes, begun, i)  # fmt: skip
    _flush(blocks, elements, state, stack, n)
    _pop_to(1, elements, marks, state, stack, opened, n)
    _close_link(marks, state, n)
    elements[0, layout.E_SOURCE_END] = n
    for e in range(state[layout.ELEMENTS] - 1, 0, -1):
        up = elements[e, layout.E_UP]
        for column in range(layout.E_BYTES, layout.E_BLOCKS + 1):
            elements[up, column] += elements[e, column]
    return state


@_jit
def _mark(marks, state, tag, start, end, text):
    m = state[layout.MARKS]
    if m < len(marks):
        marks[m, layout.M_TAG], marks[m, layout.M_START], marks[m, layout.M_END] = tag, start, end
        marks[m, layout.M_TEXT] = marks[m, layout.M_TEXT_END] = text
        state[layout.MARKS] = m + 1


@_jit
def _open_link(marks, blocks, state, attributes, start, begun, end):
    _close_link(marks, state, begun)
    m = state[layout.MARKS]
    _mark(marks, state, layout.T_A, start, end, end)
    if m < len(marks):
        marks[m, layout.M_HREF] = attributes[layout.A_HREF]
        marks[m, layout.M_HREF_END] = attributes[layout.A_HREF_END]
        marks[m, layout.M_NOFOLLOW] = attributes[layout.A_NOFOLLOW]
    if attributes[layout.A_HREF_END] > 0:
        blocks[state[layout.BLOCKS], layout.LINKS] += 1
    state[layout.LINK], state[layout.LINK_DEEP] = min(m, len(marks)), state[layout.DEEP]


@_jit
def _close_link(marks, state, position):
    if 0 <= state[layout.LINK] < len(marks):
        marks[state[layout.LINK], layout.M_TEXT_END] = position
    state[layout.LINK] = -1


@_jit
def _void(tag, kind, blocks, elements, state, stack, text, end):
    row = state[layout.BLOCKS]
    if tag == layout.T_BR:
        state[layout.INSIDE] = 0
        if blocks[row, layout.BYTES] > 0 and text[state[layout.OUT] - 1] != 10:
            text[state[layout.OUT]] = 10
            state[layout.OUT] += 1
            blocks[row, layout.BREAKS] += 1
        state[layout.GAP] = 0
    elif kind & BLOCK_KIND:
        _flush(blocks, elements, state, stack, end)


@_jit
def _open(tag, kind, tag_flags, closes, stops, blocks, elements, marks, state, stack, opened,
          attributes, begun, end):  # fmt: skip
    """A start tag: end what it ends, and push it."""
    if kind & (BLOCK_KIND | UNSEEN_KIND):
        _flush(blocks, elements, state, stack, end)
        if closes[tag]:
            _close_implied(closes[tag], stops[tag], elements, marks, state, stack, opened, begun)
    deep = state[layout.DEEP]
    if deep >= DEPTH:
        state[layout.OVERFLOW] += 1
        return
    above = deep - 1
    stack[deep] = stack[above]  # a child inherits flags, hints and element
    stack[deep, layout.S_TAG] = tag
    opened[tag] += 1
    state[layout.DEEP] = deep + 1
    unseen = attributes[layout.A_UNSEEN] or kind & UNSEEN_KIND
    if tag in (layout.T_BODY, layout.T_HTML):
        return  # their classes describe the site, and scripts undo their hiding
    if unseen:
        stack[deep, layout.S_FLAGS] |= layout.UNSEEN_FLAG
    stack[deep, layout.S_FLAGS] |= tag_flags[tag]
    stack[deep, layout.S_ANCESTORS] |= attributes[layout.A_HINTS]
    if not kind & BLOCK_KIND:
        stack[deep, layout.S_OWN] |= attributes[layout.A_HINTS]
        return
    stack[deep, layout.S_PARENT] = stack[above, layout.S_OWN]
    stack[deep, layout.S_OWN] = attributes[layout.A_HINTS]
    e = state[layout.ELEMENTS]
    if e < len(elements):
        elements[e, layout.E_UP], elements[e, layout.E_TAG] = stack[above, layout.S_ELEMENT], tag
        elements[e, layout.E_OWN] = attributes[layout.A_HINTS]
        elements[e, layout.E_SOURCE] = begun
        stack[deep, layout.S_ELEMENT] = e
        state[layout.ELEMENTS] = e + 1
        if tag == layout.T_TR:
            stack[deep, layout.S_ROW] = e


@_jit
def _close_implied(ends, stops, elements, marks, state, stack, opened, begun):
    """Pop down to the outermost of the open elements in `ends` that nothing in `stops` shields."""
    k, outermost = state[layout.DEEP] - 1, -1
    while k >= 1:
        tag = stack[k, layout.S_TAG]
        if tag < 63 and (ends >> tag) & 1:
            outermost = k
        elif tag < 63 and (stops >> tag) & 1:
            break
        k -= 1
    if outermost >= 1:
        _pop_to(outermost, elements, marks, state, stack, opened, begun)


@_jit
def _pop_to(depth, elements, marks, state, stack, opened, position):
    for k in range(depth, state[layout.DEEP]):
        opened[stack[k, layout.S_TAG]] -= 1
        # of the element itself, or of the one around it, which ends later
        elements[stack[k, layout.S_ELEMENT], layout.E_SOURCE_END] = position
    state[layout.DEEP] = depth
    # the link was opened inside of what is popped
    if state[layout.LINK] >= 0 and state[layout.LINK_DEEP] > depth:
        _close_link(marks, state, position)


@_jit
def _end(tag, position, blocks, elements, marks, state, stack, opened, tag_kinds, walls,
         end):  # fmt: skip
    """An end tag: pop to the element it ends, if one is open that no wall shields."""
    if tag == layout.T_A:
        _close_link(marks, state, position)
    if tag <= 0 or opened[tag] == 0 or tag in (layout.T_BODY, layout.T_HTML):
        return
    if state[layout.OVERFLOW] > 0:
        # ends one of the elements beyond DEPTH, which are only counted
        state[layout.OVERFLOW] -= 1
        return
    k = state[layout.DEEP] - 1
    while stack[k, layout.S_TAG] != tag:
        above = stack[k, layout.S_TAG]
        if above < 63 and (walls[tag] >> above) & 1:  # a wall shields the element
            return
        k -= 1
    if tag_kinds[tag] & (BLOCK_KIND | UNSEEN_KIND):
        _flush(blocks, elements, state, stack, end)
    _pop_to(k, elements, marks, state, stack, opened, position)


@_jit
def _flush(blocks, elements, state, stack, end):
    """End the current block, if it holds text; the next one's source begins at `end`."""
    row = state[layout.BLOCKS]
    state[layout.SINCE] = end
    state[layout.INSIDE] = state[layout.GAP] = 0
    if blocks[row, layout.BYTES] == 0:
        blocks[row] = 0
        return
    top = stack[state[layout.DEEP] - 1]  # the innermost open element
    block = blocks[row]
    block[layout.END] = state[layout.OUT]
    block[layout.ELEMENT], block[layout.ROW] = top[layout.S_ELEMENT], top[layout.S_ROW]
    block[layout.FLAGS] = top[layout.S_FLAGS]
    block[layout.ANCESTORS], block[layout.OWN] = top[layout.S_ANCESTORS], top[layout.S_OWN]
    block[layout.PARENT], block[layout.DEPTH] = top[layout.S_PARENT], state[layout.DEEP]
    element = elements[top[layout.S_ELEMENT]]
    element[layout.E_BYTES] += block[layout.BYTES]
    element[layout.E_LINK_BYTES] += block[layout.LINK_BYTES]
    element[layout.E_BLOCKS] += 1
    marks_of_prose = block[layout.COMMAS] + block[layout.SENTENCES]
    if (
        block[layout.BYTES] >= layout.PROSE_BYTES
        and block[layout.LINK_BYTES] * 3 < block[layout.BYTES]
        and marks_of_prose
    ):
        element[layout.E_PROSE] += block[layout.BYTES]
    if row + 1 < len(blocks):
        state[layout.BLOCKS] = row + 1
