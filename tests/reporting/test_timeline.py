"""When each rank did what: its file, and the steps that the report draws."""

import json
from itertools import pairwise

import pytest

from lightrft.reporting.loggers import is_kept, rank_timeline
from lightrft.strategy.distributed.deadlines import StepTimer
from lightrft.tools.report.timeline import MAX_STEPS, read_timelines, step_timelines


def write(folder, rank, spans):
    path = folder / "logs" / f"timeline_{rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    names = ("step", "stage", "start", "end")
    path.write_text("".join(json.dumps(dict(zip(names, s, strict=True))) + "\n" for s in spans))
    return path


def test_a_run_writes_when_its_stages_began_and_ended(tmp_path):
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
    spans = read_timelines(tmp_path)[3]
    stages = [(1, "rollout"), (1, "train"), (2, "rollout"), (2, "train")]
    assert [(span.step, span.stage) for span in spans] == stages
    times = [time for span in spans for time in (span.start, span.end)]
    assert times == sorted(times)


def test_a_file_stays_small_however_long_the_run():
    kept = [step for step in range(1, 100_001) if is_kept(step)]
    assert kept[:99] == list(range(1, 100))
    assert len(kept) == 99 + 3 * 90 + 1


def test_a_full_disk_does_not_end_a_run(tmp_path):
    (tmp_path / "logs").write_text("a file where the folder has to be")
    with rank_timeline(tmp_path, 0), StepTimer(1).stage("train"):
        pass
    assert read_timelines(tmp_path) == {}


@pytest.mark.parametrize("again", [2, 3])
def test_steps_that_were_done_again_count_as_they_were_done_last(tmp_path, again):
    for steps in ((1, 2, 3), (again, 4)):
        with rank_timeline(tmp_path, 0):
            for step in steps:
                for _ in range(2):  # of one step
                    with StepTimer(step).stage("train"):
                        pass
    path = tmp_path / "logs" / "timeline_0.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "stage": "tr')
    spans = read_timelines(tmp_path)[0]
    kept = [*range(1, again), again, 4]
    assert [span.step for span in spans] == sorted(2 * kept)
    assert len(step_timelines(tmp_path)) == len(kept)


def test_ranks_that_a_continued_run_no_longer_has_say_nothing_of_its_steps(tmp_path):
    write(tmp_path, 0, [(6, "train", 100, 102)])
    write(tmp_path, 1, [(6, "train", 10, 12)])
    (found,) = step_timelines(tmp_path)
    assert (found.seconds, found.bars[1], found.busy[1]) == (2, [], 0)


def test_a_step_lasts_from_the_first_to_the_last_stage_of_the_ranks_that_train(tmp_path):
    write(tmp_path, 0, [(5, "wait", 10, 12), (5, "train", 12, 18), (5, "weight_sync", 18, 20)])
    write(tmp_path, 1, [(5, "train", 13, 19), (5, "wait", 14, 15)])
    # Samples step 6 meanwhile, from before step 5 until after it.
    write(tmp_path, 2, [(6, "rollout", 5, 15), (6, "reward", 16, 30), (7, "rollout", 30, 40)])
    (found,) = step_timelines(tmp_path)
    assert (found.step, found.seconds) == (5, 10)
    assert found.busy == {0: 0.8, 1: 0.5, 2: 0.9}
    generating = [(bar.stage, bar.left, bar.width) for bar in found.bars[2]]
    assert generating == [("rollout", 0, 50), ("reward", 60, 40)]


def test_of_many_steps_the_slowest_and_some_at_equal_distances_are_drawn(tmp_path):
    lasts = {17: 5.0}
    spans = [(step, "train", 10 * step, 10 * step + lasts.get(step, 1)) for step in range(1, 90)]
    write(tmp_path, 0, spans)
    steps = [each.step for each in step_timelines(tmp_path)]
    assert len(steps) == len(set(steps)) <= MAX_STEPS
    assert {1, 17, 89} <= set(steps)
    distances = [b - a for a, b in pairwise(steps) if 17 not in (a, b)]
    assert max(distances) - min(distances) <= 1


def test_a_run_without_times_has_no_timeline(tmp_path):
    assert step_timelines(tmp_path) == []
    write(tmp_path, 0, [(1, "rollout", 0, 1)])
    assert step_timelines(tmp_path) == []
