"""Statistics of the Gopher, C4 and FineWeb filters for batches of documents: definitions.

Words are those of text.words; characters are code points; a share is a part of 1. A statistic that
is undefined (no words, no lines) is NaN. n is the number of words, "" the text.
    word_count              words that are not SYMBOLs throughout
    mean_word_length        their mean length, scripts without spaces left out
    gopher_hash_ratio       "#" / all words
    gopher_ellipsis_ratio   ("..." not overlapping, and "…") / all words
    gopher_bullet_lines     share of lines that begin with • or - (after white space)
    gopher_ellipsis_lines   share of lines that end with ... or … (before white space)
    gopher_alpha_words      share of all words with a letter
    gopher_stop_words       different stop words among the words; NaN where no list is given
    gopher_dup_paragraphs, gopher_dup_paragraph_chars, gopher_dup_lines, gopher_dup_line_chars
                            share of paragraphs (between two line feeds or more, of the stripped
                            text) and of lines (between line feeds) seen before, and of the
                            characters of the text in them
    gopher_top_Kgram_share  K = 2, 3, 4: times × length (joined by single spaces) of the most
                            frequent K-gram, the earliest of them, over the characters of the text
    gopher_dup_Kgram_share  K = 5 … 10: characters (without spaces) of K-grams seen before, over the
                            characters of the text; after one, counting continues behind it
    c4_kept_lines           share of lines that the line rules of C4 keep (see c4.py)
    c4_sentences            sentences in them
    c4_lorem_ipsum, c4_curly_bracket  1 if such a line passed the rules before, else 0
    fineweb_punctuated_lines  share of nonblank lines that end with a TERMINAL
    fineweb_short_lines     share of nonblank lines of at most 30 characters
    fineweb_dup_chars       characters of nonblank lines seen before / characters but line feeds
    fineweb_newline_ratio   line feeds / all words
    upper_ratio             letters that have another lower case / letters
    links                   "://" / all words
    code_marks              {}[]<>;=|\\ / characters that are not white space
Lines of Gopher's quality rules and of C4 are those of str.splitlines.
Rae et al. 2021, table A1 and appendix A.1.1; Raffel et al. 2020, section 2.2; Penedo et al. 2024,
section 3.6. Both engines give the same figures; `python` is the reference, `numba` the fast one.
"""

import numpy as np

from sabia.kernels.quality.definitions import FIGURES
from sabia.kernels.runtime.dispatch import engine_module


def measure(
    data: np.ndarray,
    offsets: np.ndarray,
    stops: tuple[np.ndarray, np.ndarray],
    which: np.ndarray,
    engine: str = "numba",
) -> dict[str, np.ndarray]:
    """The FIGURES float64[n] of documents with the UTF-8 bytes data[offsets[i]:offsets[i+1]].

    stops: (hashes of stop words uint64[s] by list, where each list begins int64[lists + 1]); which
    int64[n] names each document's list, -1 none. The numba engine holds no GIL while it works.
    """
    table = engine_module("quality", engine).measure(data, offsets, *stops, which)
    return dict(zip(FIGURES, np.ascontiguousarray(table.T), strict=True))
