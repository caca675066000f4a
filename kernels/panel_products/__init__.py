"""Products of rows with a matrix in panels; see interface.py."""
