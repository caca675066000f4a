"""Families that can be counted but not trained here: one reader of the configuration each."""
