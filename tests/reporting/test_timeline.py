"""When each rank did what: its file."""

import json
from itertools import pairwise

import pytest

from lightrft.reporting.loggers import is_kept, rank_timeline
from lightrft.strategy.distributed.deadlines import StepTimer


def test_a_run_writes_when_its_stages_began_and_ended_as_trace_events(tmp_path):
    with rank_timeline(tmp_path, 3):
        for step in (1, 2):
            timer = StepTimer(step)
            with timer.stage("rollout"):
                pass
            with timer.stage("train"):
                pass
            with pytest.raises(RuntimeError), timer.stage("weight_sync"):
                raise RuntimeError
        with StepTimer().stage("rollout"):
            pass  # of an evaluation
    with StepTimer(4).stage("train"):
        pass  # of nobody's run
    lines = (tmp_path / "logs" / "timeline_3.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    stages = [(1, "rollout"), (1, "train"), (2, "rollout"), (2, "train")]
    assert [(event["args"]["step"], event["name"]) for event in events] == stages
    assert {(event["ph"], event["pid"], event["tid"]) for event in events} == {("X", 3, 0)}
    times = [time for event in events for time in (event["ts"], event["ts"] + event["dur"])]
    assert all(later - earlier > -2 for earlier, later in pairwise(times))


def test_a_file_stays_small_however_long_the_run():
    kept = [step for step in range(1, 100_001) if is_kept(step)]
    assert kept[:99] == list(range(1, 100))
    assert len(kept) == 99 + 3 * 90 + 1


def test_a_full_disk_does_not_end_a_run(tmp_path):
    (tmp_path / "logs").write_text("a file where the folder has to be")
    with rank_timeline(tmp_path, 0), StepTimer(1).stage("train"):
        pass
