"""Splitting a budget over sources by weight into whole numbers, with and without limits."""

from collections.abc import Mapping
from typing import TypeVar

Name = TypeVar("Name", str, int)


def apportion(weights: Mapping[Name, float], budget: int) -> dict[Name, int]:
    """Whole numbers that sum to the budget, by largest remainder; ties in order of the names."""
    total = sum(weights.values())
    exact = {name: budget * weight / total for name, weight in weights.items()}
    whole = {name: int(value) for name, value in exact.items()}
    rest = sorted(exact, key=lambda name: (whole[name] - exact[name], name))
    for name in rest[: budget - sum(whole.values())]:
        whole[name] += 1
    return whole


def fill(weights: Mapping[Name, float], limits: Mapping[Name, int], budget: int) -> dict[Name, int]:
    """Split a budget by weight; the excess over a limit is split over the others, by their weights.

    The sum is the budget, or less if all limits are reached.
    """
    taken: dict[Name, int] = {}
    free = dict(weights)
    while free:
        split = apportion(free, budget - sum(taken.values()))
        over = [name for name in free if split[name] > limits[name]]
        if not over:
            return taken | split
        for name in over:
            taken[name] = limits[name]
            del free[name]
    return taken
