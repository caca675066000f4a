"""Memory of a device term by term, step time, and the search over parallel layouts."""
