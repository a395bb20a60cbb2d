"""A run in which tokens go to the ranks that train them is, bit for bit, the one in which every
rank gets all of them: batch, loss, gradients, weights.
"""

import json
from pathlib import Path

import pytest
from tests.ranks import run_multiprocess
from tests.records import exchange_cases
from tests.runs import rollout_options, say_rows, train_each, write_inputs

import lightrft.experience.maker as maker

pytestmark = [pytest.mark.shard("training"), pytest.mark.multiprocess]

REWARD = """
def score(responses, kind):
    if kind[0] == 5:
        raise ValueError("this one always fails")
    return [
        1.0 if k % 2 else float(sum(map(ord, text)) % 2)
        for text, k in zip(responses, kind, strict=True)
    ]
"""


def train_both_ways(rank, world_size, runs):
    """Metrics of every run and of the same run in the gathered form."""
    forms = {
        "delivered": (maker.deliver_rows, maker.deliver_evidence),
        "gathered": (exchange_cases.gathered, exchange_cases.gathered_evidence),
    }
    named = {name: [] for name in forms}
    for name, form in forms.items():
        maker.deliver_rows, maker.deliver_evidence = form
        renamed = [run | {"output_dir": f"{run['output_dir']}_{name}"} for run in runs]
        named[name] = [each["last_metrics"] for each in train_each(rank, world_size, renamed)]
    return list(zip(*named.values(), strict=True))


def options_of(folder, name, **changes):
    audited = {"audit_every": 1, "reward_failure": "mask", "save_trajectories": True}
    return rollout_options(folder, name, **audited | changes)


@pytest.fixture
def folder(tmp_path, tiny_model):
    (tmp_path / "model").symlink_to(tiny_model)
    return write_inputs(tmp_path, say_rows(32, kind=lambda number: number), reward=REWARD)


def files_of(folder):
    """Bytes of all that an audit reads, and of the samples token by token."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.glob("audit/**/*"))
        if path.suffix == ".safetensors" or path.name == "facts.json"
    }
    for name in [name for name in found if name.endswith("facts.json")]:
        facts = json.loads(found[name])
        # Of the options, too, which name the run's folder.
        del facts["sha256"], facts["files"]
        found[name] = json.dumps(facts).encode()
    return found | {"trajectories": (folder / "trajectories.jsonl").read_bytes()}


def assert_same_runs(ranks, runs):
    for number, values in enumerate(runs):
        for both in ranks:
            delivered, gathered = (
                {k: v for k, v in each.items() if "second" not in k and "memory" not in k}
                for each in both[number]
            )
            assert delivered == gathered
            assert delivered["engine_hash"]
        delivered, gathered = (
            files_of(Path(f"{values['output_dir']}_{name}")) for name in ("delivered", "gathered")
        )
        assert sorted(delivered) == sorted(gathered)
        assert len(delivered) >= 5
        for name, content in delivered.items():
            assert content == gathered[name], name


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_ranks_train_the_same_bits(folder):
    streaming = {"stream_chunk": 3, "stream_prompts": 6, "off_policy_correction": "tis"}
    runs = [
        options_of(folder, "fire", use_fire=True, dynamic_sampling=True, max_steps=1),
        options_of(folder, "stream", fsdp=False, zero_stage=1, **streaming),
    ]
    ranks = run_multiprocess(train_both_ways, 2, timeout_seconds=500, args=(runs,))
    assert_same_runs(ranks, runs)
    assert ranks[0][1][0]["staleness/token_share"] > 0
    # Positive control: the files tell runs apart.
    first, second = (files_of(Path(f"{values['output_dir']}_delivered")) for values in runs)
    name = "audit/step_000001/values.safetensors"
    assert first[name] != second[name]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_train_the_same_bits(folder):
    """Ranks that share their sequences, or an engine."""
    sharing = {"sp_size": 2, "packing_samples": True, "micro_batch_tokens": 60}
    runs = [
        options_of(folder, "sequences", dynamic_sampling=True, **sharing),
        options_of(folder, "engines", engine_tp_size=2, fsdp=False, zero_stage=2),
    ]
    ranks = run_multiprocess(train_both_ways, 4, timeout_seconds=800, args=(runs,))
    assert_same_runs(ranks, runs)
