"""Statistics of documents for the Gopher, C4 and FineWeb filters."""
