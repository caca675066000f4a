"""The machine at hand: peaks of a run, and what `plan-cluster --measure` measures."""
