"""Families that are counted and do not train here: one reader of configuration fields each."""
