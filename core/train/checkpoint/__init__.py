"""Checkpoints that any backend and any mesh can read, and that are crash-safe at any moment.

A checkpoint is a directory of safetensors files, a manifest and a commit mark (see `local`), with
backend-neutral names: `param/NAME`, the optimizer's `m/NAME` and the like, `count`.

    with Saver(directory, "s3://bucket/run", world=world, barrier=barrier) as saver:
        saver.poll()                              # each step: raise errors of the background
        saver.save(step, stepper.pieces(), meta)  # when Interval.due is True
    newest = latest(directory, "s3://bucket/run") # newest valid one, local or remote, or None
    Reader(newest).read("param/embed", offset=(0, 512), shape=(32000, 256))

`pieces_jax` and core.train.stepper_torch_shards make lazy arrays of a backend's.
"""
