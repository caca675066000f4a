"""One implementation of all models, over a small set of operations with two backends.

`core.parallel.build_ops.load_ops("torch" | "jax")` returns the operations, `forward` computes the
model, `storage` reads and writes weights. Nothing here imports torch or jax until a backend is
loaded.
"""
