"""Training on preferences: pairs of answers as rows, the reference, reward models."""
