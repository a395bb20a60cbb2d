"""Whatever is done to a journal, the step goes on: up to the damage it is followed, then sampled.

A damage is told by one line. Contents that nobody wrote are damage also where the checksums fit.
"""

import json
import random
import time

import pytest
from tests.machine import seconds
from tests.rollout.journal_edits import events_of, lines_of
from tests.rollout.test_journal import FILE, Played

from lightrft.rollout.environments.journal_reading import JournalError, read_journal

DEEP = "[" * 100_000 + "]" * 100_000
PLACE = '"the place of it"'


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Played(tmp_path_factory.mktemp("whole") / "run")


def followed(folder, data):
    """The step of a folder with such a journal, and how long it took; None is a folder."""
    path = folder / "journal" / FILE
    path.parent.mkdir(parents=True)
    if data is None:
        (path / "of somebody").mkdir(parents=True)
    else:
        path.write_bytes(data)
    start = time.monotonic()
    return Played(folder), time.monotonic() - start


def damages(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "is damaged" in line]


def lines_as(change):
    """The bytes of a journal after a change of its lines."""

    def damaged(text):
        lines = text.encode().splitlines(keepends=True)
        change(lines)
        return b"".join(lines)

    return damaged


def changed(kind, **values):
    """A journal, with checksums that fit, in which an event of a kind has other values."""

    def damaged(text):
        events = events_of(text)
        event = [each for each in events if each["event"] == kind][-1]
        event |= {n: v(event.get(n)) if callable(v) else v for n, v in values.items()}
        return lines_of(events).encode()

    return damaged


def deep(kind, name):
    def damaged(text):
        events = events_of(text)
        place = max(i for i, each in enumerate(events) if each["event"] == kind)
        found = json.dumps(events[place] | {name: json.loads(PLACE)})
        return lines_of(
            [*events[:place], found.replace(PLACE, DEEP), *events[place + 1 :]]
        ).encode()

    return damaged


def of_place(place, change):
    return lambda values: [*values[:place], change, *values[place + 1 :]]


DAMAGES = {
    "a bit of a logprob": lambda text: text.replace("-0.25", "-0.35", 3).encode(),
    "a lost line": lines_as(lambda lines: lines.pop(8)),
    "a torn line inside": lines_as(lambda lines: lines.__setitem__(8, lines[8][:30])),
    "bytes that are no text": lines_as(lambda lines: lines.insert(8, bytes(range(256)) + b"\n")),
    "other ends of lines": lambda text: text.replace("\n", "\r\n").encode(),
    "no beginning": lines_as(lambda lines: lines.pop(0)),
    "another file": lambda text: b'{"a": 1}\n',
    "nothing": lambda text: b"",
    "a folder": lambda text: None,
    "two beginnings": lambda text: lines_of([*events_of(text)[:1], *events_of(text)]).encode(),
    "a list": lambda text: lines_of(["[1, 2}"]).encode(),
    "deep JSON": deep("answer", "call"),
    "deep JSON nobody reads": deep("turn", "more"),
    "texts for tokens": changed("turn", token_ids=lambda ids: list(map(str, ids))),
    "a negative token": changed("turn", token_ids=of_place(0, -1)),
    "a token beyond 31 bits": changed("turn", token_ids=of_place(0, 2**31)),
    "true for a token": changed("turn", token_ids=of_place(0, True)),
    "no tokens": changed("turn", token_ids=[], logprobs=[]),
    "a logprob that is no number": changed("turn", logprobs=of_place(0, float("nan"))),
    "an infinite logprob": changed("turn", logprobs=of_place(0, -float("inf"))),
    "fewer logprobs than tokens": changed("turn", logprobs=lambda values: values[1:]),
    "another reason of an end": changed("turn", finish_reason="tired"),
    "a mode nobody knows": changed("turn", logprobs_mode=3),
    "facts of other lengths": changed("turn", facts={"entropy": [1.0]}),
    "a number for a hash": changed("turn", context_hash=3),
    "a turn of no sample": changed("turn", sample_id=None),
    "an event nobody knows": changed("end", event="ending"),
    "an answer without a call": changed("answer", call=None),
    "an answer in a list": changed("answer", call=lambda call: {**call, "text": [call["text"]]}),
    "an answer with more": changed("answer", call=lambda call: {**call, "more": 1}),
    "a round of others": changed("round", sample_ids=[77]),
    "another format": changed("begin", format=1),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_journal_is_followed_to_its_damage(whole, tmp_path, capsys, name):
    data = DAMAGES[name](whole.lines)
    again, took = followed(tmp_path / "run", data)
    (told,) = damages(capsys)
    assert told.endswith(": what follows is sampled again")
    assert again.ids == whole.ids
    assert [r.reward for r in again.rewards] == [r.reward for r in whole.rewards]
    assert took < seconds(60)
    third = Played(tmp_path / "third", lines=again.lines)
    assert third.num_requests == 0
    assert damages(capsys) == []
    if data is not None:
        path = tmp_path / "read.jsonl"
        path.write_bytes(data)
        with pytest.raises(JournalError, match=r"read.jsonl is damaged from line \d+ on \(.+\)$"):
            read_journal(path)


def test_tokens_beyond_the_vocabulary_are_damage(whole, tmp_path, capsys, monkeypatch):
    largest = max(max(e.get("token_ids", [0])) for e in events_of(whole.lines))
    engine = type(whole.stage.engine)
    monkeypatch.setattr(engine, "vocab_size", property(lambda self: largest + 1))
    assert Played(tmp_path / "right", lines=whole.lines).num_requests == 0
    data = changed("turn", token_ids=of_place(0, largest + 1))(whole.lines)
    again, _ = followed(tmp_path / "run", data)
    (told,) = damages(capsys)
    assert f"(token {largest + 1} is none of {largest + 1})" in told
    assert again.ids == whole.ids


def test_a_last_line_that_was_not_written_to_its_end_is_no_damage(whole, tmp_path, capsys):
    again, _ = followed(tmp_path / "run", whole.lines.encode()[:-40])
    assert again.num_requests == 0
    assert again.ids == whole.ids
    assert damages(capsys) == []


def test_a_damage_keeps_what_stands_before_it(whole, tmp_path):
    lines = whole.lines.encode().splitlines(keepends=True)
    rounds = [i for i, line in enumerate(lines) if b'"event": "round"' in line]
    again, _ = followed(tmp_path / "run", b"".join([*lines[: rounds[1] + 1], b"noise\n"]))
    kept = sum(line.count(b'"event": "turn"') for line in lines[: rounds[1]])
    assert again.num_requests == whole.num_requests - kept


HOSTILE = (
    *(None, True, False, -1, 0, 2**31, 2**63, 10**400, 0.5, float("nan"), float("inf")),
    *("", "x", "\0", "9" * 5000, [], [[]], [None], {}, {"a": []}, [-1], ["1"]),
)


def places(value, path=()):
    """Paths to all values in it."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from places(inner, (*path, key))


def with_another_value(text, dice):
    """A journal with checksums that fit, in which one value is another or gone."""
    events = events_of(text)
    event = dice.choice(events)
    *path, last = dice.choice([path for path in places(event) if path])
    for key in path:
        event = event[key]
    if dice.random() < 0.2:
        del event[last]
    else:
        event[last] = dice.choice(HOSTILE)
    return lines_of(events).encode()


@pytest.mark.timeout(3600)
@pytest.mark.shard("fuzz")
@pytest.mark.parametrize("count", [40, pytest.param(3000, marks=pytest.mark.slow)])
def test_no_journal_ends_a_run(whole, tmp_path, capsys, count):
    reads = {first["event"] for first in events_of(whole.lines)}
    assert reads == {"begin", "reset", "turn", "round", "answer", "observation", "end"}
    num_told = 0
    for number in range(count):
        dice = random.Random(number)
        again, took = followed(tmp_path / str(number), with_another_value(whole.lines, dice))
        told = damages(capsys)
        assert len(told) <= 1, number
        num_told += len(told)
        assert took < seconds(60), number
        # Numbers that an engine could have sampled nobody can tell from those it did.
        if told:
            assert again.ids == whole.ids, number
    assert num_told > count / 2
