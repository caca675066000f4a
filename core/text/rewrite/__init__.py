"""Rewrite documents so that the reasoning precedes the conclusion."""
