"""What a generation session needs of a device, in torch and in JAX."""
