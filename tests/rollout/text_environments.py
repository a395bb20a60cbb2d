"""Environments of SkyRL-Gym's make, as their authors write them; run in workers by the tests."""

import json


class Countdown:
    """Answers whole turns: guess a number, hot or cold; the reward is paid turn by turn."""

    def __init__(self, env_config=None, extras=None):
        self.target, self.extras = extras["target"], extras
        self.said, self.is_closed = [], False

    def init(self, prompt):
        *others, last = prompt
        return [*others, {**last, "content": last["content"] + " Guess!"}], {"any": "thing"}

    def step(self, action):
        self.said.append(action)
        if action == "raise":
            raise ValueError("bang")
        if action == "wrong form":
            return {"reward": 1.0}
        if action == str(self.target):
            return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
        said = (f"not {action} <|im_end|>", "try again")
        shown = [{"role": "user", "content": text} for text in said]
        answer = {"observations": shown, "reward": -0.25, "done": False, "metadata": {}}
        return answer | ({"postprocessed_action": "re"} if action == "rewrite" else {})

    def close(self):
        self.is_closed = True
        if "log" in self.extras:
            with open(self.extras["log"], "a", encoding="utf-8") as file:
                file.write(f"{self.said}\n")


class Telling(Countdown):
    """Shows its extras."""

    def __init__(self, env_config=None, extras=None):
        super().__init__(env_config, extras)
        kept = {n: v for n, v in extras.items() if n != "prompt"}
        self.shown = json.dumps(kept)

    def init(self, prompt):
        asked, known = super().init(prompt)
        asked[-1]["content"] += self.shown
        return asked, known


class Moving(Countdown):
    """Asks something else than the prompt."""

    def init(self, prompt):
        return [{"role": "user", "content": "Something else."}], {}


class NoStep:
    """Lacks its step."""

    def init(self, prompt):
        return prompt, {}
