"""A layer of a decoder for one token of each row on a CPU, in few calls."""
