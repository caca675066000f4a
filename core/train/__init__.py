"""Training: losses, optimizer, schedule, a step on each backend, checkpoints, telemetry, loop.

`stepper_factory.make_stepper` gives one step behind one interface; `loop.train` drives it from
token rows in an order that is pure arithmetic, so that a run can be stopped anywhere and resumed
exactly.

One batch from Parquet to the loss, file by file: `token_rows` maps the rows and takes those of a
step from them; `loop` hands the batch to `stepper_torch`, which cuts micro-batches of its tokens;
`losses.next_token` calls `core.model.forward`, whose layers (`core.model.mixers`,
`core.model.feed_forward`) multiply through the chain of `core.parallel.build_ops`.
"""
