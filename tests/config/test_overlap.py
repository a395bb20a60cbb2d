"""`overlap` chooses options of sampling beside training; those that are set win."""

import pytest

from lightrft.cli.options import parse_options
from lightrft.cli.train import TRAIN
from lightrft.config import ConfigError, TrainConfig
from lightrft.config.options import options_of
from lightrft.config.parts.rollout import StreamingOptions

SPLIT = {"overlap": "split", "fsdp": True}


def changes(config):
    """Options of the part that differ from their default, the preset apart."""
    return {
        name: vars(config)[name]
        for name, (entry, _) in options_of(StreamingOptions).items()
        if name != "overlap" and vars(config)[name] != entry.default
    }


@pytest.mark.parametrize(
    "values, processes, expected",
    [
        ({}, 8, {}),
        ({"rollout_lag": 2}, 8, {"rollout_lag": 2}),
        # 1,000 tokens in at most 4 steps.
        ({"overlap": "stream", "generate_max_len": 1000}, 1, {"stream_chunk": 250}),
        ({"overlap": "stream", "stream_chunk": 7}, 1, {"stream_chunk": 7}),
        (
            {"overlap": "stream", "generate_max_len": 10, "max_staleness": 3},
            1,
            {"stream_chunk": 4, "max_staleness": 3},
        ),
        (SPLIT, 8, {"rollout_lag": 1, "rollout_ranks": 4}),
        (SPLIT, 3, {"rollout_lag": 1, "rollout_ranks": 1}),
        ({**SPLIT, "rollout_ranks": 6}, 8, {"rollout_lag": 1, "rollout_ranks": 6}),
        ({**SPLIT, "rollout_ranks": 1}, 1, {"rollout_lag": 1, "rollout_ranks": 1}),
    ],
)
def test_a_preset_sets_what_nobody_has(values, processes, expected):
    config = TrainConfig(**values).overlapped(processes)
    assert changes(config) == expected
    assert config.overlapped(processes) is config


def test_a_default_that_was_given_wins():
    (config, _, problems) = parse_options(
        TRAIN.build_parser(), ["--overlap", "split", "--fsdp", "--rollout_lag", "0"]
    )
    assert not problems
    with pytest.raises(ConfigError, match="split sets rollout_ranks 4: rollout_ranks samples the"):
        config.overlapped(8)


def test_all_reasons_are_named():
    config = TrainConfig(overlap="stream", stop=("a",), late_join=True)
    with pytest.raises(ConfigError) as caught:
        config.overlapped(1)
    assert str(caught.value).count("overlap stream sets stream_chunk 256: stream_chunk excl") == 2


def test_the_saved_options_are_what_was_set(tmp_path):
    TrainConfig(overlap="stream").overlapped(1).save(tmp_path / "config.toml")
    text = (tmp_path / "config.toml").read_text()
    assert 'overlap = "stream"' in text
    assert "stream_chunk = 256" in text
