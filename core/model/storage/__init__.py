"""Model weights in files: Hugging Face directories, adapters, safetensors, lazy arrays."""
