"""Prices, costs, budgets of lists of runs, carbon emissions, and scaling laws."""
