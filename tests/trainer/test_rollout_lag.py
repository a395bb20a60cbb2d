"""Steps that train on rows of older weights: the sequential form, `--rollout_lag`."""

import json
import shutil
from dataclasses import replace
from datetime import date

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.numpy import load_file, save_file
from tests.runs import TextReward, rollout_options, tiny_models, words

from lightrft.cli.main import main
from lightrft.config import TrainConfig
from lightrft.rewards.types import RewardResult
from lightrft.rollout.ledger_records import LedgerError
from lightrft.rollout.version_checks import check_fresh_row
from lightrft.stages.policy.maker import PolicyMemory
from lightrft.strategy.config import ConfigError
from lightrft.tools.audit.findings import DIFFERS
from lightrft.tools.audit.record import FACTS, SAMPLES, seal, step_folder
from lightrft.tools.audit.report import audit_step


def test_a_planned_run_samples_no_step_beyond_its_end(build_world):
    world = build_world(rollout_lag=3, num_prompts=16, max_steps=4)
    result = world.trainer.fit()
    assert result.num_steps == 4
    assert world.trainer.stage.memory.in_flight.held == ()
    assert world.trainer.stage.memory.in_flight.num_requests == 16


CASES = {
    "plain": {},
    "dynamic": {"dynamic_sampling": True},
    "greedy": {"advantage_estimator": "remax"},
    "fire": {"use_fire": True},
    "masked": {"reward_failure": "mask", "reward_running_norm": True},
    "shaped": {"overlong_buffer": True, "overlong_buffer_len": 3},
}


def undecided(text):
    """Score by the letters; nothing is said of some responses."""
    total = sum(map(ord, text))
    return RewardResult(total % 3, {"accuracy": total % 2}) if total % 5 else None


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_exactly_with_the_rows_that_were_in_flight(
    build_world, goes_on_exactly, case
):
    reward = TextReward(undecided) if case == "masked" else None
    options = {"rollout_lag": 2, "num_prompts": 16, "reward": reward, **CASES[case]}
    goes_on_exactly(lambda **more: build_world(**options, **more))


def test_rows_in_flight_are_shared_out_anew_over_another_number_of_ranks(build_world):
    world = build_world(rollout_lag=1, num_prompts=16)
    world.step()
    memory = world.trainer.stage.memory
    saved = memory.to_client_state()
    first, second = (
        PolicyMemory.initial(world.trainer.config, rank, 2).restored(saved) for rank in range(2)
    )
    (all_rows,) = memory.in_flight.held
    (mine,), (none,) = first.in_flight.held, second.in_flight.held
    assert mine.scored == all_rows.scored
    assert none.scored == []
    assert none.table.sample_ids.tolist() == all_rows.table.sample_ids.tolist()
    with pytest.raises(ValueError, match="rows in flight cannot be read"):
        memory.restored({**saved, "carry": [np.zeros(3, np.uint8)]})


FAULTS = ("version", "logprobs", "reward")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_what_was_kept_is_found_before_it_is_trained(build_world, fault):
    """Each by the ledger gate, which is on by default."""
    world = build_world(rollout_lag=1, num_prompts=16)
    world.step()
    stage = world.trainer.stage
    flight = stage.memory.in_flight
    (held,) = flight.held
    scored = list(held.scored)
    item = scored[3]
    completion = item.rollout.completion
    table = held.table
    if fault == "version":
        later = replace(completion, weights_version=completion.weights_version + 1)
        scored[3] = replace(item, rollout=replace(item.rollout, completion=later))
        versions = table.weights_versions.copy()
        versions[3] += 1
        table = replace(table, weights_versions=versions)
    elif fault == "logprobs":  # those of the weights at the begin of the step that trains
        moved = tuple(value - 0.01 for value in completion.output_logprobs)
        changed = replace(completion, output_logprobs=moved)
        scored[3] = replace(item, rollout=replace(item.rollout, completion=changed))
    else:
        table = replace(table, rewards=np.roll(table.rewards, 1))
    bad = replace(held, scored=scored, table=table)
    stage.memory = replace(stage.memory, in_flight=replace(flight, held=(bad,)))
    with pytest.raises((LedgerError, ValueError)):
        world.step()


def test_a_row_is_scored_by_an_engine_that_had_nothing_to_sample(build_world):
    """As in a run that goes on where the journal has all episodes of a step."""
    world = build_world(rollout_lag=1, num_prompts=16)
    world.trainer.make_experience()
    (kept,) = world.trainer.pending[1].in_flight.held
    session = world.strategy.session
    session.sleep(level=1)
    check_fresh_row(kept, world.trainer.stage.maker.sampler._parts)
    assert session.status.name == "WAKEUP"


def test_without_a_correction_it_must_be_said(build_world, capsys):
    assert TrainConfig(rollout_lag=1).correction == "tis"
    assert TrainConfig(rollout_lag=1, off_policy_correction="none").correction is None
    assert TrainConfig(rollout_lag=1, off_policy_correction="icepop").correction == "icepop"
    assert TrainConfig(rollout_lag=1, use_rollout_logprobs=True).correction is None
    assert TrainConfig().correction is None
    with pytest.raises(ConfigError, match="off_policy_correction none"):
        TrainConfig(rollout_lag=1, engine_type="sglang", top_p=0.9, top_k=5)
    TrainConfig(
        rollout_lag=1, engine_type="sglang", top_p=0.9, top_k=5, off_policy_correction="none"
    )
    build_world(rollout_lag=1)
    assert "off_policy_correction of rows of older weights: tis" in capsys.readouterr().out
    build_world(rollout_lag=1, off_policy_correction="none")
    assert "off_policy_correction of rows of older weights: none" in capsys.readouterr().out


def test_a_library_trainer_refuses_to_overlap_before_it_says_what_that_sets(build_world, capsys):
    with pytest.raises(ConfigError, match="overlap stream is of whole runs"):
        build_world(overlap="stream")
    assert "sets" not in capsys.readouterr().err


def test_rows_that_no_checkpoint_can_keep_are_refused_at_the_start(tmp_path, capsys):
    table = {"input": ["say a", "say b"], "day": [date(2026, 1, 1), date(2026, 1, 2)]}
    table["label"] = ["#### 1", "#### 2"]
    parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    options = rollout_options(
        tiny_models(tmp_path, "model"),
        prompt_data=tmp_path / "rows.parquet",
        input_key="input",
        label_key="label",
        reward_fn="gsm8k",
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        train_batch_size=4,
        rollout_lag=1,
    )
    capsys.readouterr()  # transformers' bar, where this test is the first to write a model
    assert main(["train", *words(options)]) == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "row 1 of the prompts" in line
    assert "convert that column to text" in line
    assert not (tmp_path / "run").exists()


def test_the_audit_recomputes_each_token_under_its_own_version(build_world, tmp_path):
    world = build_world(
        rollout_lag=2, num_prompts=16, audit_every=1, output_dir=str(tmp_path), lr_warmup_ratio=0.0
    )
    for _ in range(4):
        world.step()

    def rows():
        found = audit_step(tmp_path, 4).rows
        return {row.quantity: row.verdict for row in found}

    whole = rows()
    assert DIFFERS not in whole.values()
    assert whole["engine logprobs"] != "not audited"
    # A label that is off by one is another version's weights.
    folder = step_folder(tmp_path, 4)
    values = load_file(folder / SAMPLES)
    (name,) = (each for each in values if each.endswith("token_versions"))

    def write(versions):
        save_file({**values, name: versions}, folder / SAMPLES)
        seal(folder, json.loads((folder / FACTS).read_text()))

    write(np.where(values[name] >= 0, values[name] + 1, -1))
    assert rows()["engine logprobs"] == DIFFERS
    write(values[name])
    shutil.rmtree(step_folder(tmp_path, 2))
    without = rows()
    assert without["engine logprobs of version 1"] == "not audited"
    assert DIFFERS not in without.values()


@pytest.mark.parametrize("options", [{"rollout_lag": 1}, {"stream_chunk": 2}])
@pytest.mark.parametrize("fault", ["twice", "lost"])
def test_a_group_that_is_trained_in_two_steps_or_in_none_is_found(build_world, options, fault):
    """By the sum over all that was asked for, before anything is trained."""
    world = build_world(num_prompts=32, **options)
    stage = world.trainer.stage
    world.end_early()
    world.step()
    before = stage.memory.in_flight
    world.step()
    after = stage.memory.in_flight
    if "rollout_lag" in options:
        bad = replace(after, held=before.held if fault == "twice" else ())
    else:
        groups = before.stream.groups if fault == "twice" else after.stream.groups[1:]
        bad = replace(after, stream=replace(after.stream, groups=groups))
    stage.memory = replace(stage.memory, in_flight=bad)
    with pytest.raises(LedgerError, match="trained twice or are lost"):
        world.step()


def test_waiting_is_measured_and_what_helps_is_said_once(build_world, capsys):
    world = build_world(num_prompts=16)
    experience, metrics = world.sample(), world.train()
    for name in ("idle", "thin"):
        share = metrics[f"{name}_seconds"] / metrics["step_seconds"]
        assert metrics[f"{name}_seconds_share"] == pytest.approx(share)
        assert 0 <= share <= 1
    stage = world.trainer.stage
    waits = {"step_seconds": 10.0, "idle_seconds": 2.0, "thin_seconds": 1.4, "global_step": 3}
    capsys.readouterr()
    for changes in ({"global_step": 2}, {"idle_seconds": 1.0}, {}, {}):
        stage.advise({**waits, **changes}, experience.table)
    shown = capsys.readouterr().out
    assert shown.count("--stream_chunk 16") == 1
    for options in ({"stop": ("x",)}, {"stream_chunk": 3}):
        other = build_world(num_prompts=16, **options).trainer.stage
        capsys.readouterr()
        other.advise(waits, experience.table)
        assert "--stream_chunk" not in capsys.readouterr().out
