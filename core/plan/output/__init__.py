"""Output of the planner: tables, JSON, rows, notes and warnings, plots, launch scripts."""
