"""Repeated substrings of a corpus."""
