"""Indices of the columns and of the state of the compiled scanner of sabia.kernels.html.

Only numbers, so that the files of the scanner can share them: columns of the block, element (E_)
and mark (M_) tables; the state that is kept between tokens; a row of the stack of open elements
(S_); the values of a tag's attributes (A_); numbers of single tags (T_); characters of markup.
"""

from sabia.kernels.html.definitions import (
    COLUMNS,
    ELEMENT_COLUMNS,
    FLAG_NAMES,
    MARK_COLUMNS,
    TAG_NAMES,
)

(
    START, END, BYTES, WORDS, LINK_BYTES, LINKS, COMMAS, SENTENCES, DIGITS, CAPITALS, STOP_WORDS,
    FURNITURE, BREAKS, ELEMENT, ROW, FLAGS, ANCESTORS, OWN, PARENT, DEPTH, SOURCE, SOURCE_END,
) = range(len(COLUMNS))  # fmt: skip
E_UP, E_TAG, E_OWN, E_BYTES, E_LINK_BYTES, E_PROSE, E_BLOCKS, E_SOURCE, E_SOURCE_END = range(
    len(ELEMENT_COLUMNS)
)
M_TAG, M_START, M_END, M_TEXT, M_TEXT_END, M_HREF, M_HREF_END, M_NOFOLLOW = range(len(MARK_COLUMNS))
OUT, BLOCKS, DEEP, ELEMENTS, MARKS, LINK, LINK_DEEP, INSIDE, GAP, OVERFLOW, HASH, SINCE = range(12)
STATE = 12
S_TAG, S_ELEMENT, S_FLAGS, S_ANCESTORS, S_OWN, S_PARENT, S_ROW = range(7)
STACK = 7
A_HINTS, A_UNSEEN, A_HREF, A_HREF_END, A_NOFOLLOW = range(5)
ATTRIBUTES = 5

T_A, T_BR, T_TITLE, T_META, T_BASE, T_HTML, T_BODY, T_TR = (
    TAG_NAMES.index(name) + 1 for name in ("a", "br", "title", "meta", "base", "html", "body", "tr")
)
T_TIME = len(TAG_NAMES) + 1  # a mark only
TIME_KEY = 0  # `time`, packed as sabia.kernels.html does
for _letter in "time":
    TIME_KEY = TIME_KEY << 6 | (ord(_letter) & 31)

UNSEEN_FLAG = 1 << FLAG_NAMES.index("unseen")
PRE_FLAG = 1 << FLAG_NAMES.index("pre")
PROSE_BYTES = 60  # at least, of a block that counts as prose
VALUE_BYTES = 400  # of a class or id that are read
LT, GT, SLASH, EQUALS, QUOTE, APOSTROPHE = 60, 62, 47, 61, 34, 39
