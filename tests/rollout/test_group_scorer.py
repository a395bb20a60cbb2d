"""One call of the reward for each group, beside the generation; timing changes nothing."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.engines.fake_engine import FakeEngine
from tests.machine import seconds
from tests.rewards.asking import results_of

from lightrft.config import TrainConfig
from lightrft.datasets.types import Prompt
from lightrft.engines import EngineConfig, SamplingParams
from lightrft.engines.types import Completion
from lightrft.records.rollout import Rollout
from lightrft.records.sample_ledger import FUNCTION, SampleEntry, SampleLedger
from lightrft.rewards import build_reward
from lightrft.rewards.types import UNDECIDED, CallStyle, RewardError, RewardResult
from lightrft.rollout.sampler import RolloutSampler
from lightrft.rollout.scoring import GroupScorer
from lightrft.rollout.source import SourceParts
from lightrft.strategy import get_fake_strategy

DEADLINE = 60.0


def group(group_id, size=2):
    row = Prompt(id=group_id, text=f"p{group_id}", token_ids=(1,), label=None, columns={"k": 1})
    return [
        Rollout(
            row,
            Completion(group_id, i, (1,), (2,), (0.0,), "temperature", "stop"),
            group_id,
            group_id * size + i,
            f"r{group_id}.{i}",
        )
        for i in range(size)
    ]


GROUPS = [group(i) for i in range(12)]
ROLLOUTS = [rollout for members in GROUPS for rollout in members]


class Apart:
    """Scores by the response alone, after a pause that differs from call to call."""

    name, needs_labels, whole_batch = "apart", False, False

    def __init__(self, parallel_calls, *, failing=(), pauses=()):
        self.parallel_calls = parallel_calls
        self.failing, self.pauses = failing, dict(pauses)
        self.calls: list[list[str]] = []
        self.threads: set[str] = set()
        self.num_now = self.most = 0
        self._lock = threading.Lock()

    def score(self, prompts, responses, labels, columns):
        assert list(columns) == ["conversations", "k"]
        assert columns["k"] == [1] * len(responses)
        index = int(prompts[0][1:])
        with self._lock:
            self.calls.append(list(responses))
            self.threads.add(threading.current_thread().name)
            self.num_now += 1
            self.most = max(self.most, self.num_now)
        time.sleep(self.pauses.get(index, 0.0))
        with self._lock:
            self.num_now -= 1
        if index in self.failing:
            raise RewardError(f"group {index}")
        return [RewardResult(float(text[1:]), {"apart": 1.0}) for text in responses]

    def close(self):
        pass


def scored(function, *, added=GROUPS, **options):
    with GroupScorer(function, columns=["k"], **options) as scorer:
        for members in added:
            scorer.add(members)
        return list(scorer.results(ROLLOUTS))


EXPECTED = [RewardResult(float(r.response_text[1:]), {"apart": 1.0}) for r in ROLLOUTS]


@pytest.mark.parametrize("parallel_calls", [0, 1, 4])
def test_timing_changes_nothing(parallel_calls):
    rng = random.Random(parallel_calls)
    order = rng.sample(GROUPS, len(GROUPS))
    pauses = {i: rng.random() / 50 for i in range(len(GROUPS))}
    function = Apart(parallel_calls, pauses=pauses)
    # Some groups are never added: the rest is scored when the results are asked for.
    assert scored(function, added=order[:8]) == EXPECTED
    assert sorted(function.calls) == sorted([r.response_text for r in g] for g in GROUPS)
    assert function.most <= max(1, parallel_calls)
    own = threading.current_thread().name
    assert function.threads == {own} if parallel_calls == 0 else own not in function.threads


def test_a_call_runs_before_the_results_are_asked_for():
    started, go_on = threading.Event(), threading.Event()

    class Waits(Apart):
        def score(self, *arguments):
            started.set()
            assert go_on.wait(DEADLINE)
            return super().score(*arguments)

    with GroupScorer(Waits(1), columns=["k"]) as scorer:
        scorer.add(GROUPS[0])  # does not wait for it
        assert started.wait(DEADLINE)
        go_on.set()
        assert scorer.results(GROUPS[0]) == EXPECTED[:2]


@pytest.mark.parametrize("parallel_calls", [0, 1, 3])
def test_of_several_failures_the_first_group_is_named(parallel_calls):
    # The later group fails first, and yet the earlier one is what is told.
    function = Apart(parallel_calls, failing=(3, 9), pauses={3: 0.05})
    with pytest.raises(RewardError, match=r"^group 3$"):
        scored(function, added=GROUPS[::-1])


def test_after_a_failure_later_groups_are_not_tried():
    function = Apart(1, failing=(0,))
    with pytest.raises(RewardError, match=r"^group 0$"):
        scored(function)
    assert len(function.calls) == 1


@pytest.mark.parametrize("parallel_calls", [0, 1, 4])
def test_failed_groups_are_masked_and_three_in_a_row_end_it(parallel_calls):
    function = Apart(parallel_calls, failing=(0, 2), pauses={0: 0.02})
    found = scored(function, masks_failures=True)
    assert [i for i, result in enumerate(found) if result is None] == [0, 1, 4, 5]
    assert [result for result in found if result] == EXPECTED[2:4] + EXPECTED[6:]
    broken = Apart(parallel_calls, failing=(1, 4, 5, 6), pauses={4: 0.05})
    ledger = SampleLedger()
    found = scored(broken, masks_failures=True, ledger=ledger)
    given_up = [ledger.of(each.sample_id).is_abandoned for each in ROLLOUTS]
    assert given_up == [False] * 14 + [True] * 10
    # Whatever later groups did meanwhile, none of them counts.
    assert [result is not None for result in found[::2]] == [True, False, True, True] + [False] * 8


def test_what_a_given_up_group_was_found_to_be_is_not_noted():
    """A thread may have scored it before the groups in front of it had failed."""
    entry = SampleEntry(has_failed=True, is_abandoned=True)
    entry.reward_is(FUNCTION, UNDECIDED)
    assert entry.components == {}
    undecided = SampleEntry()
    undecided.reward_is(FUNCTION, UNDECIDED)
    assert (undecided.has_failed, undecided.components) == (True, {"undecided": 1.0})


def test_a_function_for_the_whole_batch_gets_one_call():
    function = Apart(4)
    function.whole_batch = True
    assert scored(function) == EXPECTED
    assert function.calls == [[r.response_text for r in ROLLOUTS]]
    assert function.threads == {threading.current_thread().name}


def test_a_failed_call_for_the_whole_batch_costs_the_failing_group_alone():
    class Whole(Apart):
        def score(self, prompts, *others):
            if {f"p{each}" for each in self.failing} & set(prompts):
                raise RewardError("one of them")
            return super().score(prompts, *others)

    failing = Whole(4, failing=(1,))
    failing.whole_batch = True
    found = scored(failing, masks_failures=True)
    kept = [
        None if r.group_id == GROUPS[1][0].group_id else e
        for r, e in zip(ROLLOUTS, EXPECTED, strict=True)
    ]
    assert found == kept
    failing.calls.clear()
    with pytest.raises(RewardError):
        scored(failing)


def test_a_scorer_that_is_given_up_begins_no_call_and_waits_for_none():
    go_on, begun = threading.Event(), threading.Event()

    class Waits(Apart):
        def score(self, *arguments):
            begun.set()
            go_on.wait(DEADLINE)
            return super().score(*arguments)

    function = Waits(1)
    with pytest.raises(KeyboardInterrupt), GroupScorer(function, columns=["k"]) as scorer:
        for members in GROUPS:
            scorer.add(members)
        assert begun.wait(DEADLINE)
        raise KeyboardInterrupt
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("reward-call"):
            thread.join(DEADLINE)
    assert len(function.calls) == 1


# The sampler, with functions of a file

SOURCE = """
import random, time
from pathlib import Path

def noisy(responses, pause=0.0):
    time.sleep(random.random() * 0.02)
    return [random.random() + len(text) for text in responses]

def tells(responses, *, folder):
    for text in responses:
        Path(folder, text.split(",")[0]).touch()
    return [float(len(text)) for text in responses]

def fails(responses):
    raise ValueError("no")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "r.py"
    path.write_text(SOURCE)
    return path


class Numbers:
    """Writes token ids as numbers."""

    pad_token_id = 0

    def decode(self, token_ids, *, skip_special_tokens):
        return ",".join(map(str, token_ids))


def sample(function, *, script=None, n=2, config=None, engine=None):
    """The table of six prompts with n samples each."""
    strategy = get_fake_strategy()
    strategy.inference_engine = engine or FakeEngine(
        EngineConfig("fake", "", max_model_len=64), script=script
    )
    config = config or TrainConfig()
    sampler = RolloutSampler(SourceParts(strategy.session, config, Numbers(), function))
    prompts = [Prompt(id=i, text=f"p{i}", token_ids=(5 + i, 9), label=None) for i in range(6)]
    return sampler.sample_all(prompts, SamplingParams(max_tokens=12, n=n, seed=3))[1]


class WholeEngine(FakeEngine):
    """Gives everything at once."""

    streams = False

    def stream_rows(self, rows, params):
        yield [row for part in super().stream_rows(rows, params) for row in part]


@pytest.mark.full
def test_rewards_are_bit_identical_however_they_are_spread(file):
    def rewards(num_workers, engine=None):
        config = TrainConfig(reward_workers=num_workers, reward_timeout_seconds=DEADLINE)
        with build_reward([f"{file}:noisy"], config=config) as reward:
            return sample(reward, engine=engine).rewards.tolist()

    alone = rewards(1, WholeEngine(EngineConfig("fake", "", max_model_len=64)))
    assert rewards(1) == alone
    assert rewards(3) == alone
    assert len(set(alone)) == 12  # the noise differs from call to call and from row to row
    with build_reward([f"{file}:noisy"], config=TrainConfig(seed=7)) as reward:
        assert sample(reward).rewards.tolist() != alone  # and with the run's seed


def test_groups_are_scored_while_others_are_generated(file, tmp_path):
    seen = []

    def script(request, sample_index):
        # The last prompt cannot be answered until the reward of the first one has run.
        if request.request_id == 5:
            ends = time.monotonic() + seconds(DEADLINE)
            while not (tmp_path / "70").exists() and time.monotonic() < ends:
                time.sleep(0.01)
            seen.append((tmp_path / "70").exists())
        return (70 + request.request_id, 1), (-1.0, -1.0)

    config = TrainConfig(reward_args={"folder": str(tmp_path)})
    with build_reward([f"{file}:tells"], config=config) as reward:
        assert isinstance(reward, CallStyle)
        assert sample(reward, script=script).rewards.tolist() == [4.0] * 12
    assert seen == [True, True]


def test_a_failed_reward_ends_the_step_after_the_generation(file):
    answered = []

    def script(request, sample_index):
        answered.append(request.request_id)
        return (3, 1), (-1.0, -1.0)

    with (
        build_reward([f"{file}:fails"]) as reward,
        pytest.raises(RewardError, match="ValueError: no"),
    ):
        sample(reward, script=script)
    # In an engine that several ranks share, none may leave before the others.
    assert len(answered) == 12
    config = TrainConfig(reward_failure="mask")
    with build_reward([f"{file}:fails"]) as reward:
        assert sample(reward, config=config).is_masked.all()


def test_no_function_gets_more_calls_at_once_than_it_takes():
    from lightrft.rewards.build import CombinedReward

    many, one = Apart(4, pauses=dict.fromkeys(range(12), 0.01)), Apart(1)
    both = CombinedReward([many, one], [1.0, 1.0])
    assert (both.parallel_calls, both.whole_batch) == (4, False)
    found = scored(both)
    assert [item.reward for item in found] == [2 * item.reward for item in EXPECTED]
    assert many.most > 1
    assert one.most == 1

    # One function that is of this process keeps the others there.
    assert CombinedReward([many, Apart(0)], [1.0, 1.0]).parallel_calls == 0


def test_two_callers_of_one_worker_wait_for_each_other(file):
    with build_reward([f"{file}:noisy"]) as reward, ThreadPoolExecutor(4) as threads:
        texts = [[f"{i}"] for i in range(8)]
        found = list(threads.map(lambda t: results_of(reward, t)[0].reward, texts))
        again = [results_of(reward, text)[0].reward for text in texts]
    assert found == again
