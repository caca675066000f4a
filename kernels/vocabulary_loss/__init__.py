"""Cross-entropy of a projection onto the vocabulary."""
