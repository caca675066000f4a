"""Failures, preemptions and checkpoints: closed form and simulation."""
