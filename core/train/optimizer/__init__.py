"""Optimizers, the same for both backends: settings, μP, schedules, and the update rules."""
