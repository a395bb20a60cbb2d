"""Steps with records of their sampling: experts and kept ids are replayed, and faults found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.moe_types import moe_model
from tests.tools.audit import world as step_world
from tests.tools.audit.test_no_false_alarm import assert_equal

from lightrft.engines.types import ROUTES
from lightrft.records import recorded
from lightrft.tools.audit.models import read_experts
from lightrft.tools.audit.record import RecordError

pytestmark = pytest.mark.shard("audit")

EXPERTS = 8
# The reference takes the experts and kept ids of the policy.
OPTIONS = {"max_epochs": 1, "init_kl_coef": 0.1, "use_kl_loss": True}


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory):
    """A model whose last two of three layers choose groups of experts, then experts."""
    path = tmp_path_factory.mktemp("audit") / "experts"
    moe_model("deepseek_v3", vocab_size=step_world.VOCAB).save_pretrained(path)
    return str(path)


def with_experts(samples):
    """Experts of every position but a row's last that no router chose."""
    draw = np.random.default_rng(0)

    def change(_, completion):
        num_prompt, num_tokens = len(completion.prompt_token_ids), len(completion.output_token_ids)
        first = draw.integers(EXPERTS, size=(num_prompt + num_tokens - 1, 2))
        rows = np.stack([first, (first + 3) % EXPERTS], axis=-1).astype(np.uint8)
        texts = [each.tobytes().hex() for each in (rows[:num_prompt], *rows[num_prompt:])]
        return replace(completion, facts={ROUTES: tuple(texts)})

    return step_world.of_completions(samples, change)


def differences(report):
    return {row.quantity.partition(",")[0] for row in report.rows if row.verdict == "differs"}


def test_recorded_experts_are_replayed(audited, monkeypatch):
    assert_equal(audited(OPTIONS, sgd=True, shape=with_experts, steps=2))
    routes = recorded.stored_routes
    monkeypatch.setattr(recorded, "stored_routes", lambda *parts: routes(*parts).roll(1, dims=0))
    wrong = differences(audited(OPTIONS, sgd=True, shape=with_experts))
    assert {"reference logprobs", "gradient norm"} <= wrong


def test_kept_ids_are_the_law_of_policy_and_reference(audited, monkeypatch):
    options = OPTIONS | {"top_k": 5}
    assert_equal(audited(options, sgd=True, shape=step_world.with_kept_ids, steps=2))
    kept_sets = recorded.stored_kept_sets

    def changed(*parts):
        kept = kept_sets(*parts)
        return replace(kept, ids=torch.where(kept.ids == 4, 5, kept.ids))

    monkeypatch.setattr(recorded, "stored_kept_sets", changed)
    wrong = differences(audited(options, sgd=True, shape=step_world.with_kept_ids))
    assert {"reference logprobs", "gradient norm"} <= wrong


def test_experts_of_layers_are_read_by_the_calls_of_a_pass():
    """Groups are chosen first; vLLM also gives zeros for the layer without experts."""
    kinds = [(2, 1), (8, 2)] * 2
    packed = torch.tensor([[0, 0, 1, 2, 3, 4], [0, 0, 5, 6, 7, 0]], dtype=torch.uint8)
    kind, experts = read_experts({4: packed[:1], 7: packed[1:]}, kinds)
    assert kind == (8, 2)
    assert (experts[4].tolist(), experts[7].tolist()) == ([[[1, 2], [3, 4]]], [[[5, 6], [7, 0]]])
    _, experts = read_experts({0: torch.tensor([[44, 1, 1, 0]], dtype=torch.uint8)}, [(400, 2)])
    assert experts[0].tolist() == [[[300, 1]]]
    for wrong in (packed[:, :3], packed + 8):
        with pytest.raises(RecordError, match="bytes of experts a token are not"):
            read_experts({0: wrong}, kinds)
