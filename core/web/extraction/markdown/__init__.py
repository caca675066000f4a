"""The main text of a page as Markdown.

`render` walks the chosen blocks and the tree of elements that the HTML scanner found, and reads the
source of each again: `inline` text and formulas, `code_block` of `pre`. `markup` finds tags and
attributes. Kept are headings, lists, block quotes, tables (pipe tables of GitHub), code, formulas
(`$…$`, `$$…$$`), superscripts and subscripts. Left out, because they are not text that a model
should learn: targets of links, images, bold and italic type.

Text is escaped only where CommonMark would read it as something else; formulas that stand in the
text between dollar signs or as `\\(…\\)` and `\\[…\\]`, and other backslashes, are as on the page.
Every step is linear in the size of the page or bounded by a constant.
"""
