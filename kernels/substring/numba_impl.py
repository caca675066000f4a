"""The compiled engine of sabia.kernels.substring: rolling hashes; no window is copied.

Filing keeps the hashes of one window's k-grams in a ring and searches for the least again only when
it leaves the window. `find_repeats` keeps an open-addressed table of first occurrences for one file
at a time; a window after a repeated one is compared by its last unit alone. Without the GIL.
"""

import numpy as np

from sabia.kernels.runtime.numba_jit import njit, read_only
from sabia.kernels.substring.definitions import BASE, RECORD, Repeats, gram_length
from sabia.kernels.text.utf8_numba import mix

U = np.uint64
_B = U(BASE)
_NONE = np.int64(-1)
_SMALL, _FIRST_CAPACITY = 64, 1 << 10
_jit = njit(nogil=True, boundscheck=False)
_inline = njit(nogil=True, inline="always")


@_jit
def _file_windows(units, offsets, span, k, leave, value, start, count):
    """Fill value[…], start[…], count[…]; returns the number of records."""
    width = span - k + 1
    size = 1
    while size < width:
        size *= 2
    # hashes of the window's k-grams, by position mod size
    ring, mask, made = np.empty(size, np.uint64), size - 1, 0
    for d in range(offsets.shape[0] - 1):
        low, high = offsets[d], offsets[d + 1]
        if high - low < span:
            continue
        raw, least, least_at = U(0), U(0), -1
        opened = False
        for j in range(low, high):
            raw = raw * _B + (U(units[j]) + U(1))  # polynomial hash of the k-gram that ends at j
            gram = j - k + 1
            if gram < low:
                continue
            if gram > low:
                # leave = B**k: the unit that leaves the k-gram
                raw -= (U(units[gram - 1]) + U(1)) * leave
            h = mix(raw)
            ring[gram & mask] = h
            if least_at < 0 or h <= least:
                least, least_at = h, gram
            # the least k-gram has left the window: search the ring
            elif least_at <= gram - width:
                least, least_at = h, gram
                for other in range(gram - 1, gram - width, -1):
                    if ring[other & mask] < least:
                        least, least_at = ring[other & mask], other
            window = gram - width + 1
            if window < low:
                continue
            # the same k-gram files this window as well: lengthen the record
            if opened and value[made - 1] == least:
                count[made - 1] += 1
                continue
            value[made], start[made], count[made] = least, window - offsets[0], 1
            opened, made = True, made + 1
    return made


def file_windows(units: np.ndarray, offsets: np.ndarray, span: int) -> np.ndarray:
    """See sabia.kernels.substring.interface.file_windows."""
    k, most = gram_length(span), int(offsets[-1] - offsets[0])
    columns = np.empty(most, np.uint64), np.empty(most, np.int64), np.empty(most, np.int64)
    leave = U(pow(BASE, k, 1 << 64))
    made = _file_windows(read_only(units), offsets, span, k, leave, *columns)
    records = np.empty(made, RECORD)
    for name, column in zip(RECORD.names or (), columns, strict=True):
        records[name] = column[:made]
    return records


@_inline
def _equal(units, a, b, span):
    for step in range(span):  # noqa: SIM110 - compiled
        if units[a + step] != units[b + step]:
            return False
    return True


@_jit
def _wider(keys, places, used):
    """A table of twice the size with the same entries."""
    mask = U(2 * used - 1)
    new_keys, new_places = np.empty(2 * used, np.uint64), np.full(2 * used, _NONE)
    for old in range(used):
        if places[old] >= 0:
            slot = keys[old] & mask
            while new_places[slot] >= 0:
                slot = (slot + U(1)) & mask
            new_keys[slot], new_places[slot] = keys[old], places[old]
    return new_keys, new_places


@_jit
def _longer(array):
    longer = np.empty(2 * array.shape[0], array.dtype)
    longer[: array.shape[0]] = array
    return longer


@_jit
def _find_repeats(units, start, count, starts, span, leave, passes, share):
    capacity = _FIRST_CAPACITY
    keys, places = np.empty(capacity, np.uint64), np.empty(capacity, np.int64)
    at, length = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    first, made = np.empty(capacity, np.int64), 0
    for g in range(starts.shape[0] - 1):
        low, high = starts[g], starts[g + 1]
        if high - low < 2 and (high == low or count[low] <= span):
            continue
        used, held = _SMALL, 0
        places[:used] = _NONE
        for r in range(low, high):
            raw, before = U(0), np.int64(-2)
            for i in range(start[r], start[r] + count[r]):
                if i == start[r]:
                    for step in range(span):
                        # the first window of a record: all its units
                        raw = raw * _B + (U(units[i + step]) + U(1))
                else:
                    raw = raw * _B + (U(units[i + span - 1]) + U(1))
                    raw -= (U(units[i - 1]) + U(1)) * leave  # leave = B**span
                key = mix(raw)
                # another pass settles this window
                if passes > 1 and (key >> U(33)) % U(passes) != U(share):
                    before = np.int64(-2)
                    continue
                mask = U(used - 1)
                slot, earlier = key & mask, _NONE
                while places[slot] >= 0:
                    other = places[slot]
                    if keys[slot] == key:
                        # both follow equal windows: only the last units can differ
                        if other == before + 1:
                            same = units[other + span - 1] == units[i + span - 1]
                        else:
                            same = _equal(units, other, i, span)
                        if same:
                            earlier = other
                            break
                    slot = (slot + U(1)) & mask
                if earlier < 0:
                    keys[slot], places[slot] = key, i
                    held, before = held + 1, np.int64(-2)  # a first occurrence
                    if 2 * held > used:  # load at most 1/2
                        keys, places = _wider(keys, places, used)
                        used *= 2
                    continue
                before = earlier
                if earlier + span > i:  # overlaps its first occurrence: not a repeat
                    continue
                # continues the last run: lengthen it
                if made and at[made - 1] + length[made - 1] == i and (
                    first[made - 1] + length[made - 1] == earlier
                ):  # fmt: skip
                    length[made - 1] += 1
                    continue
                if made == at.shape[0]:
                    at, length, first = _longer(at), _longer(length), _longer(first)
                at[made], length[made], first[made] = i, 1, earlier
                made += 1
    return at[:made], length[:made], first[:made]


def find_repeats(
    units: np.ndarray, records: np.ndarray, starts: np.ndarray, span: int, passes: int
) -> Repeats:
    """See sabia.kernels.substring.interface.find_repeats."""
    start, count = (np.ascontiguousarray(records[name]) for name in ("start", "count"))
    leave = U(pow(BASE, span, 1 << 64))
    corpus, starts = read_only(units), np.ascontiguousarray(starts, np.int64)
    parts = []
    for share in range(passes):
        runs = _find_repeats(corpus, start, count, starts, span, leave, passes, share)
        parts.append([column.copy() for column in runs])  # without the rest of their buffers
    return Repeats(*(np.concatenate(column) for column in zip(*parts, strict=True)))
