"""Children with limits: parsers of untrusted data (`limits`) and untrusted code (`isolated`)."""
