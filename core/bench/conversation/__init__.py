"""Conversations that a model holds: the user's later turns, and tools."""
