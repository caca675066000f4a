"""GRPO: prompts, samples and their grades, batches, the run."""
