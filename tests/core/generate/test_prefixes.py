"""The tree of prefixes against a count by hand, and what it holds at once."""

import numpy as np
import pytest

from sabia.core.generate.prefixes import Prefix, prefix_tree


def begins_with(ids: tuple[int, ...], prefix: Prefix) -> bool:
    return ids[: len(prefix)] == prefix.ids


def path(prefix: Prefix) -> list[Prefix]:
    return [prefix] if prefix.parent is None else [*path(prefix.parent), prefix]


def drawn(seed: int) -> list[tuple[int, ...]]:
    """Sequences that begin with each other's beginnings, of any lengths, some equal or empty."""
    draw = np.random.default_rng(seed)
    made: list[tuple[int, ...]] = [()]
    for _ in range(60):
        base = made[int(draw.integers(len(made)))]
        kept = base[: int(draw.integers(len(base) + 1))]
        made.append((*kept, *draw.integers(0, 3, int(draw.integers(0, 30))).tolist()))
    return made


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("most", [0, 10, 25, 1000])
def test_every_sequence_has_its_longest_prefix_within_the_bound(step: int, most: int) -> None:
    used = 0
    for seed in range(20):
        sequences = drawn(seed)
        tree = prefix_tree(sequences, 6, most, step, extra=1)
        members = sorted(number for prefix in tree for number in prefix.members)
        assert members == list(range(len(sequences)))
        used += len(tree) - 1
        for place, prefix in enumerate(tree):
            assert len(prefix) % step == 0
            assert sum(len(one) + 1 for one in path(prefix)[1:]) <= most
            assert all(begins_with(sequences[number], prefix) for number in prefix.members)
            if prefix.parent is not None:  # depth first: above it is the path of the one before
                assert prefix.parent in path(tree[place - 1])
                below = [o for o in tree if prefix in path(o)]
                count = sum(len(one.members) for one in below)
                assert (count - 1) * (len(prefix) - len(prefix.parent)) >= 6
    assert used > (0 if most else -1)


def test_fixed_examples_and_a_common_question_are_two_prefixes() -> None:
    examples, question = tuple(range(100)), tuple(range(500, 540))
    sequences = [
        (*examples, *question, 1),
        (*examples, 7, 8),
        (*examples, *question, 2, 3),
        (9,),
        (*examples, *question),
    ]
    root, first, second = prefix_tree(sequences, 50, 1000)
    assert (root.ids, root.members) == ((), [3])
    assert (first.ids, first.members) == (examples, [1])
    assert (second.ids, sorted(second.members)) == ((*examples, *question), [0, 2, 4])
    assert [len(p) for p in prefix_tree(sequences, 50, 239)] == [0, 100]
    assert [len(p) for p in prefix_tree(sequences, 50, 240)] == [0, 100, 140]
    assert [len(p) for p in prefix_tree(sequences, 81, 1000)] == [0, 100]
    assert prefix_tree([], 1, 1)[0].members == []
