"""From the bytes of a page to its text, title, language, date and links.

`page_metadata` reads title, language, date and links, `extract` finds the character encoding and,
with `block_features`, the main text; `sandbox` runs it in a child process with limits. `link_scan`
finds links without extracting text.
"""
