"""Training: losses, optimizer, schedule, a step on each backend, checkpoints, telemetry, loop.

`stepper.make_stepper` gives one step behind one interface; `loop.train` drives it from token rows
in an order that is pure arithmetic, so that a run can be stopped anywhere and resumed exactly.
"""
