"""What it costs to generate: decoding, rollouts of reinforcement learning, evaluation."""
