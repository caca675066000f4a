"""The model, once: forward maths over a small `ops` namespace with two implementations.

`backend.load_ops("torch" | "jax")` gives the operations, `forward` the maths, `hub` the way to
and from safetensors. Nothing here imports torch or jax until a backend is loaded.
"""
