"""Used run folders: continued, refused with what changed, never overwritten unasked."""

import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lightrft.cli import train
from lightrft.config import TrainConfig
from lightrft.config.files import file_sha256
from lightrft.config.registry import STAGES
from lightrft.reporting.files import drop_steps_after, set_aside, write_start
from lightrft.run import assembly
from lightrft.run.provenance import describe_models
from lightrft.run.resume import decided_options, describe_inputs, input_files, plan_run
from lightrft.run.start import sole_writer
from lightrft.strategy.config import ConfigError


@pytest.fixture
def config(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"input": "a"}\n')
    (tmp_path / "r.py").write_text("def f(responses):\n    return [0.0 for _ in responses]\n")

    def build(**changes):
        values = {
            "output_dir": str(tmp_path / "run"),
            "prompt_data": str(tmp_path / "train.jsonl"),
            "reward_fn": (f"{tmp_path / 'r.py'}:f",),
            "temperature": 0.7,
            **changes,
        }
        return TrainConfig(**values)

    return build


def leave_run(config, *, checkpoint=True, summary=False, stage="", given=None):
    """The files of a run that went two steps; `given` are the options of its command."""
    folder = config.checkpoint_dir.parent
    folder.mkdir(parents=True)
    config.save(folder / "config.toml")
    digest = file_sha256(folder / "config.toml")
    inputs = describe_inputs(config)
    models = describe_models(config)
    start = {"inputs": inputs, "config_sha256": digest, "stage": stage, "models": models}
    start["decided"] = decided_options(given or config, config)
    write_start(folder / "run.json", world_size=1, **start)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    if checkpoint:
        (config.checkpoint_dir / "_actor/global_step2").mkdir(parents=True)
        (config.checkpoint_dir / "_actor/global_step2/manifest.json").write_text("{}")
    if summary:
        (folder / "summary.json").write_text('{"num_steps": 2}')


def refused(config, text, *stage):
    """What is said where a run is not planned, which has this text."""
    with pytest.raises(ConfigError, match=text) as caught:
        plan_run(config, *stage)
    return str(caught.value)


# One of each type: what a start may decide is any option.
DECIDED = {
    "enable_engine_sleep": (True, False),
    "engine_tp_size": (2, 1),
    "actor_learning_rate": (None, 1e-5),
    "critic_pretrain": ("c", False),
    "engine_args": ({"a": "1"}, None),
    "stop": (("a", "b"), ()),
}


@pytest.mark.parametrize("summary", [True, False])
@pytest.mark.parametrize("name", DECIDED)
def test_what_a_start_decides_is_no_change_of_the_command(config, name, summary):
    value, decided = DECIDED[name]
    given = config(**{name: value})
    leave_run(given.replaced({name: decided}), given=given, summary=summary)
    plan = plan_run(given)
    assert (plan.resumes, bool(plan.summary)) == (not summary, summary)
    assert plan.changes == ()
    assert summary or plan.kept == {name: decided}


def test_a_run_from_before_an_option_could_be_left_out_goes_on_with_its_value(config):
    leave_run(config(lora_sync="merged"))
    plan = plan_run(config())
    assert (plan.changes, plan.kept) == ((), {"lora_sync": "merged"})


@pytest.mark.parametrize("summary", [True, False])
def test_a_run_that_began_without_deepspeed_keeps_fsdp2(config, monkeypatch, summary):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    given = config().with_installed_backend()
    assert given.fsdp
    leave_run(given, summary=summary)
    assert plan_run(given).changes == ()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    plan = plan_run(config().with_installed_backend())
    assert plan.changes == ()
    assert bool(plan.summary) == summary
    assert summary or plan.kept == {"fsdp": True}


def test_a_run_of_deepspeed_says_so_where_it_is_not_installed(config, monkeypatch):
    leave_run(config())
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    (line,) = refused(config().with_installed_backend(), "is not installed").splitlines()
    assert line.endswith(
        "was begun with DeepSpeed, which is not installed: install lightrft[deepspeed], or give "
        "another --output_dir"
    )


@pytest.mark.parametrize("how", [{}, {"checkpoint": False}, {"summary": True}], ids=str)
def test_the_run_of_another_stage_is_refused(config, how):
    leave_run(config(), stage="prefer", **how)
    for changes in ({}, {"load_checkpoint": True}):
        refused(config(**changes), "holds a run of the stage prefer, and this command", "reward")
    plan_run(config(), "prefer")
    plan_run(config())


def test_of_a_complete_run_nothing_is_left_to_do(config):
    leave_run(config(), summary=True)
    plan = plan_run(config())
    assert plan.summary == {"num_steps": 2}
    assert not plan.resumes
    assert plan_run(config(load_checkpoint=True)).resumes
    assert plan_run(config(load_checkpoint=True, max_steps=9)).resumes


@pytest.mark.parametrize("changes", [{"temperature": 0.9}, {"max_steps": 9}, {"logging_steps": 7}])
def test_a_complete_run_of_other_options_is_refused_with_what_differs(config, changes):
    leave_run(config(), summary=True)
    with pytest.raises(ConfigError) as caught:
        plan_run(config(**changes))
    (name,) = changes
    texts = ("holds another run", "complete after 2 steps", f"\n  {name}: ", "--load_checkpoint")
    for text in texts:
        assert text in str(caught.value)


def test_a_run_that_an_alarm_ended_is_not_taken_for_a_complete_one(config, tmp_path):
    leave_run(config(), summary=True)
    (tmp_path / "run/summary.json").write_text('{"num_steps": 2, "alarms": ["kl is 9"]}')
    refused(config(), r"ended by an alarm after 2 steps:\n.*kl is 9")


def test_a_damaged_summary_is_written_again(config, tmp_path):
    leave_run(config(), summary=True)
    (tmp_path / "run/summary.json").write_text('{"num_st')
    assert plan_run(config()).resumes


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", ["config.toml", "run.json", "summary.json"])
def test_a_flipped_byte_of_a_record_is_passed_over_or_its_file_is_named(config, tmp_path, name):
    leave_run(config(num_threads=3), summary=name == "summary.json")
    path, draw = tmp_path / "run" / name, random.Random(11)
    content = path.read_bytes()
    for place in draw.sample(range(len(content)), min(100, len(content))):
        damaged = bytearray(content)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            said = plan_run(config()).warnings
        except ConfigError as error:
            said = (str(error),)
        if name != "summary.json":
            assert [name in text for text in said] == [True], (place, said)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("half", ["nothing", "critic", "temporary"])
def test_a_run_without_a_checkpoint_starts_over_and_its_files_are_kept(config, half, asked):
    leave_run(config(), checkpoint=False)
    folder, checkpoints = config().checkpoint_dir.parent, config().checkpoint_dir
    if half != "nothing":
        name = "_critic/global_step1" if half == "critic" else "_actor/.lightrft-tmp-global_step1"
        (checkpoints / name / "rng").mkdir(parents=True)
    plan = plan_run(config(load_checkpoint=asked, seed=7))
    assert plan.restarts
    assert not plan.resumes
    (folder / "mine.txt").write_text("stays")
    for number in (1, 2):
        aside = set_aside(folder, checkpoints)
        assert aside == folder / f"unfinished_{number}"
        (folder / "metrics.jsonl").write_text("again")
    assert (folder / "unfinished_1/metrics.jsonl").read_text().startswith('{"step": 1}')
    assert (folder / "unfinished_2/metrics.jsonl").read_text() == "again"
    assert (folder / "unfinished_1/config.toml").exists()
    assert (folder / "unfinished_1/checkpoints").exists() == (half != "nothing")
    assert (folder / "mine.txt").exists()


def test_checkpoints_that_lost_their_manifests_are_not_taken_for_none(config):
    leave_run(config(), checkpoint=False)
    actor = config().checkpoint_dir / "_actor/global_step2"
    (actor / "rng").mkdir(parents=True)
    assert plan_run(config()).resumes
    (actor / "rng").rmdir()
    for step in (1, 2):
        (config().checkpoint_dir / "_critic" / f"global_step{step}" / "rng").mkdir(parents=True)
    assert plan_run(config()).resumes


def test_lines_without_a_step_are_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', "7", "[]", "null", '{"x": 1}', '{"step": "1"}', "[" * 100_000, '{"ste']
    path.write_text("\n".join([lines[0], *lines[1:], '{"step": 2}', '{"step": 3}']))
    drop_steps_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_files_of_unknown_origin_are_not_overwritten(config, tmp_path):
    leave_run(config())
    (tmp_path / "run/run.json").unlink()
    refused(config(), "holds another run")
    leave_run(config(output_dir=str(tmp_path / "other")))
    refused(
        config(output_dir=str(tmp_path / "new"), ckpt_path=str(tmp_path / "other/checkpoints")),
        r"other/checkpoints holds another run",
    )


def test_options_that_keep_a_run_exact_may_change_and_are_listed(config):
    leave_run(config(), stage="sft")
    changed = {"max_steps": 9, "save_steps": 3, "max_epochs": 2}
    plan = plan_run(config(**changed))
    assert {change.name: int(change.after) for change in plan.changes} == changed
    assert all(change.is_free for change in plan.changes)


def test_a_change_that_breaks_exactness_is_refused_with_a_diff(config):
    leave_run(config(), stage="policy")
    changed = {"temperature": 0.9, "max_epochs": 2, "seed": 7, "max_steps": 9}
    text = refused(
        config(**changed), r"seed: 42 -> 7(.|\n)+temperature: 0.7 -> 0.9(.|\n)+--allow_ch"
    )
    assert "max_steps" not in text
    plan = plan_run(config(**changed, allow_changes=True))
    breaking = {"max_epochs", "seed", "temperature"}
    assert {each.name for each in plan.changes if not each.is_free} == breaking


@pytest.mark.parametrize("name", ["train.jsonl", "r.py"])
def test_a_changed_input_file_is_refused_and_a_touched_one_is_not(config, tmp_path, name):
    leave_run(config())
    path = tmp_path / name
    os.utime(path, ns=(1, 1))
    assert plan_run(config()).changes == ()
    path.write_text(path.read_text() + "\n")
    refused(config(), rf"{name}: contents [0-9a-f]{{12}} -> contents")


def model_in(folder):
    (folder / "m").mkdir()
    (folder / "m/model.safetensors").write_bytes(b"one")
    return folder / "m"


def test_a_tokenizer_that_is_another_one_now_breaks_exactness(config, tmp_path):
    model = model_in(tmp_path)
    (model / "tokenizer.json").write_text("{}")
    changed = config(pretrain=str(model))
    leave_run(changed)
    (model / "tokenizer.json").write_text('{"a": 1}')
    refused(changed, r"pretrain .*m: tokenizer [0-9a-f]{12} -> tokenizer ")


def test_a_run_of_before_its_record_had_hashes_keeps_the_check_of_its_inputs(config, tmp_path):
    leave_run(config())
    path = tmp_path / "run/run.json"
    start = json.loads(path.read_text())
    del start["sha256"], start["config_sha256"]
    path.write_text(json.dumps(start))
    assert plan_run(config()).warnings == ()
    (tmp_path / "train.jsonl").write_text('{"input": "b"}\n')
    refused(config(), r"train\.jsonl")


def test_of_a_complete_run_whose_record_is_damaged_nobody_says_that_nothing_is_left(
    config, tmp_path
):
    leave_run(config(), summary=True)
    path = tmp_path / "run/run.json"
    path.write_text(path.read_text().replace('"world_size": 1', '"world_size": 2'))
    refused(config(), r"run\.json is damaged")


PLUG_IN = """
import json, os.path, helper
import parts.weights as weights
from parts.deeper import one

def f(responses):
    from late import two
"""
BESIDE = (
    "helper.py",
    "parts/__init__.py",
    "parts/weights.py",
    "parts/deeper.py",
    "late.py",
    "parts/sibling.py",
    "of_helper.py",
    "parts/one.py",
)


@pytest.mark.parametrize("kind", ["reward_fn", "policy_loss", "environment"])
def test_what_a_plug_in_imports_from_beside_it_is_an_input(config, tmp_path, kind):
    (tmp_path / "parts").mkdir()
    for name in (*BESIDE, "unused.py", "json.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "own.py").write_text(PLUG_IN)
    (tmp_path / "helper.py").write_text("import of_helper, own, broken")
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "parts/deeper.py").write_text(
        "from . import sibling\nfrom .one import x\nfrom ......... import y"
    )
    reference = f"{tmp_path / 'own.py'}:f"
    value = (reference,) if kind == "reward_fn" else reference
    changed = config(**{kind: value}, apply_chat_template=True)
    found = {path.relative_to(tmp_path).as_posix() for path in input_files(changed)}
    assert found - {"r.py", "train.jsonl", "own.py"} == {*BESIDE, "broken.py"}
    leave_run(changed)
    assert plan_run(changed).changes == ()
    (tmp_path / "parts/sibling.py").write_text("three = 3\n")
    refused(changed, r"sibling\.py: contents [0-9a-f]{12} -> contents")


def test_credentials_are_not_saved_and_do_not_look_like_a_change(config, tmp_path):
    secret = config(
        remote_rm_url="http://me:hunter2@host/x", engine_args={"api_key": "hunter2", "n": 1}
    )
    leave_run(secret)
    text = "".join(path.read_text() for path in (tmp_path / "run").glob("*.*"))
    assert "hunter2" not in text
    assert "host/x" in text
    assert "n" in TrainConfig.load(tmp_path / "run/config.toml").engine_args
    assert plan_run(secret).changes == ()


def test_a_run_that_another_command_left_after_the_plan_is_not_touched(config, monkeypatch):
    def read(_):
        leave_run(config())
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(STAGES, "load", lambda _: read)
    with pytest.raises(ConfigError, match="changed since it was checked: run the command again"):
        assembly.run_training(config(), stage="sft")


def test_a_rank_that_only_generates_checks_the_folder_before_it_waits(config, monkeypatch):
    leave_run(config())
    monkeypatch.setattr(train, "is_worker", lambda: True)
    monkeypatch.setattr(assembly, "run_training", lambda *_, **__: pytest.fail("waits"))
    command = train.StageCommand("train", "", lambda *_: (config(temperature=0.9), 1))
    with pytest.raises(ConfigError, match="temperature"):
        command([])


@pytest.mark.full
def test_a_folder_has_one_writer(tmp_path):
    holder = (
        "import sys; from pathlib import Path\n"
        "from lightrft.run.start import sole_writer\n"
        "with sole_writer(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with (
            pytest.raises(ConfigError, match=f"being written by process {other.pid} on"),
            sole_writer(tmp_path),
        ):
            pass
        other.kill()
    with sole_writer(tmp_path):  # a killed process holds nothing
        pass


@pytest.mark.parametrize("option", ["prompt_data", "pretrain_data", "ref_logprobs", "eval_data"])
def test_files_of_every_stage_are_inputs(config, tmp_path, option):
    """Folders by their split, several sources, and the file behind a kind of source."""
    (tmp_path / "rows").mkdir()
    for name in ("rows/train.jsonl", "rows/test.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}\n")
    value, read = str(tmp_path / "b.jsonl"), ["b.jsonl"]
    if option.endswith("_data"):
        split = "test" if option == "eval_data" else "train"
        value = f"{tmp_path / 'rows'},both_orders:{tmp_path / 'b.jsonl'}"
        read = [f"rows/{split}.jsonl", "b.jsonl"]
    changed = config(**{option: value})
    found = [path.relative_to(tmp_path).as_posix() for path in input_files(changed)]
    assert [name for name in found if name not in ("train.jsonl", "r.py")] == read
    leave_run(changed)
    (tmp_path / "b.jsonl").write_text("{}\n\n")
    if option == "eval_data":  # nothing is trained on it
        (change,) = plan_run(changed).changes
        assert change.is_free
        return
    refused(changed, r"b\.jsonl: contents [0-9a-f]{12} -> contents")


@pytest.mark.parametrize("option", ["pretrain", "teacher", "teachers", "reward_pretrain"])
def test_a_model_that_is_another_one_now_breaks_exactness(config, tmp_path, option):
    model = model_in(tmp_path)
    values = {
        "teachers": (f"big={model}", "small=http://host/v1"),
        "reward_pretrain": (str(model),),
    }
    changed = config(**{option: values.get(option, str(model))}, temperature=1.0)
    leave_run(changed)
    (model / "model.safetensors").touch()
    assert plan_run(changed).changes == ()
    (model / "model.safetensors").write_bytes(b"two")
    role = {"teachers": "teacher big"}.get(option, option)
    refused(changed, rf"{role} .*m: weights [0-9a-f]{{12}} -> weights ")
    (model / "model.safetensors").unlink()
    refused(changed, r"-> weights none")
