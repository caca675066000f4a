"""Stored pages: WARC files (ISO 28500) and the user's own folders.

`warc_writer` archives what a crawl fetched and `warc_reader` reads pages back. `archive_fetcher`
answers the requests of a crawl from WARC files; `stored_pages` turns files into documents
without crawling.
"""
