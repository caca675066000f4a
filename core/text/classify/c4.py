"""C4's rules for lines: remove the lines of a text that break them.

A line (of str.splitlines, without white space at its ends and without citations such as `[12]`,
`[edit]`, `[citation needed]`) is kept if it has no word of more than 1,000 characters, ends in one
of . ? ! " ' but not in three dots, has three words or more, and contains neither `javascript`, `{`,
`lorem ipsum` nor a phrase about policies and cookies (kernels.quality.POLICY). The filter `c4` of
heuristics uses the same rules, and rejects texts where a line that passes the other rules contains
`{` or `lorem ipsum`. Raffel et al. 2020, section 2.2.
"""

from sabia.kernels.quality.reference import c4_verdict


def kept_lines(text: str) -> str:
    """The lines that the rules keep, joined by line feeds."""
    verdicts = (c4_verdict(line) for line in text.splitlines())
    return "\n".join(line for verdict, line in verdicts if verdict == "keep")
