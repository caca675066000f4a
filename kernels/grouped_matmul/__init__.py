"""Products of groups of rows with one matrix for each group."""
