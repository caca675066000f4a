"""Products of one row at a time on a CPU: a matrix by a vector, and attention of one query."""
