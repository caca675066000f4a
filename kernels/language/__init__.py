"""Words with their byte ranges, n-gram look-ups and alignment."""
