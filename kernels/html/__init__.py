"""HTML to a table of text blocks."""
