"""A layer of a decoder for one token of one row on a CPU, in one call."""
