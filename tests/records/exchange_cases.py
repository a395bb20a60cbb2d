"""Several ranks as threads of one process, and the exchange in which every rank gets everything."""

import pickle
import threading
from dataclasses import fields, replace

import numpy as np
from tests.machine import seconds

from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import LedgerEntry, hash_context
from lightrft.engines.sampling import pack_ids
from lightrft.engines.types import KEPT_IDS, ROUTES, Completion
from lightrft.records.columns import COLUMNS
from lightrft.records.rollout import Rollout, ScoredRollout, TurnSegment
from lightrft.records.sample_ledger import FUNCTION, SampleLedger
from lightrft.records.table import SampleTable
from lightrft.rewards.types import RewardResult


class ThreadWorld:
    """Ranks that run at the same time; counts the bytes that each gets from others."""

    def __init__(self, size):
        self.size = size
        self.received = [0] * size
        self.said = []
        self._barrier = threading.Barrier(size, timeout=seconds(30))
        self._posted = [None] * size

    def run(self, function):
        """`function(rank)` on every rank; their results by rank."""
        found, problems = [None] * self.size, []

        def call(number):
            try:
                found[number] = function(ThreadRank(self, number))
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                problems.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=call, args=(i,)) for i in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if problems:
            raise next((p for p in problems if "Broken" not in type(p).__name__), problems[0])
        return found

    def swap(self, rank, item):
        """What all ranks posted."""
        self._posted[rank] = item
        self._barrier.wait()
        posted = list(self._posted)
        self._barrier.wait()
        return posted


class ThreadRank:
    inference_engine = None
    engine_mp_group = None

    def __init__(self, world, rank):
        self.world, self.rank, self.world_size = world, rank, world.size

    def get_rank(self):
        return self.rank

    def print(self, text):
        self.world.said.append(text)

    def _count(self, found):
        others = (data for sender, data in enumerate(found) if sender != self.rank)
        self.world.received[self.rank] += sum(map(len, others))
        return found

    def gather_bytes(self, data):
        return self._count(self.world.swap(self.rank, data))

    def gather_objects(self, item, group=None):
        return [pickle.loads(data) for data in self.gather_bytes(pickle.dumps(item))]

    def exchange_bytes(self, parts):
        assert len(parts) == self.world_size
        return self._count([sent[self.rank] for sent in self.world.swap(self.rank, parts)])


def gathered(table, own, wanted, context):
    """The reference: every rank gets the tokens of all samples, and takes its own rows."""
    tables = context.gather_objects(own)
    names = table.component_names
    named = ("component_names", "components", "holders", "facts")
    columns = [item.name for item in fields(SampleTable) if item.name not in named]
    facts = [name for name in own.facts if COLUMNS[name].travels != "stays"]
    whole = SampleTable(
        **{name: np.concatenate([getattr(t, name) for t in tables]) for name in columns},
        holders=np.concatenate([np.full(len(t), rank) for rank, t in enumerate(tables)]),
        component_names=names,
        components=np.concatenate([_under(names, t) for t in tables]),
        facts={name: np.concatenate([t.facts[name] for t in tables]) for name in facts},
    )
    order = np.argsort(whole.sample_ids, kind="stable")
    kept = order[np.isin(whole.sample_ids[order], table.sample_ids)]
    # Groups that only fill the batch are masked after the exchange.
    whole = replace(whole.take(kept), is_masked=table.is_masked)
    return whole.take(wanted[context.rank])


def _under(names, table):
    values = np.full((len(table), len(names)), np.nan)
    for column, name in enumerate(table.component_names):
        values[:, names.index(name)] = table.components[:, column]
    return values


def ledger_of(scored):
    """What prompts and scorer write down of sound samples."""
    ledger = SampleLedger()
    for item in scored:
        rollout, entry = item.rollout, ledger.of(item.rollout.sample_id)
        entry.group_id, entry.prompt = rollout.group_id, rollout.prompt
        entry.has_failed = item.is_masked
        entry.reward_is(FUNCTION, RewardResult(item.reward, item.components), rollout.token_ids)
    return ledger


def ragged_sample(rng, sample_id, *, kind, group_size=4):
    """A sample of one call, of several turns with observations, or of several versions."""
    prompt = tuple(rng.integers(0, 60_000, rng.integers(1, 9)).tolist())
    length = int(rng.integers(0, 30))
    sampled = [True] * length
    if kind == "turns":
        sampled = (rng.random(length) < 0.6).tolist()
    versions = None if kind == "plain" else [7] * length
    if kind == "versions" and rng.random() < 0.5:
        versions = sorted(rng.integers(4, 8, length).tolist())
    if versions is not None:
        versions = tuple(v if s else -1 for v, s in zip(versions, sampled, strict=True))
    completion = Completion(
        sample_id // group_size,
        sample_id % group_size,
        prompt,
        tuple(rng.integers(0, 60_000, length).tolist()),
        tuple((-rng.random(length) * sampled).tolist()),
        "temperature",
        "length" if rng.random() < 0.2 else "stop",
        max([7, *(versions or ())]),
        tuple(sampled),
    )
    rollout = Rollout(
        Prompt(id=0, text="", token_ids=prompt),
        completion,
        sample_id // group_size,
        sample_id,
        "",
        versions,
    )
    components = {"a": float(rng.normal())} | ({"b": 1.0} if rng.random() < 0.3 else {})
    return ScoredRollout(rollout, float(rng.normal()), components, bool(rng.random() < 0.1))


def long_sample(rng, sample_id, *, prompt, response, turns, recorded=()):
    """A sample of equal turns with 10 observed tokens between them, and its ledger entries.

    If they are recorded, each token has 20 kept ids, and each position 384 bytes of experts.
    """
    ids = rng.integers(0, 60_000, prompt).tolist()
    sampled, logprobs, segments, entries = [], [], [], []
    columns = {name: [] for name in recorded}
    each = (response - 10 * (turns - 1)) // turns
    for turn in range(turns):
        is_last = turn == turns - 1
        count = response - len(sampled) if is_last else each
        new = rng.integers(0, 60_000, count).tolist()
        values = (-rng.random(count)).astype(np.float32).tolist()
        experts = [rng.bytes(384 * len(ids)).hex(), *(rng.bytes(384).hex() for _ in new[1:])]
        kept = [pack_ids(range(token, token + 20)) for token in new]
        facts = {name: {KEPT_IDS: kept, ROUTES: experts}[name] for name in recorded}
        entries.append(
            LedgerEntry(sample_id, 0, hash_context(ids), tuple(new), tuple(values), 3, facts)
        )
        observed = [] if is_last else rng.integers(0, 60_000, 10).tolist()
        segments.append(TurnSegment(sample_id, 0, tuple(observed)))
        ids += [*new, *observed]
        sampled += [True] * count + [False] * len(observed)
        logprobs += [*values, *([0.0] * len(observed))]
        for name, each_token in facts.items():
            columns[name] += [*each_token, *([""] * len(observed))]
    start = tuple(ids[:prompt])
    completion = Completion(
        sample_id,
        0,
        start,
        tuple(ids[prompt:]),
        tuple(logprobs),
        "temperature",
        "stop",
        3,
        tuple(sampled),
        facts={name: tuple(values) for name, values in columns.items()},
    )
    rollout = Rollout(
        Prompt(id=0, text="", token_ids=start),
        completion,
        sample_id // 4,
        sample_id,
        "",
        segments=tuple(segments),
    )
    return ScoredRollout(rollout, float(rng.normal()), {"score": 1.0}), entries
