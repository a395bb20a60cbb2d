"""The tensors of a checkpoint are those of the model, or the message names those that are not."""

import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.programs import Evil

from lightrft.config import TrainConfig
from lightrft.models import Actor, Critic, ModelLoadError, load_causal_lm, load_trunk
from lightrft.stages.models import require_equal_start
from lightrft.strategy import get_fake_strategy
from lightrft.strategy.distributed.process_end import CheckpointError
from lightrft.strategy.meta_init import parameters_on_meta

LAYER = "model.layers.0.mlp.up_proj.weight"
LOADERS = (load_causal_lm, load_trunk)


@pytest.fixture
def change(checkpoint, tmp_path):
    """Copies a checkpoint and hands its tensors to a function; returns the copy's path."""

    def make(edit):
        path = Path(shutil.copytree(checkpoint, tmp_path / "model", dirs_exist_ok=True))
        tensors = load_file(Path(checkpoint) / "model.safetensors")
        edit(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return str(path)

    return make


def refused(load, path, *texts, **options):
    with pytest.raises(ModelLoadError) as caught:
        load(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    for text in (path, *texts):
        assert text in message, message


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(
    "edit, words, allowed",
    [
        (lambda tensors: tensors.pop(LAYER), ("1 missing", LAYER[6:], "--allow_new"), LAYER),
        (
            lambda tensors: tensors.update({"model.odd.weight": torch.ones(2)}),
            ("1 unexpected (", "odd.weight"),
            "model.odd.*",
        ),
        (
            lambda tensors: tensors.update({LAYER: torch.ones(2, 3)}),
            ("1 of another shape", "up_proj.weight is [2, 3] instead of ["),
            LAYER,
        ),
    ],
    ids=["missing", "unexpected", "another shape"],
)
def test_a_tensor_that_does_not_fit_is_named_unless_allowed(change, load, edit, words, allowed):
    path = change(edit)
    refused(load, path, *words)
    load(path, allow_new_weights=(allowed,))


def test_many_are_counted_and_some_named(change):
    path = change(lambda t: [t.pop(name) for name in list(t) if "layers.1" in name])
    refused(load_causal_lm, path, " missing (model.layers.1.input_layernorm", " more)")


def test_an_embedding_that_is_also_the_head_must_be_there(change):
    path = change(lambda tensors: tensors.pop("model.embed_tokens.weight"))
    for load in LOADERS:
        refused(load, path, "missing", "embed_tokens.weight")


def test_what_transformers_itself_recomputes_may_stand_in_old_files(change):
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    for load in LOADERS:
        load(change(lambda tensors: tensors.update(buffers)))


def test_new_weights_are_the_same_in_every_model_of_a_path_and_draw_no_random_numbers(change):
    path = change(lambda tensors: tensors.pop(LAYER))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    actor, reference = (Actor.from_pretrained(path, allow_new_weights=(LAYER,)) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    first, second = (dict(m.model.named_parameters())[LAYER] for m in (actor, reference))
    assert torch.equal(first, second)
    assert first.std() > 0
    # Positive control: another seed gives others.
    torch.manual_seed(8)
    other = Actor.from_pretrained(path, allow_new_weights=(LAYER,))
    assert not torch.equal(first, dict(other.model.named_parameters())[LAYER])


def test_a_model_without_memory_is_checked_by_the_headers_of_its_files(change):
    for edit, texts in (
        (lambda t: t.pop(LAYER), ("1 missing", LAYER)),
        (lambda t: t.update(odd=torch.ones(1)), ("1 unexpected (odd)",)),
        (lambda t: t.update({LAYER: torch.ones(2, 3)}), ("is [2, 3] instead of",)),
    ):
        path = change(edit)
        with parameters_on_meta():
            refused(load_causal_lm, path, *texts, allow_new_weights=(LAYER,))
    path = change(lambda tensors: tensors.update(odd=torch.ones(1)))
    with parameters_on_meta():
        load_causal_lm(path, allow_new_weights=("odd",))


def test_a_head_of_another_model_is_named(checkpoint, tmp_path):
    path = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    save_file({"weight": torch.ones(1, 3), "bias": torch.ones(1)}, path / "value_head.safetensors")
    refused(Critic.from_pretrained, str(path), "value_head.safetensors", "size mismatch")


@pytest.mark.parametrize("content", ["code", b"\x80\x04junk", b"", b"\0" * 200, "list"])
def test_pickled_weights_that_are_no_tensors_are_refused_in_one_line(checkpoint, tmp_path, content):
    path = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (path / "model.safetensors").unlink()
    file, proof = path / "pytorch_model.bin", tmp_path / "proof"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save({"w": Evil(str(proof))} if content == "code" else [1, 2], file)
    for load in LOADERS:
        refused(load, str(path), "cannot load the model")
    assert not proof.exists()
    if content == "code":
        refused(load_causal_lm, str(path), "pickled objects other than tensors")
        # Positive control: the file does run code where it is let.
        torch.load(file, weights_only=False)
        assert proof.exists()


def test_code_beside_a_model_is_neither_run_nor_asked_about(checkpoint, tmp_path, monkeypatch):
    path = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    text = (path / "config.json").read_text()
    remote = '"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil",'
    (path / "config.json").write_text(
        text.replace("{", "{" + remote, 1)
        .replace('"model_type": "qwen3"', '"was": 1')
        .replace('"model_type": "llama"', '"was": 1')
    )
    (path / "evil.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')\nclass Config: pass\n")
    # Whoever asks on a terminal would wait for an answer.
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    refused(load_causal_lm, str(path), "cannot read the configuration")
    assert not (tmp_path / "proof").exists()


def prepared(strategy, path):
    actor, _, _, reference = strategy.prepare_models_and_optimizers(
        Actor.from_pretrained(path), None, None, Actor.from_pretrained(path), TrainConfig(), 10
    )
    return actor, reference


@pytest.mark.parametrize("bf16", [False, True])
def test_actor_and_reference_prove_that_they_start_equal(checkpoint, caplog, bf16):
    caplog.set_level("INFO")
    with get_fake_strategy({"bf16": bf16}) as strategy:
        actor, reference = prepared(strategy, checkpoint)
        caplog.clear()
        require_equal_start(strategy.backend, actor, reference)
        (line,) = caplog.messages
        assert line.startswith("actor and reference start from equal weights: ")
        weight = dict(reference.named_parameters())[f"model.{LAYER}"]
        with torch.no_grad():
            weight[0, 0] += 1
        with pytest.raises(ModelLoadError, match=rf"differ in 1 of \d+ .*: {LAYER}"):
            require_equal_start(strategy.backend, actor, reference)


def test_a_strategy_that_reads_files_itself_names_what_does_not_fit(change):
    path = change(lambda tensors: tensors.pop(LAYER))
    with get_fake_strategy() as strategy, pytest.raises(CheckpointError, match=LAYER):
        strategy.load_model(Actor.from_pretrained(path, allow_new_weights=("*",)), path)
