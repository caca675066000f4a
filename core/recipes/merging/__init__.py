"""Merging models: weighted means, arcs and elected signs, tensor by tensor."""
