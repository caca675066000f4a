"""Checks of the form of an answer, without a model."""
