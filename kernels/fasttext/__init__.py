"""Scores of fastText classifiers."""
