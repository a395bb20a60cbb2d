"""A proof at load that changed nothing is not repeated, and whatever it saw makes it repeated."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.models.test_proof import tiny
from tests.programs import run_python
from transformers import AttentionInterface

from lightrft.config import TrainConfig
from lightrft.models import Actor, actor as actor_module
from lightrft.models.head_transform import HeadTransform
from lightrft.models.loading import ModelLoadError
from lightrft.stages import kept_proofs, models
from lightrft.strategy import get_fake_strategy

OPTIONS = {"fsdp": True, "packing_samples": True}


def prove(family="qwen2", change=None, **options):
    """Prove a new model; return how often it was tried."""
    strategy = get_fake_strategy(TrainConfig(**{**OPTIONS, **options}))
    actor = Actor(tiny(family))
    if options.get("bf16"):
        actor.bfloat16()
    if change is not None:
        change(actor)
    tried = []
    with pytest.MonkeyPatch.context() as patched:
        run = models.prove_model
        patched.setattr(models, "prove_model", lambda *a, **k: tried.append(1) or run(*a, **k))
        models.configure_models(
            TrainConfig(**{**OPTIONS, **options}), strategy.context, [actor], kept="none"
        )
    assert actor.is_proved
    assert actor.layout_policy.packs_samples
    return len(tried)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lightrft" / "proof"


def of_another_weight(actor):
    with torch.no_grad():
        next(actor.parameters()).view(-1)[-1] += 1e-6


def of_another_hook(actor):
    actor.model.model.layers[0].register_forward_hook(lambda *_: None)


def of_another_setting(actor):
    actor.model.model.layers[0].self_attn.scaling *= 1.0001


def of_another_configuration(actor):
    actor.config.rms_norm_eps *= 2


def of_frozen_weights(actor):
    next(actor.parameters()).requires_grad_(False)


CHANGES = [
    of_another_weight,
    of_another_hook,
    of_another_setting,
    of_another_configuration,
    of_frozen_weights,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_proved_again(change):
    assert [prove(), prove(), prove(change=change), prove(change=change)] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    "options", [{"bf16": True}, {"gradient_checkpointing": True}, {"fused_linear_logprob": True}]
)
def test_other_options_are_proved_again(options):
    assert [prove(), prove(**options), prove(**options), prove()] == [1, 1, 0, 0]


def test_another_version_is_proved_again(monkeypatch):
    assert prove() == 1
    versions = {"lightrft": "0", "torch": "1"}
    monkeypatch.setattr(kept_proofs, "package_versions", lambda _: versions)
    assert prove() == 1


def test_code_that_is_planted_later_is_seen(monkeypatch):
    assert [prove("cohere2"), prove("cohere2")] == [1, 0]
    monkeypatch.setattr(actor_module, "read_head_transform", lambda _: HeadTransform())
    with pytest.raises(ModelLoadError, match="the head computes other log-probabilities"):
        prove("cohere2")


def test_attention_that_is_planted_later_is_seen(monkeypatch):
    assert [prove(), prove()] == [1, 0]
    mapping, name = AttentionInterface._global_mapping, Actor(tiny("qwen2")).config
    attend = mapping[name._attn_implementation]
    monkeypatch.setitem(mapping, name._attn_implementation, lambda *a, **k: attend(*a, **k))
    assert prove() == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"proved": "x"}'])
def test_a_damaged_file_is_no_verdict(folder, text):
    assert prove() == 1
    (path,) = folder.iterdir()
    path.write_text(text)
    assert [prove(), prove()] == [1, 0]


def test_a_folder_that_cannot_be_written_costs_nothing(folder):
    folder.parent.mkdir()
    folder.write_text("")
    assert [prove(), prove()] == [1, 1]


@pytest.mark.full
@pytest.mark.parametrize("family", ["phimoe", "recurrent_gemma", "gpt_oss"])
def test_a_proof_that_changed_the_model_is_not_kept(family):
    assert [prove(family), prove(family)] == [1, 1]


@pytest.mark.full
def test_two_processes_at_once_keep_one_verdict(folder):
    program = "from tests.stages.test_kept_proofs import prove; print(prove())"

    def numbers(_):
        return run_python("-c", program, timeout_seconds=200).stdout.split()[-1]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(numbers, range(2)))
    assert len(list(folder.iterdir())) == 1
    assert numbers(0) == "0"
