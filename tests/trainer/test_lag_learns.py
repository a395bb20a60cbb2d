"""The quick start's task is learned on rows of older weights, too."""

from __future__ import annotations

import json

import pytest

from lightrft.cli.errors import ExitCode
from lightrft.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.shard("learning")]
SEEDS = range(3)
FORMS = {
    "lag 1": ("--rollout_lag", "1"),
    "lag 2": ("--rollout_lag", "2"),
    "stream": ("--stream_chunk", "24"),
}
PLACES = {"--output_dir": "", "--ckpt_path": "checkpoints", "--save_path": "model"}


def scores(folder):
    """Held-out scores in the order of the steps."""
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [entry["eval/reward"] for entry in entries if "eval/reward" in entry]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Folders of runs on the newest weights, by seed."""
    folder = tmp_path_factory.mktemp("plain")
    for seed in SEEDS:
        run = folder / str(seed)
        assert main(["quickstart", "--output_dir", str(run), "--seed", str(seed)]) == ExitCode.OK
    return folder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_older_weights_teach_as_much(plain, tmp_path, form):
    newest, older = [], []
    for seed in SEEDS:
        run = tmp_path / str(seed)
        flags = ["--config", str(plain / str(seed) / "config.toml"), *FORMS[form]]
        for option, place in PLACES.items():
            flags += [option, str(run / place)]
        assert main(["train", *flags]) == ExitCode.OK
        newest.append(scores(plain / str(seed)))
        older.append(scores(run))
        assert older[-1][0] == newest[-1][0] < 0.5
    # Within the spread of the seeds, which is a hundredth at the end.
    assert min(each[-1] for each in older) >= min(each[-1] for each in newest) - 0.02
    assert sum(each[-1] for each in older) / len(older) >= 0.97
