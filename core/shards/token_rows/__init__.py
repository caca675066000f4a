"""Token rows of shards: read in place, or unpacked once on a host."""
