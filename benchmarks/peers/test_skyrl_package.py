"""Classes of the package skyrl_gym itself; no lock has it, as it pins other versions than ours."""

from __future__ import annotations

import pytest
from tests.rollout.test_skyrl_classes import CASES, played

pytest.importorskip("skyrl_gym", reason="uv pip install skyrl-gym")
pytestmark = [pytest.mark.slow, pytest.mark.shard("peers")]


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_multi_turn", "aime", "lcb", "searchcode"])
def test_the_packages_own_classes_run_where_it_is_installed(tmp_path, monkeypatch, name):
    truth = {"ground_truth": "[]" if name == "lcb" else "4"}
    row = {"reward_spec": truth, "reward_model": truth, "extra_info": {}}
    monkeypatch.setitem(CASES, name, (row, ["so\nAnswer: 4\n#### 4"], None, None, {}))
    _, answers, reward = played(tmp_path, name, place="skyrl_gym")
    assert answers[-1] == [""]
    assert name in ("lcb", "searchcode") or reward == 1.0
