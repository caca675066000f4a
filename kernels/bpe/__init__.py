"""BPE encoding."""
