"""Tables of character properties, word splitting and UTF-8 decoding for the text kernels."""
