"""A GRPO step: generation against a token-by-token play, parts, sides, memory."""

from dataclasses import replace

import pytest
from published_generation import architecture, load

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.chips import find_chip
from sabia.core.plan.serving import rollout
from sabia.core.plan.serving.decode import Replica, decode_step, prefill
from sabia.core.plan.serving.rollout import Lengths

SHAPES, _ = load()
H100 = find_chip("h100")
ENGINE = Replica(architecture(SHAPES["llama-3-8b"]), H100)
NONE = dict.fromkeys(("reward", "log-probs", "training", "weights"), 0.0)


def played_token_by_token(answers, slots, prompt):
    """Seconds for `answers` (whole numbers) through `slots`, one decoding step at a time."""
    waiting, running, seconds = list(answers), [], 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting.pop(0), 0])
        context = prompt + sum(done + 0.5 for _, done in running) / len(running)
        seconds += decode_step(ENGINE, len(running), context).seconds
        running = [[length, done + 1] for length, done in running if done + 1 < length]
    return seconds


@pytest.mark.parametrize("slots", [1, 4, 7, 64])
def test_events_are_what_single_steps_add_up_to(slots):
    answers = [37, 5, 120, 64, 64, 9, 200, 31, 77, 12]
    seconds, _ = rollout.play(ENGINE, [float(n) for n in answers], 1.0, slots, 300)
    assert seconds == pytest.approx(played_token_by_token(answers, slots, 300), rel=1e-6)


def test_one_sample_is_a_prefill_and_its_steps():
    sampling = rollout.Sampling(1, 1, 200, Lengths(50))
    made = rollout.generate(ENGINE, sampling, 1)
    steps = sum(decode_step(ENGINE, 1, 200 + i + 0.5).seconds for i in range(50))
    assert made.seconds == pytest.approx(prefill(ENGINE, 200).seconds + steps, rel=1e-3)
    assert (made.slots, made.replicas) == (1, 1)


def test_the_longest_answer_ends_the_step():
    short = rollout.generate(ENGINE, rollout.Sampling(8, 8, 100, Lengths(500, 600)), 8)
    long = rollout.generate(ENGINE, rollout.Sampling(8, 8, 100, Lengths(500, 4000)), 8)
    assert long.longest_tokens > 2000 and short.longest_tokens == pytest.approx(600)
    assert long.seconds > 3 * short.seconds
    assert long.tail_s > long.seconds / 2


def test_more_chips_help_until_the_tail_is_all_that_is_left():
    sampling = rollout.Sampling(128, 16, 200, Lengths(1000, 4000), slots=64)
    times = [rollout.generate(ENGINE, sampling, chips).seconds for chips in (8, 16, 32, 64, 2048)]
    assert times == sorted(times, reverse=True)
    floor = 4000 * decode_step(ENGINE, 1, 2200).seconds
    assert times[-1] == pytest.approx(floor, rel=0.1)
    assert times[0] > 1.9 * times[-1]


def test_parts_of_a_colocated_step_add_up():
    parts = {"reward": 2.0, "log-probs": 6.0, "training": 9.0, "weights": 1.0}
    sampling = rollout.Sampling(32, 8, 200, Lengths(300))
    step = rollout.colocated(ENGINE, sampling, 8, parts)
    assert step.seconds == pytest.approx(step.generation.seconds + 18)
    assert sum(step.shares.values()) == pytest.approx(1)
    assert step.chip_s == pytest.approx(8 * step.seconds)


def test_sides_overlap_off_policy_and_wait_on_policy():
    sampling = rollout.Sampling(32, 8, 200, Lengths(300))
    slow = NONE | {"log-probs": 20.0, "training": 100.0, "weights": 1.0}
    ahead = rollout.split(ENGINE, sampling, 4, 4, slow, off_policy=1)
    waits = rollout.split(ENGINE, sampling, 4, 4, slow, off_policy=0)
    assert ahead.seconds == pytest.approx(121)
    assert waits.seconds == pytest.approx(121 + waits.generation.seconds)
    assert (ahead.chips, ahead.binding) == (8, "training")
    assert "the chips of generation wait" in ahead.notes[0]
    assert "on policy" in waits.notes[0]


def test_steps_under_way_together_share_one_tail():
    sampling = rollout.Sampling(32, 8, 200, Lengths(500, 4000))
    seconds = [
        rollout.split(ENGINE, sampling, 4, 4, NONE, off_policy=k).generation.seconds
        for k in (0, 1, 7)
    ]
    assert seconds[0] > 1.5 * seconds[1] > 2 * seconds[2]


def test_what_binds_is_named():
    sampling = rollout.Sampling(64, 16, 200, Lengths(1000, 1001), slots=16)
    assert rollout.colocated(ENGINE, sampling, 8, NONE).binding == "generation (memory)"
    heavy = NONE | {"training": 1e4}
    assert rollout.colocated(ENGINE, sampling, 8, heavy).binding == "training"


def test_weights_travel_inside_the_domain_or_over_the_network():
    assert rollout.hand_over_seconds(ENGINE, False) == pytest.approx(16.06e9 / 450e9, rel=1e-3)
    assert rollout.hand_over_seconds(ENGINE, True) == pytest.approx(16.06e9 / 50e9, rel=1e-3)
    with pytest.raises(UsageError, match="no nic_gb_s of h100"):
        rollout.hand_over_seconds(
            replace(ENGINE, chip=replace(H100, network_bytes_per_s=None)), True
        )


def test_too_few_chips_are_refused():
    big = Replica(architecture(SHAPES["llama-2-70b"]), H100, 4)
    sampling = rollout.Sampling(8, 8, 200, Lengths(300))
    with pytest.raises(UsageError, match="generation on 2 chips in replicas of 4"):
        rollout.generate(big, sampling, 2)
    with pytest.raises(Infeasible, match="1 x h100"):
        rollout.generate(replace(big, chips=1), sampling, 8)
