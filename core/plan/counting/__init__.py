"""Parameters and FLOPs of a model: from a config.json, or assumed from parameter counts."""
