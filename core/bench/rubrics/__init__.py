"""Rubrics beyond verdicts: labels of people, and answers compared in pairs."""
