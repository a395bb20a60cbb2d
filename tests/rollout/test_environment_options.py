"""Arguments, secrets and rewards of environments, as a worker hosts them."""

from __future__ import annotations

import asyncio

import pytest

from lightrft.config import TrainConfig
from lightrft.config.registry import ENVIRONMENT_KINDS
from lightrft.rewards.worker import ReportedError
from lightrft.rollout.environments.pool import EnvironmentPool
from lightrft.rollout.environments.worker import Adapted, HostedEnvironments

CASES = '''
import os


class Deep:
    def __init__(self, depth=1, *, name="x"):
        self.depth, self.name = depth, name

    def reset(self, **row):
        self.reward = 0.0
        return f" {self.name} {self.depth} {os.environ.get('MY_API_KEY')} {row.get('a')}"

    def dig(self) -> str:
        """Dig.

        Returns:
            What is there.
        """
        self.reward += self.depth
        return "gold"


class Plain:
    def reset(self, **row):
        return None


class Method(Plain):
    def reward(self) -> str:
        """Ask.

        Returns:
            Nothing.
        """
        return "no"


several = {"a": Deep}


class Talk:
    def __init__(self, env_config, extras):
        self.config = env_config

    def init(self, prompt):
        return [{**prompt[0], "content": f"q {self.config.url} {self.config['k']}"}], {}

    def step(self, action):
        return {"observations": [], "reward": 1.0, "done": True}

    def close(self):
        pass
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cases.py"
    path.write_text(CASES)
    return path


def hosted(text, options=None, *, takes_attribute=False):
    return HostedEnvironments(text, (), 1000, False, options or {}, takes_attribute)


def asked(host, operation, **details):
    return asyncio.run(host.perform({"operation": operation, "episode": "0", **details}))


def test_arguments_reach_the_constructor_of_each_episode(file):
    host = hosted(f"{file}:Deep", {"depth": 3, "name": "mine"})
    assert asked(host, "reset", row={"a": 1}) == " mine 3 None 1"
    host = hosted(f"{file}:several", {"depth": 4})
    assert asked(host, "reset", row={"environment": "a"}).startswith(" x 4 ")


def test_arguments_that_the_class_does_not_take_are_refused_at_the_start(file, monkeypatch):
    with pytest.raises(TypeError, match="unexpected keyword argument 'width'"):
        hosted(f"{file}:Deep", {"width": 3}).describe()
    monkeypatch.setattr(ENVIRONMENT_KINDS, "load", lambda kind: lambda rest: Adapted)
    with pytest.raises(ReportedError, match="takes no environment_args"):
        hosted("openenv:http://127.0.0.1:9", {"width": 3})


def test_an_episode_that_begins_again_closes_its_environment(monkeypatch):
    class Counted(Adapted):
        ended = 0

        def reset(self, **row):
            return None

        def close(self):
            Counted.ended += 1
            raise OSError("gone already")

    monkeypatch.setattr(ENVIRONMENT_KINDS, "load", lambda kind: lambda rest: Counted)
    host = hosted("openenv:http://127.0.0.1:9")
    for _ in range(3):
        asked(host, "reset", row={})
    assert Counted.ended == 2


def test_arguments_are_the_env_config_of_a_skyrl_gym_class(file):
    prompt = [{"role": "user", "content": "q"}]
    host = hosted(f"skyrl_gym:{file}:Talk", {"url": "u", "k": 2})
    assert asked(host, "reset", row={"prompt": prompt}) == " u 2"
    with pytest.raises(AttributeError, match=r"no 'url': give --environment_args url=\.\.\."):
        asked(hosted(f"skyrl_gym:{file}:Talk"), "reset", row={"prompt": prompt})


def test_an_attribute_reward_pays_where_nothing_else_does(file):
    host = hosted(f"{file}:Deep", {"depth": 2}, takes_attribute=True)
    assert host.describe()[""]["has_reward"]
    asked(host, "reset", row={})
    for _ in range(2):
        asked(host, "call", name="dig", arguments={})
    assert asked(host, "reward") == [4.0, {}]
    assert not hosted(f"{file}:Deep").describe()[""]["has_reward"]
    for name in ("Plain", "Method"):
        assert not hosted(f"{file}:{name}", takes_attribute=True).describe()[""]["has_reward"]


@pytest.mark.full
def test_a_worker_gets_the_secrets_that_are_named_and_the_arguments(file, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "s3cret")
    options = {"environment": f"{file}:Deep", "environment_workers": 1, "apply_chat_template": True}
    found = []
    for names in ((), ("MY_API_KEY",)):
        config = TrainConfig(environment_env=names, environment_args={"depth": 5}, **options)
        pool = EnvironmentPool(config)

        def told(host):
            return host.ask("reset", seconds=60, row={})

        try:
            found.append(pool.begin(0, told).result())
            assert pool.specs[""].has_reward
        finally:
            pool.close()
    assert found == [" x 5 None None", " x 5 s3cret None"]
