"""Losses as sums: next token, sequence classification, GRPO."""
