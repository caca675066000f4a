"""What answers agree on: numbers, dates, names and negations decide, words only find the pairs."""

import random
import re

import pytest

from sabia.core.text.rewrite.segments import Limits, Segment, agree, segments, supports

LIMITS = Limits(2, 0.7, True)


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("The tower has 3 floors.", "The tower has three floors.", True),
        ("The tower has 3 floors.", "The tower has 4 floors.", False),
        ("There are seven days in a week.", "There are eight days in a week.", False),
        ("Há sete dias na semana.", "Há 7 dias na semana.", True),
        ("Há dois erros no texto.", "Há um erro no texto.", False),
        ("It is 5 km away.", "It is 5 miles away.", False),
        ("It is 5 km away.", "It is 5 km away, walking.", True),
        ("It rose by 5 % last year.", "It rose by 5 last year.", False),
        ("It costs $5 today.", "It costs €5 today.", False),
        ("The result is -5 there.", "The result is 5 there.", False),
        ("We find that 7 + 8 = 15.", "We find that 7 − 8 = 15.", False),
        ("Pi is about 3.142 here.", "Pi is about 3142 here.", False),
        ("It holds 1,234,567 books.", "It holds 1234567 books.", True),
        ("It holds 3 million books.", "It holds 3 billion books.", False),
        ("They won 3 to 2 at home.", "They won 2 to 3 at home.", False),
        ("A half of it is 1/2.", "A half of it is 0.5.", True),
        ("It opened on 3 May 1920.", "It opened on 1920-05-03.", True),
        ("It opened on 3 May 1920.", "It opened on 3 May 1921.", False),
        ("It opened on 3 May 1920.", "It opened on 4 May 1920.", False),
        ("Use the room B12 for it.", "Use the room B13 for it.", False),
        ("It is not safe to eat.", "It is safe to eat.", False),
        ("You can eat it raw.", "You can't eat it raw.", False),
        ("It was built by Ana Silva then.", "It was built by Rui Costa then.", False),
        ("The tower there has 3 floors.", "The house there has 3 floors.", False),
        ("**Answer:** 42", "Answer: 42.", True),
        ("42", "43", False),
        ("- 10² is large", "- 10³ is large", False),
        ("Room 1/0 and 1/2/3 is odd", "Room 1/0 and 1/2/3 is odd", True),
    ],
)
def test_two_segments_say_the_same(one, two, same):
    assert supports(Segment("", one), [Segment("", two)], LIMITS) is same
    assert supports(Segment("", two), [Segment("", one)], LIMITS) is same


def test_the_most_similar_segment_decides():
    other = segments("The house has 3 floors and a roof. The old tower has 4 floors and a roof.")
    assert not supports(Segment("", "The old tower has 3 floors and a roof."), other, LIMITS)
    twice = segments("Add 3 to it. Add 4 to it.")
    assert supports(Segment("", "Add 4 to it."), twice, LIMITS)
    assert not supports(Segment("", "Add 5 to it."), twice, LIMITS)


def test_segments_joined_are_the_text():
    draw = random.Random(4)
    pieces = ["One. Two? ", "\n", "\n\n", "- item 1.5 a\n", "1. go. Now\n", "2. on\n", "\t",
              "```\nx = 1\n", "```\n", "  ~~~ q\n", "# Head\n", "Dr. A says 3.5. "]  # fmt: skip
    for _ in range(500):
        text = "".join(draw.choice(pieces) for _ in range(draw.randint(0, 12)))
        made = segments(text)
        assert "".join(one.before + one.text for one in made) == text.rstrip(), text
        assert all(one.text.strip() == one.text and one.text for one in made)


def test_a_block_is_one_segment_and_lists_count_up():
    text = "Do:\n\n```py\na = 1\n\nb = 2\n```\n1. Take 5.\n2. Give 6.\n3. Stop."
    assert [one.text for one in segments(text)][1] == "```py\na = 1\n\nb = 2\n```"
    other = text.replace("Give 6", "Give 7").replace("b = 2", "b = 3")
    made = agree({"x": text, "y": other, "z": "Nothing."}, LIMITS)
    assert made.text == "Do:\n\n1. Take 5.\n2. Stop."
    assert [one.kept for one in made.segments] == [True, False, True, False, True]
    assert made.segments[0].models == ("x", "y") and made.segments[1].models == ("x",)
    assert made.share == pytest.approx(len("Do:1. Take 5.3. Stop.") / sum(
        len(one.text) for one in made.segments
    ))  # fmt: skip
    # a number that looks like a marker counts if nothing counts up with it
    assert not supports(segments("12. That is it")[0], segments("13. That is it"), LIMITS)


FACTS = ["The {} tower has {} floors.", "In the {} room, {} people sat.", "A {} bag weighs {} kg.",
         "The {} road is {} km long."]  # fmt: skip
THINGS = ["red", "blue", "old", "new", "tall", "wide", "cheap", "quiet"]


def numbers_of(text):
    """By thing and kind of fact; an own reading of the sentences."""
    stated = {}
    for template in FACTS:
        pattern = re.escape(template).replace(r"\{\}", r"(\w+)", 1).replace(r"\{\}", r"(\d+)", 1)
        for thing, number in re.findall(pattern, text):
            stated[template, thing] = number
    return stated


@pytest.mark.parametrize("seed", range(2))
def test_no_number_without_a_quorum_is_kept(seed):
    draw = random.Random(seed)
    kept = planted = 0
    for _ in range(50):
        facts = [(t, thing) for t in FACTS for thing in draw.sample(THINGS, 2)]
        truth = {fact: draw.randint(2, 60) for fact in facts}
        answers = {}
        for model in "abc":
            given = dict(truth)
            for fact in facts:
                if draw.random() < 0.3:
                    given[fact] = truth[fact] + draw.choice([-1, 1, 10])
            order = draw.sample(facts, len(facts))
            answers[model] = " ".join(t.format(x, given[t, x]) for t, x in order)
        read = {model: numbers_of(text) for model, text in answers.items()}
        made = agree(answers, LIMITS)
        states = numbers_of(made.text)
        for fact, number in states.items():
            assert sum(one[fact] == number for one in read.values()) >= 2
        # and all of the chosen answer that has a quorum is kept
        quorum = {
            fact for fact, number in read[made.model].items()
            if sum(one[fact] == number for one in read.values()) >= 2
        }  # fmt: skip
        assert states.keys() == quorum
        kept, planted = kept + len(states), planted + len(facts) - len(states)
    assert kept > 200 and planted > 40
