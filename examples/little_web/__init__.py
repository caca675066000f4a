"""A small made-up web to try sabia on: a generator, a loopback server and sums to learn.

Everything is a function of a seed, and every sentence is made by the grammars of this package.
`python -m sabia.examples.little_web --help` says how to serve the site and how to write its
ground truth, the chat records, prompts and held-out evaluation sets that belong to it.
"""

from sabia.examples.little_web.pages import Page
from sabia.examples.little_web.site import Site, build_site

__all__ = ["Page", "Site", "build_site"]
