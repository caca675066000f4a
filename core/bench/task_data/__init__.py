"""The files of benchmark data, and their rows with few-shot examples."""
