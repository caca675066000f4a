"""Attention over packed documents."""
