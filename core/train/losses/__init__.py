"""Losses as sums: next token, preferences, sequence classification, GRPO."""
