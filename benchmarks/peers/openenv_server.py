"""A real OpenEnv server on the loopback interface; run with the interpreter that has OpenEnv."""

import inspect
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Answer(Observation):
    text: str


class GuessState(State):
    guesses: int = 0


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.target, self._state = None, GuessState()

    def reset(self, seed=None, episode_id=None, target=7, **others):
        self.target = target
        self._state = GuessState(episode_id=episode_id, step_count=0)
        return Answer(text="guess", done=False, reward=None)

    def step(self, action, timeout_s=None, **others):
        self._state.step_count += 1
        if action.number == 13:
            raise ValueError("unlucky")
        is_right = action.number == self.target
        return Answer(text="right" if is_right else "wrong", done=is_right, reward=float(is_right))

    @property
    def state(self):
        return self._state


# OpenEnv asks for the class of states in some versions only.
takes = inspect.signature(create_fastapi_app).parameters
states = {"state_cls": GuessState} if "state_cls" in takes else {}
app = create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=8, **states)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
