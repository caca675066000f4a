"""Texts that samples are bound to: regular expressions and JSON Schemas as automata over bytes."""
