"""What travels between commands: record schemas, Parquet in and out, and the executor."""
