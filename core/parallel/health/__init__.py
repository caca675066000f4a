"""Health of the ranks: registration at the start, heartbeats, detection of dead and hung ranks."""
