"""Constants and tables of the language scores; `interface` defines them."""

import numpy as np

from sabia.kernels.text.character_flags import ALPHA, HAN, SOLO, flag_table

MOST = 1000
STEP = 10.0
FIRST_GRAM = 3  # code points of the shorter n-grams; the longer ones have one more
LONGEST = 24  # letters of a word; the rest counts for nothing
WHOLE, POWER = np.uint64(0x5851F42D4C957F2D), np.uint64(0x9E3779B97F4A7C15)
SCRIPT, ALONE = 0x7F, 0x80  # of the kind of a letter: 1 + its script; of a script without spaces


class Table:
    """A table prepared for look-ups: keys uint32[f] ascending, values int8[f, languages], which
    languages list the word as frequent (bits) uint64[f], script of each code point uint8[codes]."""

    def __init__(
        self, keys: np.ndarray, values: np.ndarray, known: np.ndarray, scripts: np.ndarray
    ) -> None:
        self.keys, self.values, self.known, self.scripts = keys, values, known, scripts
        self.languages = values.shape[1]
        flags = np.append(flag_table()[: len(scripts)], HAN)  # the last: Han beyond the table
        kinds = 1 + np.append(scripts, scripts.max()) + np.where(flags & SOLO, ALONE, 0)
        self.kinds = np.where(flags & ALPHA, kinds, 0).astype(np.uint8)
