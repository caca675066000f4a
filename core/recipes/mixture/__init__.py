"""Search for the mixture weights of data sources with small proxy runs."""
