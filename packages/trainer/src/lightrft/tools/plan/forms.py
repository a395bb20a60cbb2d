"""Seconds, waiting and rows in flight of the forms of a step, from the lengths of responses.

Each engine decodes its own rows, as many at a time as its cache holds, at the cost of
`duration.decoding`: with few rows a step takes hardly less time than with many, and this is what
waiting for long responses costs. Steps are those of `rollout.streaming`: one call of every engine,
groups chosen by its own rule, and one more call for those that have to be waited for. A step that
waits for all of its responses is the same with whole responses as chunks.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import itemgetter
from random import Random
from statistics import NormalDist, mean

from lightrft.config.rules import launch_problems
from lightrft.rollout.stream_order import GroupFacts, groups_to_train
from lightrft.run.gpus import GB, Gpu
from lightrft.tools.plan.constants import constant
from lightrft.tools.plan.duration import Decoding, decoding, step_seconds
from lightrft.tools.plan.engine_room import engine_room
from lightrft.tools.plan.setup import Setup

# Groups that are drawn of a distribution, steps that are counted, and rows of a step; larger steps
# are simulated on some of their engines.
NUM_GROUPS, NUM_STEPS, MAX_ROWS = 2000, 6, 1024


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of responses.

    Args:
        groups: Of one prompt each.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def lognormal(cls, sigma: float, average: float, longest: int, group_size: int) -> "Lengths":
        """Lognormal lengths that end at the longest.

        Args:
            sigma: Standard deviation of a length's logarithm.
            average: Mean after the cut.
            longest, group_size: Bound of a length, and lengths of a prompt.
        """
        middle, random = _log_median(sigma, average, longest), Random(0)
        between = sigma * math.sqrt(constant("length_variance_of_prompts"))
        within = sigma * math.sqrt(1 - constant("length_variance_of_prompts"))

        def group() -> tuple[int, ...]:
            own = random.gauss(middle, between)
            drawn = (own + random.gauss(0.0, within) for _ in range(group_size))
            # The exponent is cut first: a wide distribution overflows.
            return tuple(max(1, round(math.exp(min(x, math.log(longest))))) for x in drawn)

        return cls(tuple(group() for _ in range(NUM_GROUPS)))

    @property
    def average(self) -> float:
        """Over all responses."""
        return mean(length for group in self.groups for length in group)

    def drawn(self, group_size: int) -> Iterator[list[int]]:
        """Groups without end, the same in every call."""
        random = Random(1)
        while True:
            group = random.choice(self.groups)
            yield list(group) if len(group) == group_size else random.choices(group, k=group_size)


def _log_median(sigma: float, average: float, longest: int) -> float:
    """Of a lognormal distribution that has this mean once it is cut."""
    share = NormalDist().cdf
    low, high = -1.0, math.log(longest) + 20 * sigma + 1
    for _ in range(100):
        mu = (low + high) / 2
        z = (math.log(longest) - mu) / sigma
        below = math.exp(mu + sigma * sigma / 2) * share(z - sigma)
        low, high = (mu, high) if below + longest * share(-z) < average else (low, mu)
    return low


@dataclass(slots=True)
class _Group:
    """A prompt's responses while they are sampled."""

    request_id: int
    engine: int
    lengths: list[int]
    sampled: list[int]
    begun: int = 0
    complete: int = 0

    @property
    def facts(self) -> GroupFacts:
        return GroupFacts(self.request_id, self.begun, self.complete, sum(self.sampled))


@dataclass(frozen=True, slots=True)
class Step:
    """One simulated step of all engines.

    Args:
        seconds: Until the slowest engine is done.
        trained_tokens: Of the responses that it trains on.
        open_tokens: Sampled, and not trained on when it ends.
    """

    seconds: float
    trained_tokens: int
    open_tokens: int


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a run.

    Args:
        number: Of them.
        cost: Of their work.
        cache_tokens: For which each has room.
        prompt_tokens: Of each prompt.
    """

    number: int
    cost: Decoding
    cache_tokens: float
    prompt_tokens: int

    def steps(
        self,
        lengths: Iterator[list[int]],
        num_groups: int,
        *,
        chunk: int,
        num_in_flight: int,
        staleness: int,
    ) -> Iterator[Step]:
        """Steps without end; see `rollout.streaming`.

        Args:
            lengths: Of the groups in the order of their prompts.
            num_groups: That a step trains on.
            chunk, num_in_flight, staleness: Tokens between two updates, groups, and updates that a
                group may wait.
        """
        flight: list[_Group] = []
        numbers = count()
        for number in count(1):
            is_first = True
            while is_first or len(flight) < num_in_flight:
                is_first = False
                for place in range(num_groups):
                    drawn = next(lengths)
                    engine = place * self.number // num_groups
                    flight.append(_Group(next(numbers), engine, drawn, [0] * len(drawn)))
            # In the order of their prompts, for none is put back.
            seconds = self._call(flight[:num_in_flight], number, chunk)
            begun = {each.request_id: each for each in flight if each.begun}
            chosen = groups_to_train(
                [each.facts for each in begun.values()],
                num_groups,
                round_number=number,
                max_staleness=staleness,
            )
            waited = [begun[each.request_id] for each in chosen if not each.complete]
            seconds += self._call(waited, number, None)
            ids = {each.request_id for each in chosen}
            trained = sum(sum(begun[i].lengths) for i in ids)
            flight = [each for each in flight if each.request_id not in ids]
            yield Step(seconds, trained, sum(sum(each.sampled) for each in flight))

    def _call(self, groups: Sequence[_Group], number: int, chunk: int | None) -> float:
        """Samples a chunk of each open response, or all of it; returns the longest time."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.number)]
        prefilled = [0.0] * self.number
        for group in groups:
            group.begun = group.begun or number
            most = math.inf if chunk is None else chunk * (number - group.begun + 1)
            for index, (length, have) in enumerate(zip(group.lengths, group.sampled, strict=True)):
                new = int(min(length, most)) - have
                if new <= 0:
                    continue
                context = self.prompt_tokens + have
                rows[group.engine].append((new, context))
                # What goes on is computed again; prompts of a group share their prefix.
                prefilled[group.engine] += context if have else context / len(group.lengths)
                group.sampled[index] += new
            if not group.complete and group.sampled == group.lengths:
                group.complete = number
        return max(
            self.decode(own) + tokens * self.cost.prefill_seconds
            for own, tokens in zip(rows, prefilled, strict=True)
        )

    def decode(self, rows: Sequence[tuple[int, int]]) -> float:
        """Seconds of an engine for rows, in their order: new tokens of each, and those before.

        As many rows are decoded as the cache has room for; where it is full, the last one begun
        waits until another one has ended, and is computed again.
        """
        waiting = deque(rows)
        # Step in which a row ends, its number, and its tokens then.
        active: list[tuple[int, int, int]] = []
        now, tokens, seconds, is_full, numbers = 0, 0, 0.0, False, count()
        while active or waiting:
            while waiting and not is_full:
                new, before = waiting[0]
                if active and tokens + before + len(active) >= self.cache_tokens:
                    break
                waiting.popleft()
                heapq.heappush(active, (now + new, next(numbers), new + before))
                tokens += before
            num_rows = len(active)
            num_steps = active[0][0] - now
            if num_rows > 1:
                room = (self.cache_tokens - tokens) / num_rows
                num_steps = max(1, int(min(num_steps, room)))
            seconds += num_steps * self.cost.step(num_rows, tokens + num_rows * (num_steps - 1) / 2)
            tokens += num_steps * num_rows
            now += num_steps
            while active and active[0][0] == now:
                tokens -= heapq.heappop(active)[2]
                is_full = False
            if len(active) > 1 and tokens + len(active) > self.cache_tokens:
                last = max(active, key=itemgetter(1))
                active.remove(last)
                heapq.heapify(active)
                left = last[0] - now
                waiting.appendleft((left, last[2] - left))
                tokens -= last[2] - left
                seconds += (last[2] - left) * self.cost.prefill_seconds
                is_full = True
        return seconds


@dataclass(frozen=True, slots=True)
class Run:
    """A run whose forms are compared.

    Args:
        setup: Of the run, all ranks of which do everything.
        gpu: Of each rank.
        lengths: Of its responses.
    """

    setup: Setup
    gpu: Gpu
    lengths: Lengths

    @property
    def step_tokens(self) -> float:
        """Of the responses of an average step."""
        config = self.setup.config
        return config.rollout_batch_size * config.n_samples_per_prompt * self.lengths.average

    def of(self, changes: Mapping[str, object], world_size: int) -> Setup:
        """The setup of so many ranks with other options, whose rows have the average length."""
        config, world = self.setup.config.replaced(changes), world_size
        return replace(
            self.setup,
            config=config,
            world_size=world,
            ranks_per_node=min(self.setup.ranks_per_node, world),
            mean_length_share=self.lengths.average / config.max_response_tokens,
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """The average step of a form.

    Args:
        seconds: Of a step with the average number of tokens.
        generation_seconds, update_seconds: Of its two sides, waiting left out.
        waiting_share: Of the time of all ranks, in which they have fewer rows than they could, or
            wait for the other side.
        open_tokens: In flight between two steps.
    """

    seconds: float
    generation_seconds: float
    update_seconds: float
    waiting_share: float
    open_tokens: float


def engines_of(setup: Setup, gpu: Gpu) -> Engines:
    """The engines of all ranks of a setup; an embedded one has room for all rows."""
    room, config = engine_room(replace(setup, capacity_bytes=gpu.memory_bytes)), setup.config
    number = max(1, setup.world_size // config.engine_tp_size)
    tokens = math.inf if room is None else room.cache_tokens
    return Engines(number, decoding(setup, gpu), tokens, config.prompt_max_len)


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Generation of some steps.

    Args:
        seconds: Of each, as if they had the average number of tokens.
        ideal_seconds: With as many rows all the time as an engine begins a step with.
        open_tokens: Left between two steps.
    """

    seconds: tuple[float, ...]
    ideal_seconds: float
    open_tokens: float

    @classmethod
    def of(cls, run: Run, setup: Setup) -> "_Sampling":
        config, engines = setup.config, engines_of(setup, run.gpu)
        groups, group_size = config.rollout_batch_size, config.n_samples_per_prompt
        per_engine = groups * group_size / engines.number
        some = min(engines.number, max(2, int(MAX_ROWS / per_engine)))
        scale, streams = some / engines.number, config.stream_chunk is not None
        in_flight = config.num_prompts_in_flight if streams else groups
        steps = replace(engines, number=some).steps(
            run.lengths.drawn(group_size),
            max(1, round(groups * scale)),
            chunk=config.stream_chunk or config.max_response_tokens,
            num_in_flight=max(1, round(in_flight * scale)),
            staleness=config.max_staleness,
        )
        for _ in range(config.max_staleness + 1 if streams else 0):
            next(steps)
        counted = [next(steps) for _ in range(NUM_STEPS)]
        size = run.step_tokens * scale * NUM_STEPS / sum(each.trained_tokens for each in counted)
        row_tokens = config.prompt_max_len + run.lengths.average / 2
        rows = max(1.0, min(engines.cache_tokens / row_tokens, per_engine))
        each_row = engines.cost.step(rows, rows * row_tokens)
        return cls(
            tuple(size * each.seconds for each in counted),
            run.step_tokens / engines.number * each_row / rows,
            mean(each.open_tokens for each in counted) / scale
            + config.rollout_lag * run.step_tokens,
        )


def simulate(run: Run, changes: Mapping[str, object]) -> Timing:
    """The average step with other options."""
    world = run.setup.world_size
    generating = run.of(changes, world).config.rollout_ranks
    setup = run.of(changes, generating or world)
    sampling = _Sampling.of(run, setup)
    generation = mean(sampling.seconds)
    phases = step_seconds(run.of(changes, world - generating), run.gpu).phases
    update = sum(phases[name] for name in ("exchange", "score", "train"))
    if not generating:
        seconds = generation + update + phases["sync"]
        work = world * (seconds - max(0.0, generation - sampling.ideal_seconds))
    else:
        bridge = phases["sync"] + bridge_seconds(setup, world - generating, run.gpu)
        seconds = generation + update + bridge  # one after the other on devices that are shared
        if not setup.config.devices_shared:
            seconds = overlapped_seconds(
                sampling.seconds, update, bridge, lag=setup.config.rollout_lag
            )
        work = generating * min(sampling.ideal_seconds, generation) + (world - generating) * update
        work += world * bridge
    waiting = max(0.0, 1 - work / world / seconds)
    return Timing(seconds, generation, update, waiting, sampling.open_tokens)


def bridge_seconds(setup: Setup, num_training: int, gpu: Gpu) -> float:
    """Shards from their owners to the engines, which then exchange what each has received.

    Args:
        setup: The ranks that generate.
        num_training: Ranks that train.
        gpu: The device of each.
    """
    total, number = setup.compute_bytes * setup.actor_size.parameters / GB, setup.world_size
    if setup.config.devices_shared:  # NCCL refuses: from device to host, and to the other device
        return total * (2 / constant("host_gb_per_second") + 1 / constant("gloo_gb_per_second"))
    is_one_node = number + num_training <= setup.ranks_per_node
    link = gpu.link_gb_per_second if is_one_node else constant("node_gb_per_second")
    shares = 1 / min(number, num_training) + (number - 1) / number
    return total * shares / (link * constant("link_share"))


def overlapped_seconds(draws: Sequence[float], update: float, bridge: float, *, lag: int) -> float:
    """Seconds of a step where some ranks sample step t + lag while the others train on t.

    Args:
        draws: Seconds of sampling, step after step, that come again and again.
        update: Of training on a step.
        bridge: Of bringing the weights over, which both sides take part in.
        lag: Updates between the weights that sample a step and those that it trains.
    """
    sampled, updated = [0.0], [0.0]
    number = 4 * len(draws) + lag
    for step in range(1, number + 1):
        newest = updated[max(0, step - lag - 1)]
        begin = max(sampled[-1], newest) + (bridge if step > lag + 1 else 0.0)
        sampled.append(begin + draws[step % len(draws)])
        updated.append(max(updated[-1], sampled[step]) + update + bridge)
    half = number // 2
    return (updated[-1] - updated[half]) / (number - half)


def splits(run: Run, changes: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Options for each number of ranks that may only generate."""
    prompts, world = run.setup.config.rollout_batch_size, run.setup.world_size
    for number in range(1, world):
        if prompts % number or prompts % (world - number):  # before all rules are asked
            continue
        wanted = {**changes, "rollout_ranks": number}
        if not launch_problems(run.setup.config.replaced(wanted), world):
            yield wanted
