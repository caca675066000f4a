"""From the web, or from stored pages, to documents.

`addresses` and `robots` decide what may be fetched, `hosts` decides when, `fetch` sends the request
(`bodies` decompresses the response) and `frontier` stores the state. `focus` scores pages,
`expand` scores links and decides which of them and which `sitemaps` are followed; `crawler` joins
these parts and `run` is the command. `extraction` turns pages into text, `archives` writes
and reads WARC files, `crawl_inputs` sorts what the user gives. Sources: RFC 9309 (robots.txt),
RFC 9110 (HTTP), the WHATWG URL standard, sitemaps.org, ISO 28500 (WARC).
"""
