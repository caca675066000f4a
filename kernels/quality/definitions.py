"""Names of the statistics and constants of the rules; `interface` defines the statistics."""

TOP = (2, 3, 4)
DUPLICATED = (5, 6, 7, 8, 9, 10)
SHORT_LINE = 30
FIGURES = (
    "word_count", "mean_word_length", "gopher_hash_ratio", "gopher_ellipsis_ratio",
    "gopher_bullet_lines", "gopher_ellipsis_lines", "gopher_alpha_words", "gopher_stop_words",
    "gopher_dup_paragraphs", "gopher_dup_paragraph_chars", "gopher_dup_lines",
    "gopher_dup_line_chars", *(f"gopher_top_{k}gram_share" for k in TOP),
    *(f"gopher_dup_{k}gram_share" for k in DUPLICATED), "c4_kept_lines", "c4_sentences",
    "c4_lorem_ipsum", "c4_curly_bracket", "fineweb_punctuated_lines", "fineweb_short_lines",
    "fineweb_dup_chars", "fineweb_newline_ratio", "upper_ratio", "links", "code_marks",
)  # fmt: skip
MIN_LINE_WORDS = 3
MAX_LINE_WORD = 1000
LINE_ENDS = ".?!\"'"
POLICY = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies",
    "use cookies",
)  # fmt: skip
LOREM, SCRIPT = "lorem ipsum", "javascript"
PHRASES = (LOREM, SCRIPT, *POLICY)
