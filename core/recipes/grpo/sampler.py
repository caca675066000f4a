"""The samples of a GRPO step: drawn by the engine, graded, and stored in the journal.

A sample is identified by (seed, step, prompt, number); those of a step that the journal contains
are read from there, and only the rest is generated.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sabia.core.generate.engine import Engine
from sabia.core.generate.opened import open_budget
from sabia.core.generate.requests import Completion, Request
from sabia.core.generate.thinking import ThinkingBudget, asked_budget, thinking_fields
from sabia.core.generate.turn_parser import parse_turn
from sabia.core.judge.opened_judges import open_panel
from sabia.core.judge.rewards import MODEL, AskedCase, Case, Grader, NullGuard
from sabia.core.judge.verdict import Grade
from sabia.core.options.grpo import GrpoOptions
from sabia.core.parallel.health import watchdog
from sabia.core.parallel.world import World
from sabia.core.recipes.grpo.policy_config import reward_weights
from sabia.core.recipes.grpo.prompt_schedule import Prompt, PromptSchedule
from sabia.core.recipes.grpo.sample_batch import Group, is_informative
from sabia.core.recipes.grpo.sample_journal import Journal, Key
from sabia.core.recipes.grpo.step_rewards import graded_steps, step_cases, token_ends
from sabia.core.shards.job import Job

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
        positions = range(self.world.rank, self.options.prompts, self.world.size)
        self.made = 0
        groups = self._drawn(step, 0, positions)
        latest = groups
        for draw in range(1, self.options.refill + 1):
            latest = self._drawn(
                step, draw,
                [group.position[1] for group in latest if not is_informative(group, self.options)],
            )  # fmt: skip
            groups += latest
        return groups

    def _drawn(self, step: int, draw: int, positions: Sequence[int]) -> list[Group]:
        """The graded groups of some positions of a step, by one draw of prompts."""
        if not positions:
            return []
        prompts = self.schedule.of_step(step, draw)
        mark = f"+{draw}" if draw else ""
        owners = {f"{step}-{n}{mark}-{prompts[n].id}": prompts[n] for n in positions}
        numbers = range(self.options.group)
        wanted = [(name, number) for name in owners for number in numbers]
        graded, delimiter = self.journal.graded(step), self.options.step_delimiter
        if not graded.keys() >= set(wanted):
            known = {key: completion for key, (completion, _) in graded.items()}
            known |= self.journal.sampled(step)
            asked: dict[Key, tuple[Completion, list[AskedCase]]] = {}
            # the judge grades finished samples while others are drawn
            for sample in self._sampled(step, owners, known):
                case = _case(owners[sample.request_id], sample)
                parts = step_cases(case, delimiter) if delimiter else [case]
                submitted = [self.grader.submit(part) for part in parts]
                asked[sample.request_id, sample.sample] = sample, submitted
            graded = self._graded(step, draw, owners, {key: asked[key] for key in wanted})
        return [
            Group(
                prompt,
                [graded[name, number][0] for number in numbers],
                [graded[name, number][1] for number in numbers],
                (draw, position),
            )
            for position, (name, prompt) in zip(positions, owners.items(), strict=True)
        ]

    def held_out_rewards(
        self, prompts: Sequence[tuple[int, Prompt]], temperature: float
    ) -> list[float | None]:
        """The reward of one sample of each numbered prompt; None where grading failed."""
        requests = [
            Request(
                prompt.ids, self.options.max_new_tokens, temperature, seed=self.seed,
                id=f"validation-{number}", thinking=self._thinking(prompt),
            )
            for number, prompt in prompts
        ]  # fmt: skip
        samples = self.engine.generate(requests)
        pairs = zip((prompt for _, prompt in prompts), samples, strict=True)
        return [grade.score for grade in self.grader.grade([_case(*pair) for pair in pairs])]

    def _sampled(
        self, step: int, owners: Owners, known: Mapping[Key, Completion]
    ) -> Iterator[Completion]:
        """All samples of the owners' prompts, of which `known` exist, as they are finished."""
        requests, numbers = [], range(self.options.group)
        for name, prompt in owners.items():
            yield from (known[name, n] for n in numbers if (name, n) in known)
            missing = tuple(n for n in numbers if (name, n) not in known)
            if missing:
                requests.append(self._request(name, prompt, missing))
        for completion in self.engine.stream(requests):
            self.journal.add(step, completion)
            self.made += len(completion.tokens)
            yield completion

    def _request(self, name: str, prompt: Prompt, missing: tuple[int, ...]) -> Request:
        return Request(
            prompt.ids,
            self.options.max_new_tokens,
            self.options.temperature,
            seed=self.seed,
            n=self.options.group,
            id=name,
            only=missing,
            thinking=self._thinking(prompt),
            routed_experts=self.options.routing_replay,
        )

    def _thinking(self, prompt: Prompt) -> ThinkingBudget | None:
        tokenizer = self.engine.tokenizer
        fields = thinking_fields(self.options)
        return asked_budget(fields, tokenizer.decode(prompt.ids), tokenizer)

    def _graded(
        self,
        step: int,
        draw: int,
        owners: Owners,
        asked: Mapping[Key, tuple[Completion, list[AskedCase]]],
    ) -> dict[Key, tuple[Completion, Grade]]:
        prompts = [owners[name] for name, _ in asked]
        watchdog.enter_phase(step + 1, "grading", GRADING_S)
        samples = [sample for sample, _ in asked.values()]
        every = iter(self.grader.collect([case for _, cases in asked.values() for case in cases]))
        by_sample = [[next(every) for _ in cases] for _, cases in asked.values()]
        watchdog.enter_phase(step + 1, "graded")  # other processes are waited for as usual
        grades = [parts[-1] for parts in by_sample]
        if delimiter := self.options.step_delimiter:
            ends = [token_ends(sample, delimiter, self.engine.tokenizer) for sample in samples]
            grades = [graded_steps(*pair) for pair in zip(by_sample, ends, strict=True)]
        self.guard.add(grades)
        pairs = list(zip(samples, grades, strict=True))
        messages = [self._message(*pair) for pair in zip(prompts, samples, strict=True)]
        names = [prompt.id for prompt in prompts]
        self.journal.finish(step, self.seed, names, pairs, messages, draw)
        return dict(zip(asked, pairs, strict=True))

    def _message(self, prompt: Prompt, sample: Completion) -> dict[str, object]:
        """The sample as a message of a chat record."""
        tokenizer = self.engine.tokenizer
        text = tokenizer.decode(sample.tokens)
        return parse_turn(text, prompt.messages, tokenizer, prompt.tools, **prompt.variables)


def _case(prompt: Prompt, sample: Completion) -> Case:
    return Case(prompt.messages, sample.text, prompt.answer, prompt.rubric)


@contextlib.contextmanager
def open_grader(job: Job, options: GrpoOptions) -> Iterator[Grader]:
    """The reward's grader, with the judges that --judge-url or --judge names."""
    weights = reward_weights(options)
    scores = None
    if MODEL in weights:
        from sabia.core.recipes.preferences.reward_scorer import RewardScorer

        scores = RewardScorer(options.reward_model).score
    with open_panel(options, open_budget(options, job, options.max_judge_tokens)) as panel:
        yield Grader(weights, panel, options.max_unknown, scores)
