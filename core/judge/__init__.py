"""Rewards: verifiers, rubrics and a language model as judge."""
