"""Names of columns, flags and tags, limits and types of the HTML scanner."""

from typing import NamedTuple

import numpy as np

from sabia.kernels.html import lexicon

DEPTH = 400
MAX_BLOCKS = 1 << 16
MAX_ELEMENTS = 1 << 17
MAX_MARKS = 1 << 15
FLAG_NAMES = (*dict.fromkeys(name for name in lexicon.FLAGS.values() if name), "unseen")
HINT_NAMES = tuple(lexicon.HINTS)
TAG_NAMES = tuple(
    f"{lexicon.BLOCK} {lexicon.CELLS} {lexicon.INLINE} {lexicon.UNSEEN} {lexicon.RAW}"
    f" {lexicon.VOID} a".split()
)  # tag numbers start at 1; 0 is any other tag
COLUMNS = (
    "start", "end", "bytes", "words", "link_bytes", "links", "commas", "sentences", "digits",
    "capitals", "stop_words", "furniture", "breaks", "element", "row", "flags", "ancestors", "own",
    "parent", "depth", "source", "source_end",
)  # fmt: skip
ELEMENT_COLUMNS = (
    "up", "tag", "own", "bytes", "link_bytes", "prose", "blocks", "source", "source_end",
)  # fmt: skip
MARK_COLUMNS = ("tag", "start", "end", "text", "text_end", "href", "href_end", "nofollow")
BLOCK_KIND, VOID_KIND, RAW_KIND, UNSEEN_KIND = 1, 2, 4, 8
SPACE, LOWER, UPPER, DIGIT, COMMA, STOP, REFERENCE, OTHER, HIGH = range(9)
MASK64 = (1 << 64) - 1
WORD_SEED, WORD_PRIME = 0xCBF29CE484222325, 0x100000001B3  # FNV-1a, 64 bits
STOP_WORD, FURNITURE_WORD = 1, 2


class Page(NamedTuple):
    """Tables int32 with the named columns; `text` uint8 holds the blocks' bytes."""

    text: np.ndarray
    blocks: np.ndarray
    elements: np.ndarray
    marks: np.ndarray


class Tables(NamedTuple):
    """What the scanner looks things up in; all arrays."""

    kinds: np.ndarray  # byte -> SPACE … HIGH
    tag_keys: np.ndarray  # open addressing: packed name -> number
    tag_values: np.ndarray
    tag_kinds: np.ndarray  # number -> bits
    tag_flags: np.ndarray  # number -> flag bit
    closes: np.ndarray  # number -> bits of the open tags that it ends …
    stops: np.ndarray  # … unless one of these is met first
    walls: np.ndarray  # number -> bits of the open tags that its end tag does not cross
    automaton: np.ndarray  # class hints: state, letter -> state
    hints: np.ndarray  # state -> bits
    word_keys: np.ndarray  # open addressing: hash -> STOP_WORD, FURNITURE_WORD
    word_values: np.ndarray
