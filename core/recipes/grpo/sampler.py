"""The samples of a GRPO step: drawn by the engine, graded, and stored in the journal.

A sample is identified by (seed, step, prompt, number); those of a step that the journal contains
are read from there, and only the rest is generated.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sabia.core.generate.engine import Engine
from sabia.core.generate.opened import open_client
from sabia.core.generate.requests import Completion, Request
from sabia.core.judge.llm import Judge
from sabia.core.judge.rewards import Case, Grader, NullGuard, parse_reward
from sabia.core.judge.verdict import Grade
from sabia.core.options.grpo import GrpoOptions
from sabia.core.parallel.health import watchdog
from sabia.core.parallel.world import World
from sabia.core.recipes.grpo.prompt_schedule import Prompt, PromptSchedule
from sabia.core.recipes.grpo.sample_batch import Group
from sabia.core.recipes.grpo.sample_journal import Journal, Key

GRADING_S = 3600.0  # a judge may take this much longer than the hang time-out
Owners = Mapping[str, Prompt]  # request id → its prompt


@dataclass
class Sampler:
    """Generates the groups of a step; `engine` holds the policy to sample from."""

    options: GrpoOptions
    engine: Engine
    schedule: PromptSchedule
    grader: Grader
    guard: NullGuard
    journal: Journal
    world: World
    seed: int
    made: int = 0  # tokens drawn for the last step

    def groups(self, step: int) -> list[Group]:
        """This process's groups of a step, graded, in order.

        Raises what the grader and the engine's `on_step` raise; finished samples are stored then.
        """
        every = list(enumerate(self.schedule.of_step(step)))
        mine = every[self.world.rank :: self.world.size]
        owners = {f"{step}-{number}-{prompt.id}": prompt for number, prompt in mine}
        numbers = range(self.options.group)
        wanted = [(name, number) for name in owners for number in numbers]
        graded, self.made = self.journal.graded(step), 0
        if not graded.keys() >= set(wanted):
            known = {key: completion for key, (completion, _) in graded.items()}
            samples = self._sampled(step, owners, known | self.journal.sampled(step))
            graded = self._graded(step, owners, {key: samples[key] for key in wanted})
        return [
            Group(
                prompt,
                [graded[name, number][0] for number in numbers],
                [graded[name, number][1] for number in numbers],
            )
            for name, prompt in owners.items()
        ]

    def greedy_rewards(self, prompts: Sequence[Prompt]) -> list[float | None]:
        """The reward of one greedy sample of each prompt; None where grading failed."""
        requests = [
            Request(prompt.ids, self.options.max_new_tokens, 0.0, id=f"validation-{number}")
            for number, prompt in enumerate(prompts)
        ]
        samples = self.engine.generate(requests)
        grades = self.grader.grade(_cases(prompts, samples))
        return [grade.score for grade in grades]

    def _sampled(
        self, step: int, owners: Owners, known: dict[Key, Completion]
    ) -> dict[Key, Completion]:
        """All samples of the owners' prompts, of which `known` exist."""
        requests = []
        for name, prompt in owners.items():
            missing = tuple(n for n in range(self.options.group) if (name, n) not in known)
            if missing:
                requests.append(self._request(name, prompt, missing))
        for completion in self.engine.stream(requests):
            self.journal.add(step, completion)
            known[completion.request_id, completion.sample] = completion
            self.made += len(completion.tokens)
        return known

    def _request(self, name: str, prompt: Prompt, missing: tuple[int, ...]) -> Request:
        return Request(
            prompt.ids,
            self.options.max_new_tokens,
            self.options.temperature,
            seed=self.seed,
            n=self.options.group,
            id=name,
            only=missing,
        )

    def _graded(
        self, step: int, owners: Owners, samples: Mapping[Key, Completion]
    ) -> dict[Key, tuple[Completion, Grade]]:
        prompts = [owners[name] for name, _ in samples]
        watchdog.enter_phase(step + 1, "grading", GRADING_S)
        grades = self.grader.grade(_cases(prompts, samples.values()))
        self.guard.add(grades)
        pairs = list(zip(samples.values(), grades, strict=True))
        self.journal.finish(step, self.seed, [prompt.id for prompt in prompts], pairs)
        return dict(zip(samples, pairs, strict=True))


def _cases(prompts: Iterable[Prompt], samples: Iterable[Completion]) -> list[Case]:
    return [
        Case(prompt.messages, completion.text, prompt.answer, prompt.rubric)
        for prompt, completion in zip(prompts, samples, strict=True)
    ]


@contextlib.contextmanager
def open_grader(options: GrpoOptions) -> Iterator[Grader]:
    """The reward's grader, with a judge on its own client if --judge-url names one."""
    weights = parse_reward(options.reward)
    if not options.judge_url:
        yield Grader(weights, None, options.max_unknown)
        return
    with open_client(
        options.judge_url,
        options.judge_model,
        options,
        options.judge_cache,
        options.max_judge_tokens,
    ) as client:
        yield Grader(weights, Judge(client, options), options.max_unknown)
