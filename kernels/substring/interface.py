"""Repeated windows of a corpus, exactly: which run of units occurred before, and where first.

Units are bytes or token ids; documents lie one behind the other in one array, and a window is
`span` units of one document. A window at i is a *repeat* if the first window of the corpus with
the same units, at f, ends before it begins: f + span <= i (a first occurrence is never its own
repeat, however periodic the text).

Finding repeats needs no hash of every window. Let k = max(span // 2, 1) and let h be a hash of k
units. File each window under the least h of the span - k + 1 k-grams in it. That value is a
function of the window's units alone, so *equal windows are filed under the same value*: comparing
windows within one file finds every repeat, for any h (a poor h makes large files, never a wrong
answer), and no pair of files need be compared. Consecutive windows mostly share their least k-gram,
so they are filed as records (value, start, count), about 4 / span a unit; a file of one record
holds no repeat unless the record is longer than span windows. `file_windows` makes the records of
some documents, `find_repeats` settles the files of some values: it numbers windows by a rolling
hash, and believes no hash, comparing units. Minimizers: Roberts et al. 2004; winnowing: Schleimer,
Wilkerson, Aiken 2003; their files: Li and Yan 2015. Repeats: Lee et al. 2021.

Both engines give the same records and repeats; `numpy` is the reference, `numba` the fast one.
h(i) = mix(sum of (u_(i+t) + 1) * B**(k-1-t)) modulo 2**64, `mix` the splitmix64 finaliser.
"""

import numpy as np

from sabia.kernels.runtime.dispatch import engine_module
from sabia.kernels.substring.definitions import Repeats


def file_windows(
    units: np.ndarray, offsets: np.ndarray, span: int, engine: str = "numpy"
) -> np.ndarray:
    """RECORD[r] of the documents units[offsets[i]:offsets[i + 1]], by rising start.

    units[…] uint8 or int32; positions count from offsets[0].
    """
    return engine_module("substring", engine).file_windows(units, offsets, span)


def find_repeats(
    units: np.ndarray,
    records: np.ndarray,
    starts: np.ndarray,
    span: int,
    passes: int = 1,
    engine: str = "numpy",
) -> Repeats:
    """Repeats among windows filed under the same value.

    units: of the whole corpus; records RECORD[r]: file g is records[starts[g]:starts[g + 1]], by
    rising start, and holds *all* records of its values. More passes settle a share of the windows
    at a time, in less memory; they give the same windows, in shorter runs.
    """
    return engine_module("substring", engine).find_repeats(units, records, starts, span, passes)
