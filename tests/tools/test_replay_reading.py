"""A replay is of all ranks' journals, sampled as the options say, or of none."""

import json

import pytest
from tests.rollout.journal_edits import lines_of

from lightrft.cli.errors import ExitCode, exit_code_of
from lightrft.config import TrainConfig
from lightrft.rollout.environments.journal import remove_further_ranks
from lightrft.rollout.environments.journal_reading import FORMAT
from lightrft.tools.replay.run_replay import read_step
from lightrft.tools.report.run_data import NotARunError

PARAMS = [42, 1.0, 1.0, -1]


def write(run, *, step=1, batch=0, rank=0, world_size=2, sampling=PARAMS, name=None):
    part = f".batch-{batch}" if batch else ""
    path = run / "journal" / (name or f"step-{step:06d}{part}.rank-{rank}.jsonl")
    path.parent.mkdir(exist_ok=True)
    header = {"step": step, "batch": batch, "rank": rank, "world_size": world_size}
    header |= {"sampling": sampling, "weights": 3}
    header["environment"] = {"schemas": [], "answers_turns": False}
    path.write_text(lines_of([{"event": "begin", "format": FORMAT, **header}]))
    return path


def refusal(run, step=None):
    with pytest.raises(NotARunError) as caught:
        read_step(run, step, TrainConfig(seed=42))
    assert exit_code_of(caught.value) == ExitCode.USAGE
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_journals_of_all_ranks_and_batches_are_read(tmp_path):
    for rank in range(2):
        for batch in range(2):
            write(tmp_path, rank=rank, batch=batch)
    write(tmp_path, step=3, name="step-xxx.rank-0.jsonl")
    write(tmp_path, step=3, name="step-²²²²²².rank-0.jsonl")
    step, found = read_step(tmp_path, None, TrainConfig(seed=42))
    assert (step, len(found)) == (1, 4)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_missing_rank_is_named(tmp_path, lost):
    write(tmp_path, rank=1 - lost)
    assert f"without rank {lost}" in refusal(tmp_path)


def test_journals_of_a_try_with_more_ranks_are_removed(tmp_path):
    folder = tmp_path / "journal"
    for rank in range(4):
        write(tmp_path, rank=rank)
        write(tmp_path, rank=rank, step=2, world_size=4)
        write(tmp_path, rank=rank, batch=1, world_size=4)
    remove_further_ranks(folder, 1, 0, 2)
    remove_further_ranks(folder, 1, 1, 4)
    left = [path.name for path in folder.glob("step-000001.rank-*")]
    assert sorted(left) == ["step-000001.rank-0.jsonl", "step-000001.rank-1.jsonl"]
    assert len(list(folder.iterdir())) == 2 + 4 + 4


def test_a_missing_batch_is_named(tmp_path):
    for batch in (0, 2):
        write(tmp_path, batch=batch, world_size=1)
    assert "step-000001.batch-1.rank-0.jsonl is missing" in refusal(tmp_path)


def test_batches_that_a_killed_try_has_left_are_not_read(tmp_path):
    for batch in range(4):
        write(tmp_path, batch=batch, world_size=1, sampling=PARAMS if batch < 2 else [7, 1, 1, -1])
    counts = [(2, 4), (1, 3), (1, 2)]  # the last line of a step is that of its last try
    lines = [{"step": step, "dynamic/num_gen_batches": count} for step, count in counts]
    assert "was sampled with seed" in refusal(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, found = read_step(tmp_path, 1, TrainConfig(seed=42))
    assert sorted(each.header["batch"] for each in found) == [0, 1]


def test_a_journal_of_other_sampling_or_place_is_refused(tmp_path):
    path = write(tmp_path, world_size=1, sampling=[42, 0.5, 1.0, -1])
    assert "temperature" in refusal(tmp_path)
    write(tmp_path, world_size=1, sampling=[*PARAMS, 0.1])
    assert "min_p [42, 1.0, 1.0, -1, 0.1]" in refusal(tmp_path)
    write(tmp_path, world_size=1, rank=1, name=path.name)
    assert "that of rank 1" in refusal(tmp_path)


def test_an_empty_journal_is_one_line(tmp_path):
    write(tmp_path, world_size=1).write_text("")
    assert "step-000001.rank-0.jsonl" in refusal(tmp_path)
