"""MinHash sketches of documents."""
