"""Parts of the report of an evaluation."""
