"""Children with limits: parsers of untrusted data (`limits`)."""
