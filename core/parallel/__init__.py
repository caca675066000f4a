"""How a run spreads over devices: mesh axes, and joining the processes launchers start."""
