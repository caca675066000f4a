"""From the web, or from what was kept of it, to documents.

`addresses` and `robots` say what may be fetched, `hosts` when, `fetch` fetches it (`bodies` unpacks
it), `frontier` remembers, `archive` keeps it as WARC; `focus` judges pages, `extract` and `sandbox`
turn them into text, `links` finds links without text; `expand` says which links and `sitemaps` are
followed; `crawler` joins them and `run` is the command. `replay` does the same to WARC files
(`warc` reads them) and to a user's own folders. Sources: RFC 9309 (robots.txt), RFC 9110 (HTTP),
the WHATWG URL standard, sitemaps.org, ISO 28500 (WARC).
"""
