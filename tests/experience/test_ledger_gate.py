"""The ledger gate finds what was changed after the engine's adapter, and nothing else."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.engines.fake_engine import FakeEngine
from tests.models.planted_prefixes import SEEN
from tests.records.exchange_cases import ThreadWorld, ledger_of

from lightrft.datasets.types import Prompt
from lightrft.engines.ledger import Ledger, hash_context
from lightrft.engines.types import Completion, EngineConfig, GenerationRequest, SamplingParams
from lightrft.experience.ledger_gate import check_ledger
from lightrft.models import layout as layout_module
from lightrft.models.layout import LayoutPolicy
from lightrft.records.batch import collate
from lightrft.records.rollout import Rollout, TurnSegment
from lightrft.records.table import tabulate
from lightrft.rewards.types import RewardResult
from lightrft.rollout.ledger_records import LedgerError, deliver_evidence, take_evidence
from lightrft.rollout.scoring import score_rollouts

SPECIAL = frozenset(range(90, 97))
VOCAB = 90


class OneRank:
    def __init__(self, engine):
        self.inference_engine = self.engine = engine
        self.session = self.context = self
        self.engine_mp_group = None

    def gather_objects(self, item):
        return [item]

    def exchange_bytes(self, parts):
        return parts


def sampled_step(seed, num_rows=6, group_size=1):
    """Responses of 1 to 3 turns that an engine really sampled, and what the step knows of them."""
    rng = np.random.default_rng(seed)
    engine = FakeEngine(EngineConfig("fake", "", options={"eos_token_id": -1}))
    engine.set_weights_version(int(rng.integers(0, 5)))
    items = []
    with engine.ledger.recording():
        for sample_id in range(num_rows):
            if sample_id % group_size == 0:
                size = rng.integers(1, 6) * group_size
                prompt = tuple(rng.integers(0, VOCAB, size).tolist())
            items.append(sampled_rollout(rng, engine, sample_id, prompt))
    results = [
        None if rng.random() < 0.15 else RewardResult(float(rng.normal()), {"a": 1.0, "b": i / 7})
        for i in range(num_rows)
    ]
    return score_rollouts(items, results), OneRank(engine)


def sampled_rollout(rng, engine, sample_id, prompt):
    ids, logprobs, flags, segments, versions = [], [], [], [], []
    num_turns = int(rng.integers(1, 4))
    for turn in range(num_turns):
        request = GenerationRequest((*prompt, *ids), request_id=1000 * turn + sample_id)
        params = SamplingParams(max_tokens=int(rng.integers(1, 7)), seed=turn)
        (found,) = engine.generate([request], params)
        observation, spans = (), ()
        if turn + 1 < num_turns:
            text = tuple(rng.integers(0, VOCAB, rng.integers(0, 5)).tolist())
            observation = (90, *text, 91, 92)  # a header, what a tool said, a footer
            spans = ((1, 1 + len(text)),)
        ids += [*found.output_token_ids, *observation]
        logprobs += [*found.output_logprobs, *([0.0] * len(observation))]
        flags += [True] * len(found.output_token_ids) + [False] * len(observation)
        version = found.weights_version
        versions += [version] * len(found.output_token_ids) + [-1] * len(observation)
        segments.append(TurnSegment(request.request_id, 0, observation, spans))
    completion = Completion(
        sample_id,
        0,
        prompt,
        tuple(ids),
        tuple(logprobs),
        "temperature",
        found.finish_reason,
        version,
        tuple(flags),
    )
    row = Prompt(id=sample_id, text="", token_ids=prompt)
    return Rollout(row, completion, sample_id, sample_id, "", tuple(versions), tuple(segments))


def check(
    scored,
    strategy,
    *,
    evidence=None,
    is_packed=False,
    min_shared_tokens=None,
    change=lambda batch: batch,
    change_table=lambda table: table,
    temperature=1.0,
    masks_cut=False,
    gate_masks_cut=False,
):
    """The gate on the batch of some rollouts, as `make_experience` calls it."""
    if evidence is None:
        evidence = replace(evidence_of(scored, strategy), masks_truncated=gate_masks_cut)
    table = change_table(tabulate(scored))
    cpu = torch.device("cpu")
    version = strategy.engine.weights_version
    batch = collate(
        table, temperature=temperature, device=cpu, version=version, masks_truncated=masks_cut
    )
    batch = change(batch)
    half = len(scored) // 2
    check_ledger(
        batch,
        table,
        evidence,
        (table, None),
        policy=LayoutPolicy(is_packed, min_shared_tokens=min_shared_tokens),
        slices=[slice(0, half), slice(half, len(scored))],
        context=strategy,
    )


def evidence_of(scored, strategy, ledger=None):
    taken = take_evidence(
        [item.rollout for item in scored],
        strategy.session,
        ledger=ledger or ledger_of(scored),
        special_ids=SPECIAL,
    )
    return deliver_evidence(taken, [[item.rollout.sample_id for item in scored]], strategy)


@pytest.mark.full
@pytest.mark.parametrize("block", range(4))
def test_no_false_alarm_on_200_sound_batches(block):
    for seed in range(50 * block, 50 * (block + 1)):
        check(*sampled_step(seed), is_packed=bool(seed % 2))


def edit(scored, row, **changes):
    """The step with other values in one rollout, after its journal was written."""
    rollout = scored[row].rollout
    fields = {k: v for k, v in changes.items() if k in Rollout.__slots__}
    others = {k: v for k, v in changes.items() if k not in fields}
    changed = replace(rollout, completion=replace(rollout.completion, **others), **fields)
    return [*scored[:row], replace(scored[row], rollout=changed), *scored[row + 1 :]]


def retokenised_turn(scored, row):
    """Two ids of the last turn become one."""
    completion = scored[row].rollout.completion
    return edit(
        scored,
        row,
        output_token_ids=(*completion.output_token_ids[:-2], 7),
        output_logprobs=completion.output_logprobs[:-1],
        sampled=completion.sampled[:-1],
        token_versions=scored[row].rollout.token_versions[:-1],
    )


def other_ids_of_a_turn(scored, row):
    """As many ids, but others: a text can be encoded in several ways."""
    ids = list(scored[row].rollout.completion.output_token_ids)
    ids[0] = (ids[0] + 1) % VOCAB
    return edit(scored, row, output_token_ids=tuple(ids))


def mask_over_all(scored, row):
    sampled = scored[row].rollout.completion.sampled
    return edit(scored, row, sampled=(True,) * len(sampled))


def wrong_turns_version(scored, row):
    versions = list(scored[row].rollout.token_versions)
    end = versions.index(-1)
    return edit(scored, row, token_versions=tuple([v + 1 for v in versions[:end]] + versions[end:]))


def logprob_of_another_turn(scored, row):
    logprobs = list(scored[row].rollout.completion.output_logprobs)
    logprobs[-1] = float(np.nextafter(np.float32(logprobs[-1]), np.float32(0)))
    return edit(scored, row, output_logprobs=tuple(logprobs))


def first_row_of_turns(scored):
    return next(
        i
        for i, item in enumerate(scored)
        if len(item.rollout.segments) > 1
        and not item.is_masked
        and len(item.rollout.completion.output_token_ids) > 3
    )


@pytest.mark.parametrize(
    "fault, named",
    [
        (retokenised_turn, "token ids differ|tokens, expected"),
        (other_ids_of_a_turn, "turn 0, token .*: token ids differ"),
        (mask_over_all, "sampled mask differ"),
        (wrong_turns_version, "turn 0, token .*: weights versions differ"),
        (logprob_of_another_turn, r"rollout_logprobs \(bits\) differ"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("seed", range(5))
def test_faults_behind_the_adapter_are_found(fault, named, seed):
    scored, strategy = sampled_step(seed, num_rows=8)
    evidence = evidence_of(scored, strategy)
    row = first_row_of_turns(scored)
    with pytest.raises(LedgerError, match=named) as found:
        check(fault(scored, row), strategy, evidence=evidence)
    assert f"sample {row}" in str(found.value)


def test_special_tokens_in_the_text_of_an_observation_are_found():
    """Journal, engine and row agree on them: only the mark of what came from outside tells."""
    scored, strategy = sampled_step(3, num_rows=8)
    evidence = evidence_of(scored, strategy)
    row = first_row_of_turns(scored)
    account = evidence.accounts[row]
    segment = account.segments[0]
    widened = replace(segment, text_spans=((0, len(segment.observation)),))
    forged = replace(account, segments=(widened, *account.segments[1:]))
    evidence = replace(evidence, accounts={**evidence.accounts, row: forged})
    with pytest.raises(
        LedgerError, match=f"sample {row}, turn 0: the text of an observation holds"
    ):
        check(scored, strategy, evidence=evidence)


@pytest.mark.parametrize("is_packed", [False, True])
def test_positions_that_restart_wrongly_are_found(is_packed, monkeypatch):
    scored, strategy = sampled_step(4, num_rows=8)
    name = "packed" if is_packed else "padded"
    right = getattr(layout_module.TokenLayout, name)

    def going_on(cls, *args, **keywords):
        """As if two rows were one sequence."""
        layout = right(*args, **keywords)
        positions = layout.position_ids.clone()
        start = int(layout.is_real[0].sum()) if is_packed else 0
        row = 0 if is_packed else 1
        positions[row, start:] += 1
        return replace(layout, position_ids=positions)

    monkeypatch.setattr(layout_module.TokenLayout, name, classmethod(going_on))
    with pytest.raises(LedgerError, match="positions differ"):
        check(scored, strategy, is_packed=is_packed)


def test_bounds_and_scored_places_of_a_stream_are_checked(monkeypatch):
    scored, strategy = sampled_step(4, num_rows=8)
    evidence = evidence_of(scored, strategy)
    right = layout_module.stream_bounds
    with monkeypatch.context() as patch:
        patch.setattr(
            layout_module,
            "stream_bounds",
            lambda lengths, device, group: right([sum(lengths)], device, group),
        )
        with pytest.raises(LedgerError, match="does not end its sequences where rows end"):
            check(scored, strategy, evidence=evidence, is_packed=True)
    lay_out = LayoutPolicy.lay_out

    def shifted(self, *arguments, **named):
        layout = lay_out(self, *arguments, **named)
        return replace(layout, sources=layout.sources + 1)

    monkeypatch.setattr(LayoutPolicy, "lay_out", shifted)
    with pytest.raises(LedgerError, match="scores other tokens than were sampled"):
        check(scored, strategy, evidence=evidence)


@pytest.mark.parametrize("fault", SEEN)
def test_rows_that_share_prefixes_are_checked_along_their_paths(fault, monkeypatch):
    shared = {"is_packed": True, "min_shared_tokens": 1}
    for seed in range(6):
        scored, strategy = sampled_step(seed, num_rows=16, group_size=4)
        evidence = evidence_of(scored, strategy)
        check(scored, strategy, evidence=evidence, **shared)
        with monkeypatch.context() as patch:
            SEEN[fault](patch)
            with pytest.raises(LedgerError, match=r"positions differ|laid-out ids differ"):
                check(scored, strategy, evidence=evidence, **shared)


@pytest.mark.parametrize("name", ["token_ids", "response_mask", "rollout_logprobs", "sample_ids"])
def test_any_single_change_of_a_batch_is_found(name):
    rng = np.random.default_rng(1)
    for seed in range(12):
        scored, strategy = sampled_step(seed)

        def change(batch):
            tensor = getattr(batch, name).clone()
            places = batch.attention_mask.nonzero()
            row, column = places[int(rng.integers(len(places)))].tolist()
            if name == "sample_ids":
                tensor[row] += 1
            elif tensor.dtype == torch.bool:
                tensor[row, column] ^= True
            else:
                tensor[row, column] += 1
            return replace(batch, **{name: tensor})

        with pytest.raises(LedgerError):
            check(scored, strategy, change=change)


def test_cut_responses_are_trained_exactly_where_they_may_be():
    for seed in range(4):
        scored, strategy = sampled_step(seed)
        ends = {item.rollout.completion.finish_reason for item in scored if not item.is_masked}
        assert "length" in ends
        check(scored, strategy, masks_cut=True, gate_masks_cut=True)
        for masks_cut in (True, False):
            with pytest.raises(LedgerError, match="sampled mask differ"):
                check(*sampled_step(seed), masks_cut=masks_cut, gate_masks_cut=not masks_cut)


def test_a_context_the_engine_never_saw_is_found():
    """An observation that differs from what the engine was given before the next turn."""
    scored, strategy = sampled_step(6, num_rows=8)
    row = first_row_of_turns(scored)
    first, *rest = scored[row].rollout.segments
    cut = replace(first, observation=first.observation[:-1], text_spans=())
    told = edit(scored, row, segments=(cut, *rest))
    evidence = evidence_of(told, strategy)
    with pytest.raises(LedgerError, match=f"sample {row}, turn 1: no engine sampled request"):
        check(told, strategy, evidence=evidence)


def evidence_of_two_ranks(*entries):
    """What both ranks of one engine make of the entries that each has written down."""

    def one_rank(context):
        context.engine_mp_group = "ranks of one engine"
        own = SimpleNamespace(take=lambda: entries[context.rank])
        engine = SimpleNamespace(weights_version=0, ledger=own)
        return take_evidence([], SimpleNamespace(engine=engine, context=context))

    return ThreadWorld(2).run(one_rank)


@pytest.mark.parametrize(
    "change, difference",
    [
        (
            lambda entry: {"token_ids": tuple(i + 1 for i in entry.token_ids)},
            "different tokens: the ranks",
        ),
        (
            lambda entry: {"logprobs": tuple(x - 1 for x in entry.logprobs)},
            "equal tokens and other log-probabilities or weights",
        ),
    ],
    ids=["tokens", "logprobs"],
)
def test_two_answers_to_one_request_are_named_by_what_differs_in_them(change, difference):
    _, strategy = sampled_step(2)
    entries = strategy.inference_engine.ledger.take()
    assert [len(each.entries) for each in evidence_of_two_ranks(entries, entries)] == [
        len(entries)
    ] * 2
    other = replace(entries[0], **change(entries[0]))
    for answers in ((entries, [other, *entries[1:]]), ([*entries, other], entries)):
        with pytest.raises(LedgerError, match=f"twice in one context, with {difference}"):
            evidence_of_two_ranks(*answers)


def test_every_rank_raises_what_one_rank_found():
    scored, strategy = sampled_step(2)
    evidence = evidence_of(scored, strategy)
    strategy.gather_objects = lambda own: [own, ("sample 40, turn 2, token 7: ids differ", False)]
    with pytest.raises(LedgerError, match="ledger gate: sample 40, turn 2, token 7"):
        check(scored, strategy, evidence=evidence)


def test_the_ledger_holds_nothing_unless_asked():
    engine = FakeEngine()
    engine.set_weights_version(0)
    request = GenerationRequest((1, 2, 3), request_id=4)
    engine.generate([request], SamplingParams(max_tokens=3, n=2))
    assert engine.ledger.take() == []
    with engine.ledger.recording():
        completions = engine.generate([request], SamplingParams(max_tokens=3, n=2))
    engine.generate([request], SamplingParams(max_tokens=3))
    entries = engine.ledger.take()
    assert [e.token_ids for e in entries] == [c.output_token_ids for c in completions]
    assert [e.logprobs for e in entries] == [c.output_logprobs for c in completions]
    assert [e.key for e in entries] == [(4, i, hash_context((1, 2, 3))) for i in range(2)]
    assert hash_context((1, 2, 3)) != hash_context((1, 2, 4))
    assert engine.ledger.take() == []
    with pytest.raises(ZeroDivisionError), engine.ledger.recording():
        raise ZeroDivisionError
    engine.generate([request], SamplingParams(max_tokens=3))
    assert engine.ledger.take() == []
    assert isinstance(engine.ledger, Ledger)
