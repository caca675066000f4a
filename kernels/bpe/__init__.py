"""Byte-level BPE encoding."""
