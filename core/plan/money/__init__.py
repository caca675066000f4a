"""Prices, bills, budgets of many runs, carbon, and how far to train for the money."""
