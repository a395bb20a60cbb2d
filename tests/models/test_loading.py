"""Errors of incomplete checkpoints name the path and what is missing, in one line."""

from __future__ import annotations

import shutil

import pytest

from lightrft.models import ModelLoadError, load_causal_lm, load_config, load_tokenizer, load_trunk


@pytest.fixture
def broken(checkpoints, tmp_path):
    """A copy of a checkpoint to remove files from."""
    return shutil.copytree(checkpoints["tiny-qwen3"], tmp_path / "model")


def fails(function, path, message):
    with pytest.raises(ModelLoadError, match=message) as caught:
        function(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_directory(tmp_path):
    for function in (load_config, load_tokenizer, load_causal_lm, load_trunk):
        fails(function, tmp_path / "nowhere", "no model directory at")


def test_missing_configuration(broken):
    (broken / "config.json").unlink()
    fails(load_causal_lm, broken, "no configuration in .* expected config.json")


def test_missing_weights(broken):
    (broken / "model.safetensors").unlink()
    fails(load_causal_lm, broken, "no weights in .* expected")
    fails(load_trunk, broken, "no weights in")


def test_missing_tokenizer(broken):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()
    fails(load_tokenizer, broken, "no tokenizer in")


def test_unreadable_files(broken):
    (broken / "model.safetensors").write_bytes(b"not a checkpoint")
    fails(load_causal_lm, broken, "cannot load the model")
    (broken / "config.json").write_text('{"model_type": "no-such-model"}')
    fails(load_config, broken, "cannot read the configuration")


def test_unknown_model_id_without_network():
    fails(load_config, "nobody/no-such-model", "cannot read the configuration of")


def test_unknown_dtype(checkpoint):
    with pytest.raises(ValueError, match="unknown dtype 'fp8': expected one of float32, bfloat16"):
        load_causal_lm(checkpoint, dtype="fp8")
