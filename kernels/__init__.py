"""Fast paths, each behind one dispatch with a plain reference that it must agree with."""
