"""Speculative decoding: what proposes tokens that a model then checks together."""
