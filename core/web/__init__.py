"""From the web, or from what was kept of it, to documents.

`urls`, `addresses` and `robots` say what may be fetched, `hosts` when, `fetch` fetches it,
`frontier` remembers, `focus` judges, `extract` and `sandbox` turn pages into text, `crawler` joins
them; `replay` does the same to WARC files and to a user's own folders. Sources: RFC 9309
(robots.txt), the WHATWG URL standard, ISO 28500 (WARC).
"""
