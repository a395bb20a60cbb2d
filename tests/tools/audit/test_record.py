"""What a run writes for the audit beside the two states."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.numpy import load_file

from lightrft.cli.main import main
from lightrft.tools.audit.record import (
    FACTS,
    FOLDER,
    SAMPLES,
    VALUES,
    read_record,
    recorded_steps,
    seal,
    step_folder,
)

NUM_SAMPLES, NUM_TOKENS = 128, 4000
# All that is recorded of a token: of actor, critic, reference and correction, in two epochs.
COSTLY = {
    "advantage_estimator": "gae",
    "init_kl_coef": 0.1,
    "off_policy_correction": "tis",
    "high_entropy_token_ratio": 0.5,
    "max_epochs": 2,
}


def test_a_step_of_128_samples_takes_less_than_50_megabytes(world, micro_model, tmp_path):
    world.record_step(micro_model, tmp_path / "run", COSTLY)
    record = read_record(tmp_path / "run")
    names = (SAMPLES, VALUES)
    arrays = [array for name in names for array in load_file(record.folder / name).values()]
    num_bytes = sum(array.nbytes for array in arrays)
    # Numbers of a row are counted as if there were as many as tokens.
    whole = num_bytes / record.samples.token_ids.size * NUM_SAMPLES * NUM_TOKENS
    print(f"{whole / 1e6:.1f} MB for {NUM_SAMPLES} samples of {NUM_TOKENS} tokens")
    assert 20e6 < whole < 50e6  # ten numbers of four bytes are 20.5 MB
    on_disk = sum((record.folder / name).stat().st_size for name in (*names, FACTS))
    assert on_disk - num_bytes < 20_000  # names, shapes and facts


@pytest.fixture(scope="module")
def recorded(world, micro_model, tmp_path_factory):
    run = tmp_path_factory.mktemp("recorded") / "run"
    world.record_step(micro_model, run, {"max_epochs": 1})
    return run


@pytest.fixture
def run(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "run")


def refusal(run, capsys):
    """The one line that the command says of a record that it cannot read."""
    assert main(["audit", str(run)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "step_000001" in line
    return line


@pytest.mark.parametrize(
    "content", ["[]", "[" * 10**5, "", "7"], ids=["list", "deep", "empty", "7"]
)
def test_facts_that_are_no_table_are_one_line(run, capsys, content):
    (step_folder(run, 1) / FACTS).write_text(content)
    refusal(run, capsys)


@pytest.mark.parametrize("name", [FACTS, SAMPLES, VALUES, "before/actor/state_00000.safetensors"])
def test_a_file_that_was_cut_is_one_line(run, capsys, name):
    path = step_folder(run, 1) / name
    path.write_bytes(path.read_bytes()[:-20])
    assert "damaged" in refusal(run, capsys)


def changed_updates(**changes):
    return lambda facts: facts["updates"][0].update(changes)


# Facts under a true hash: a record that somebody has made.
FORGED = {
    "no optimizer": lambda facts: facts["optimizers"].clear(),
    "an optimizer elsewhere": lambda facts: facts["optimizers"].update(
        {"../../../etc": facts["optimizers"]["actor"]}
    ),
    "samples that there are not": changed_updates(micro_batches=[[0, 99]]),
    "samples before the first": changed_updates(micro_batches=[[-1]]),
    "an unknown model": changed_updates(model="tutor"),
    "an unknown dtype": lambda facts: facts.update(compute_dtype="float7"),
    "no weight of the KL": lambda facts: facts.update(kl_coef=None),
    "a step in letters": lambda facts: facts.update(step="x"),
    "another step": lambda facts: facts.update(step=2),
    "names of no weight": lambda facts: facts["optimizers"]["actor"]["groups"][0].update(
        names=["no.weight"]
    ),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_forged_facts_are_one_line(run, capsys, forge):
    folder = step_folder(run, 1)
    facts = json.loads((folder / FACTS).read_text())
    forge(facts)
    seal(folder, facts)
    refusal(run, capsys)


@pytest.mark.parametrize("content", [{}, {"auto_map": {"AutoConfig": "code.Config"}}, []])
def test_a_model_that_is_none_is_one_line_and_none_of_its_code_runs(run, capsys, content):
    folder = step_folder(run, 1)
    path = folder / "before/actor/config.json"
    path.write_text(json.dumps(content))
    (path.parent / "code.py").write_text("raise SystemExit('run')")
    seal(folder, json.loads((folder / FACTS).read_text()))
    refusal(run, capsys)


def test_other_folders_beside_the_steps_are_passed_over(run):
    for name in ("step_\u00b2", "step_000001\u00b2", "step_x", "step_-00001", "step_1"):
        (run / FOLDER / name).mkdir()
        (run / FOLDER / name / FACTS).write_text("{}")
    assert recorded_steps(run) == [1]
