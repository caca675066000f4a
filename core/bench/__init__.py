"""Evaluation: tasks, scoring, statistics, and the report.

A task file and a model give score rows; values, intervals, comparisons and the page come from the
rows alone. `svg` and `page` draw for any report.
"""
