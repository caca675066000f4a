"""Reason first by rules: nothing lost, nothing touched without need, once is enough."""

import random

import pytest

from sabia.core.text.rewrite.reason_first import kind_of, positions, rewrite
from sabia.core.text.sentences import join_lines, sentences, split_lines

ANSWERS = ["The answer is 095.", "A resposta é 095, noventa e cinco.", "Result: 95.",
           "O resultado é 12.", "**Answer:** 7.", "So the answer is 3."]  # fmt: skip
STEPS = ["First add the units: 7 + 8 = 15, write 5 and carry 1.", "Then add the tens: 3+5+1=9.",
         "Primeiro some as unidades.", "Depois some as dezenas: 9+4=13.", "That makes 13.",
         "Because 2 × 3 = 6.", "Por fim escreva as centenas: 1.", "Step 2: carry it."]  # fmt: skip
ASIDES = ["Some houses are old.", "O mar é grande e frio!", "Dr. Silva came at 3.5 p.m. today.",
          "the end", "Therefore, the state must act.", "Next topic here.", "See fig. 3 (above).",
          "“Why not?” she said.", "He paid R$ 1.234,56 for it…"]  # fmt: skip
QUESTIONS = ["How much is 37+58?", "Quanto é 37+58?", "Exercise 4: add them.", "What is it?"]
CASES = [
    # one paragraph, in both languages
    ("How much is 3+4? The answer is 7. First take 3. Then add 4.",
     "How much is 3+4? First take 3. Then add 4. The answer is 7."),
    ("Quanto é 3+4? A resposta é 7. Primeiro tome 3. Depois some 4.",
     "Quanto é 3+4? Primeiro tome 3. Depois some 4. A resposta é 7."),
    # several exercises in one paragraph and in paragraphs of their own
    ("3+4=? The answer is 7. Because 3+4=7. 1+1=? The answer is 2. Because 1+1=2.",
     "3+4=? Because 3+4=7. The answer is 7. 1+1=? Because 1+1=2. The answer is 2."),
    ("A? The answer is 7. First 3+4=7.\n\nB? The answer is 2. First 1+1=2.\n",
     "A? First 3+4=7. The answer is 7.\n\nB? First 1+1=2. The answer is 2.\n"),
    # a conclusion that is a paragraph goes behind the paragraphs of its reasoning
    ("Answer: 95\n\n1. Add 7 and 8.\n2. Add the tens.\n\nGoodbye.",
     "1. Add 7 and 8.\n2. Add the tens.\n\nAnswer: 95\n\nGoodbye."),
    ("How many? The answer is 95.\n\nFirst add.\n\nThen carry.\n\nBye.",
     "How many?\n\nFirst add.\n\nThen carry.\n\nThe answer is 95.\n\nBye."),
    # drawn conclusions, right behind a question only
    ("How much? Therefore 7. Because 3+4=7.", "How much? Because 3+4=7. Therefore 7."),
    # what follows the reasoning stays behind
    ("The answer is 9. First 4+5=9. Good luck! Bye. See you.",
     "First 4+5=9. The answer is 9. Good luck! Bye. See you."),
    # no full stop to end the last step: the conclusion gets a line
    ("the answer is 12. First add 3 and 9", "First add 3 and 9\nthe answer is 12."),
]  # fmt: skip
UNTOUCHED = [
    "",
    "  \n\n ",
    "The answer is blowing in the wind.",
    "First add 3 and 4. Then the answer is 7. Then rest.",
    "The result is found by adding. First add the units.",
    "An essay. Therefore, the state must act. First, it should tax.",
    "Therefore he left. Because it rained, she stayed.",
    "The answer is 7. The weather is fine. First add 3 and 4.",
    "A resposta é simples.\n\nO mar é grande.",
    "Primeiro some as unidades: 1+1=2. A resposta é 2.\nDepois descanse.",
]


@pytest.mark.parametrize(("text", "wanted"), CASES)
def test_conclusions_move_behind_their_reasoning(text, wanted):
    done = rewrite(text)
    assert done.text == wanted
    assert done.moved and min(done.before) == 0 and set(done.after) == {1.0}


@pytest.mark.parametrize("text", UNTOUCHED)
def test_text_without_the_pattern_is_untouched(text):
    assert rewrite(text).text == text and not rewrite(text).moved


def random_text(draw: random.Random) -> str:
    lines = []
    for _ in range(draw.randint(1, 9)):
        pool = draw.choice([ANSWERS + STEPS, QUESTIONS + ANSWERS + STEPS, ASIDES, STEPS,
                            QUESTIONS + ANSWERS + STEPS + ASIDES])  # fmt: skip
        words = [draw.choice(pool) for _ in range(draw.randint(0, 7))]
        text = draw.choice([" ", "  "]).join(words)
        if draw.random() < 0.2:
            text = text.rstrip(".")
        lines.append(draw.choice(["", "", "  ", "- "]) + text + draw.choice(["", " "]))
    return draw.choice(["\n", "\n\n", "\r\n", " \n \n"]).join(lines)


def test_properties_hold_on_thousands_of_texts():
    moved = 0
    for seed in range(3_000):
        text = random_text(random.Random(seed))
        done = rewrite(text)
        moved += done.moved
        assert sorted(sentences(done.text)) == sorted(sentences(text)), seed
        assert rewrite(done.text).text == done.text, seed
        assert (done.text == text) == (done.moved == 0), seed
        assert sum(done.after) >= sum(done.before), seed
        if not done.moved:
            continue
        # lines may be added, none is glued to another and none is emptied
        assert done.text.count("\n") >= text.count("\n"), seed
    assert moved > 1_500


def test_taking_apart_and_joining_is_the_identity():
    for seed in range(2_000):
        text = random_text(random.Random(seed))
        assert join_lines(*split_lines(text)) == text


def test_sentences_end_where_they_end():
    text = (
        "Dr. Silva paid 3.5 p.m. today. “Why not?” She left… 1. Then e.g. this! A. B. Costa came."
    )
    assert sentences(text) == [
        "Dr. Silva paid 3.5 p.m. today.", "“Why not?”", "She left…", "1.", "Then e.g. this!",
        "A.", "B. Costa came.",
    ]  # fmt: skip
    assert sentences("1. Add.\n2) É assim. Não é?") == ["1. Add.", "2) É assim.", "Não é?"]


def test_positions_measure_what_stands_before_the_answer():
    assert positions("The answer is 7. First 3+4=7.") == (0.0,)
    assert positions("First 3+4=7. The answer is 7.") == (1.0,)
    assert positions("No answer here.") == ()
    assert kind_of("What is 3+4=7?") == kind_of("Exercise 2: add.")


def test_work_grows_with_the_text_only():
    text = "\n".join(["3+4=? The answer is 7. First 3+4=7. Then rest 5."] * 4_000)
    assert rewrite(text).moved == 4_000
    assert not rewrite("The answer is " + "a " * 200_000).moved
    assert not rewrite("." * 100_000 + " The answer is").moved
