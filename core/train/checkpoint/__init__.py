"""Checkpoints that any backend and any mesh can read, and that a kill at any moment cannot spoil.

A checkpoint is a directory of safetensors files, a manifest and a commit mark (`layout` has the
format), under backend-neutral names: `param/NAME`, the optimizer's `m/NAME` and the like, `count`.

    with Saver(directory, "s3://bucket/run", world=world, barrier=barrier) as saver:
        saver.poll()                              # each step: raise what failed in the background
        saver.save(step, stepper.pieces(), meta)  # when Interval.due says so
    found = latest(directory, "s3://bucket/run")  # newest good one, here or there, or None
    Reader(found).read("param/embed", offset=(0, 512), shape=(32000, 256))

`pieces_torch` and `pieces_jax` cut a backend's arrays into pieces.
"""

from sabia.core.train.checkpoint.find_latest import latest
from sabia.core.train.checkpoint.interval import Interval, parse_interval
from sabia.core.train.checkpoint.local import Checkpoint, sweep
from sabia.core.train.checkpoint.pieces import Piece, whole_pieces
from sabia.core.train.checkpoint.reader import Reader
from sabia.core.train.checkpoint.remote import discard_all
from sabia.core.train.checkpoint.saver import Saver

__all__ = [
    "Checkpoint",
    "Interval",
    "Piece",
    "Reader",
    "Saver",
    "discard_all",
    "latest",
    "parse_interval",
    "sweep",
    "whole_pieces",
]
