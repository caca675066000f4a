"""From the bytes of a page to its text, title, language, date and links.

`decoding` finds the character encoding, `block_features` and `block_classifier` choose the main
text, `page_metadata` reads title, language, date and links, `extract` joins these and `sandbox`
runs it in a child process with limits. `link_scan` finds links without extracting text.
"""
