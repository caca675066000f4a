"""Reasoning is parted from the answer in the forms of all families, and never graded."""

import pytest

from sabia.core.generate.call_formats import REASONING
from sabia.core.generate.reasoning import closed_unopened, opened_by_prompt, split_reasoning


@pytest.mark.parametrize(("opening", "closing", "prompted"), REASONING)
def test_each_form_is_parted(opening: str, closing: str, prompted: bool) -> None:
    text = f"{opening}is it 4? no{closing}\n\n5"
    assert split_reasoning(text) == ("5", "is it 4? no")
    assert split_reasoning(f"{opening}is it 4?") == (None, "is it 4?")
    assert split_reasoning(f"6 {opening}a{closing} 7 {opening}b{closing}8") == ("6  7 8", "a\n\nb")
    assert split_reasoning(f"5{opening}is it 4?") == (None, "5\n\nis it 4?")
    # the prompt has opened it
    assert opened_by_prompt(f"<user>q<assistant>{opening}\n") == closing
    assert opened_by_prompt(f"<user>q<assistant>{opening}\n\n{closing}\n\n") == ""
    assert split_reasoning(f"is it 4?{closing}5", closing) == ("5", "is it 4?")
    assert split_reasoning("is it 4?", closing) == (None, "is it 4?")
    if prompted:
        assert split_reasoning(f"is it 4?{closing}5") == ("5", "is it 4?")
    assert closed_unopened(f"is it 4?{closing}5") == (closing if prompted else "")
    assert closed_unopened(text) == ""


def test_texts_without_reasoning_stay_as_they_are() -> None:
    for text in ("", " 5\n", "a < b > c", "thinking: 4"):
        assert split_reasoning(text) == (text, "") and not opened_by_prompt(text)


def test_the_channels_of_harmony() -> None:
    final = "<|start|>assistant<|channel|>final<|message|>5"
    text = f"<|channel|>analysis<|message|>is it 4?<|end|>{final}"
    assert split_reasoning(text) == ("5", "is it 4?")
    assert split_reasoning("<|channel|>final<|message|>5") == ("5", "")


def test_thoughts_within_thoughts_end_with_the_last_mark() -> None:
    text = "<think>a <think>b</think> c</think>5"
    assert split_reasoning(text) == ("5", "a <think>b\n\nc")


def test_long_texts_take_linear_time() -> None:
    answer, reasoning = split_reasoning("<think>4</think>5 " * 100_000)
    assert answer is not None and "4" not in answer and "5" not in reasoning
