"""C4's rules for lines, as an edit: a text with only the lines that they keep.

A line (of str.splitlines, without white space at its ends, without citations such as `[12]`,
`[edit]`, `[citation needed]`) stays if it has no word of more than 1,000 characters, ends in one of
. ? ! " ' but not in three dots, has three words or more, and holds no `javascript`, no `{`, no
`lorem ipsum` and no phrase about policies and cookies (kernels.quality.POLICY). The filter `c4` of
heuristics counts by the same rules, and refuses texts in which a line that passes the rules before
has `{` or `lorem ipsum`. Raffel et al. 2020, section 2.2.
"""

from sabia.kernels.quality.reference import c4_verdict


def kept_lines(text: str) -> str:
    """The lines of a text that the rules keep, with line feeds between them."""
    judged = (c4_verdict(line) for line in text.splitlines())
    return "\n".join(line for name, line in judged if name == "keep")
