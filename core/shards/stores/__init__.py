"""Files and folders at URLs: objects of stores (s3://, gs://, …) and other fsspec file systems.

`objects` reads, writes and lists them, `listed` is a directory of shards with its manifest, and
`mirrors` gives a local path to what needs one.
"""
