"""Comparison of the forms of a step by time, tokens in flight and memory, for `lightrft plan`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import options_of
from lightrft.reporting.files import ROLLOUTS_FILE
from lightrft.run.gpus import GB, Gpu
from lightrft.tools.plan.constants import constant
from lightrft.tools.plan.engine_room import LARGEST_SHARE, engine_room
from lightrft.tools.plan.forms import Lengths, Run, Timing, simulate, splits
from lightrft.tools.plan.memory import gigabytes, plan_memory
from lightrft.tools.plan.setup import Setup

ALONE, LAGGING, STREAMING = "waits for all", "lag, one program", "streaming"
SPLIT, BOTH = "ranks that generate", "both"
# Prompts in flight over those of a step, that are tried.
IN_FLIGHT = (1.5, 3.0)


@dataclass(frozen=True, slots=True)
class Form:
    """A form of a step.

    Args:
        name: Of the form.
        changes: Options that make it of a run that waits for all.
        timing: None where it is refused.
        memory_bytes: Of the rank that needs most.
        problem: The reason why the run cannot have it; "" if it can.
    """

    name: str
    changes: Mapping[str, object]
    timing: Timing | None = None
    memory_bytes: float = 0.0
    problem: str = ""

    @property
    def seconds(self) -> float:
        """Of a step; infinite where it cannot be had."""
        return math.inf if self.problem or self.timing is None else self.timing.seconds

    @property
    def flags(self) -> str:
        """The options of the command line."""
        given = {name: value for name, value in self.changes.items() if value is not None}
        return " ".join(f"--{n}" if v is True else f"--{n} {v}" for n, v in given.items())


def compare_forms(setup: Setup, gpu: Gpu, lengths: Lengths) -> list[Form]:
    """The forms of a run; of those with `stream_chunk` and of splits the fastest that fits.

    Args:
        setup: Of the run, whichever form it has.
        gpu: Of each rank.
        lengths: Of its responses.
    """
    given = setup.config
    reset = {
        "stream_chunk": None,
        "stream_prompts": None,
        "max_staleness": _usual_staleness(),
        "rollout_lag": 0,
        "rollout_ranks": 0,
        "devices_shared": False,
    }
    try:
        run = Run(replace(setup, config=given.replaced(reset)), gpu, lengths)
    except ConfigError as error:
        return [Form(ALONE, {}, problem=f"refused: {error}")]
    lag = {"rollout_lag": max(1, given.rollout_lag)}
    chunks = list(_chunks(given, run.setup.config.max_response_tokens))
    alone = {**lag, **_for_generating_ranks(setup)}
    return [
        _form(run, ALONE, {}),
        _form(run, LAGGING, lag),
        _fastest(run, STREAMING, chunks),
        _fastest(run, SPLIT, [alone], is_split=True),
        _fastest(run, BOTH, [{**alone, **each} for each in chunks], is_split=True),
    ]


def _usual_staleness() -> object:
    return options_of(TrainConfig)["max_staleness"][0].default


def _chunks(given: TrainConfig, longest: int) -> Iterator[dict[str, object]]:
    """Options of streaming: those that are given, or some in which no group has to be waited for.

    A response of full length ends within `max_staleness` updates after its first one.
    """
    is_usual = given.max_staleness == _usual_staleness()
    bound = {} if is_usual else {"max_staleness": given.max_staleness}
    if given.stream_chunk is not None:
        yield {
            "stream_chunk": given.stream_chunk,
            "stream_prompts": given.num_prompts_in_flight,
            **bound,
        }
        return
    sizes = sorted({math.ceil(longest / k) for k in range(2, given.max_staleness + 2)})
    for chunk, share in product(sizes, IN_FLIGHT):
        prompts = math.ceil(min(share, given.max_staleness + 1) * given.rollout_batch_size)
        yield {"stream_chunk": chunk, "stream_prompts": prompts, **bound}


def _for_generating_ranks(setup: Setup) -> dict[str, object]:
    """Options with which ranks that hold no trainer use their device."""
    found: dict[str, object] = {} if setup.config.fsdp else {"fsdp": True}
    if setup.config.devices_shared:
        return found | {"devices_shared": True}
    if setup.has_server_engine:
        usable = 1 - constant("reserve_share")
        usable -= constant("context_gb") * GB / setup.capacity_bytes
        found["engine_mem_util"] = min(LARGEST_SHARE, math.floor(100 * usable) / 100)
    return found


def _fastest(
    run: Run, name: str, choices: Sequence[Mapping[str, object]], *, is_split: bool = False
) -> Form:
    """The fastest that fits; else the fastest."""
    found = []
    for changes in choices:
        try:
            options = list(splits(run, changes)) if is_split else [changes]
        except ConfigError as error:
            return Form(name, changes, problem=f"refused: {error}")
        found += [_form(run, name, each) for each in options]
    if not found:
        config, world = run.setup.config, run.setup.world_size
        return Form(
            name,
            {},
            problem=f"of {world} ranks no two parts divide rollout_batch_size "
            f"{config.rollout_batch_size} and train_batch_size {config.train_batch_size}",
        )
    return min(found, key=lambda each: (each.seconds, each.timing.seconds if each.timing else 0.0))


def _form(run: Run, name: str, changes: Mapping[str, object]) -> Form:
    world = run.setup.world_size
    try:
        setup = run.of(changes, world)
    except ConfigError as error:
        return Form(name, changes, problem=f"refused: {error}")
    generating = setup.config.rollout_ranks
    if generating:
        trains, samples = (run.of(changes, n) for n in (world - generating, generating))
        needed, problem = _split_memory(trains, samples)
    else:
        plan = plan_memory(setup)
        needed, problem = plan.worst.device_bytes, "; ".join(plan.problems)
    return Form(name, changes, simulate(run, changes), needed, problem)


def _split_memory(trains: Setup, samples: Setup) -> tuple[float, str]:
    """Bytes of the rank that needs most, and what does not fit, of ranks that do one thing each."""
    training = plan_memory(replace(trains, engine=""))
    found = [f"ranks that train: {problem}" for problem in training.problems]
    weights = samples.compute_bytes * samples.actor_size.parameters / samples.config.engine_tp_size
    context = constant("context_gb") * GB if samples.has_gpu else 0.0
    room = engine_room(samples)
    cache = samples.samples_in_flight * samples.row_tokens * samples.cache_bytes
    generating = context + (weights + cache if room is None else room.share_bytes)
    trained, who = training.worst.device_bytes, "ranks that generate"
    if samples.config.devices_shared:
        generating, who = generating + trained, "two ranks of one device"
    if generating > training.usable_bytes:
        found.append(f"{who} need {gigabytes(generating)} of {gigabytes(training.usable_bytes)}")
    problem = "" if room is None else room.problem()
    found += [f"ranks that generate: {problem}"] if problem else []
    return max(trained, generating), "; ".join(found)


def form_table(forms: Sequence[Form], lengths: Lengths) -> str:
    """The comparison as text, with what it proposes."""
    base, groups = forms[0].timing, lengths.groups
    flat = sorted(length for group in groups for length in group)
    lines = [
        f"Forms of a step; responses of {lengths.average:.0f} tokens on average, half below "
        f"{flat[len(flat) // 2]}, 1 % above {flat[len(flat) * 99 // 100]}:",
        "| form | seconds | faster | waiting | tokens in flight | memory | options |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for each in forms:
        if each.timing is None or base is None:
            lines.append(f"| {each.name} | | | | | | {each.problem} |")
            continue
        gain = base.seconds / each.timing.seconds
        memory = "too large" if each.problem else gigabytes(each.memory_bytes)
        lines.append(
            f"| {each.name} | {each.timing.seconds:.1f} | {gain:.2f}x | "
            f"{each.timing.waiting_share:.0%} | {each.timing.open_tokens:,.0f} | {memory} | "
            f"{each.problem or each.flags} |"
        )
    fastest = min(forms, key=lambda each: each.seconds)
    if math.isinf(fastest.seconds):
        return "\n".join([*lines, "no form fits"])
    if base is not None and fastest.seconds < base.seconds and fastest.flags:
        return "\n".join([*lines, f"fastest that fits: {fastest.flags}"])
    return "\n".join([*lines, "no form is faster than waiting for all"])


def recorded_lengths(folder: Path, longest: int) -> Lengths:
    """Lengths of the samples that a run has recorded, none beyond the longest.

    Raises:
        ConfigError: It has no records, or they cannot be read.
    """
    from lightrft.config.files import FileError, lines_of
    from lightrft.reporting.rollouts import read_rollout  # it needs NumPy

    path = folder / ROLLOUTS_FILE if folder.is_dir() else folder
    groups: dict[tuple[int, int], list[int]] = {}
    try:
        for number, line in enumerate(lines_of(path), start=1):
            found = read_rollout(line, f"{path} line {number}")
            length = sum(stop - start for start, stop in found.sampled_spans)
            length = min(longest, max(1, length))
            groups.setdefault((found.step, found.group_id), []).append(length)
    except FileError as error:
        text = f"--lengths_of: {error}: give the folder of a run with --save_rollouts"
        raise ConfigError(text) from error
    if not groups:
        raise ConfigError(f"--lengths_of: {path} has no samples")
    return Lengths(tuple(map(tuple, groups.values())))
