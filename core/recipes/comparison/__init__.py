"""Comparison of corpora by small training runs with several seeds."""
