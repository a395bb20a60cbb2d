"""Classes in the shapes that SkyRL-Gym's own have: grades, turns, tools in the text, a database."""

import re
import sqlite3
from pathlib import Path


class TextEnv:
    """Stands for the package's base class."""

    def __init__(self):
        self.turns = 0
        self.max_turns = 1
        self.tools = {}

    def init(self, prompt):
        return prompt, {}

    def close(self):
        pass

    def get_metrics(self):
        return {"steps": self.turns}


def graded(text, truth, *, form=0.0):
    """1 for the right number behind the mark, `form` for a wrong one."""
    found = re.findall(r"#### (-?\d+)", text)
    return 0.0 if not found else 1.0 if found[-1] == truth else form


class Grade(TextEnv):
    """One turn, graded by the text."""

    def __init__(self, env_config=None, extras={}):  # noqa: B006
        super().__init__()
        assert "ground_truth" in extras["reward_spec"], "ground_truth is required"
        self.truth = extras["reward_spec"]["ground_truth"]

    def step(self, action):
        reward = graded(action, self.truth)
        return {"observations": [], "reward": reward, "done": True, "metadata": {"said": action}}


class Tries(Grade):
    """Several turns, each paid for its form; the number of turns is told from outside."""

    def __init__(self, env_config=None, extras={}):  # noqa: B006
        super().__init__(env_config, extras)
        self.max_turns = int(extras["max_turns"])

    def step(self, action):
        self.turns += 1
        reward = graded(action, self.truth, form=0.2 / self.max_turns)
        done = self.turns >= self.max_turns or reward == 1.0
        said = [] if done else [{"role": "user", "content": "Try again."}]
        return {"observations": said, "reward": reward, "done": done, "metadata": {}}


class Search(TextEnv):
    """A search in the text of a turn, by an address of the options; the talk is graded."""

    def __init__(self, env_config, extras={}):  # noqa: B006
        super().__init__()
        self.truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras.get("max_turns", 2)
        self.tools["search"] = lambda words: f"{env_config.search_url}?{words}&{env_config['topk']}"
        self.talk = []

    def step(self, action):
        self.turns += 1
        self.talk.append(action)
        if self.turns >= self.max_turns or "<answer>" in action:
            reward = float(f"<answer>{self.truth}</answer>" in "".join(self.talk))
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        try:
            words = re.search("<search>(.*?)</search>", action).group(1)
            text = self.tools["search"](words)
        except Exception as error:  # noqa: BLE001
            text = str(error)
        said = {"role": "user", "content": f"\n<information>{text}</information>\n"}
        return {"observations": [said], "reward": 0, "done": False, "metadata": {"tool": "search"}}


class Query(TextEnv):
    """Questions to a database in a folder of the options, and a reminder of the turns left."""

    def __init__(self, env_config, extras={}):  # noqa: B006
        super().__init__()
        self.file = Path(env_config.db_path, extras["db_id"] + ".sqlite")
        if not self.file.exists():
            raise FileNotFoundError(f"Database file not found at: {self.file}")
        self.truth, self.max_turns = extras["reward_spec"]["ground_truth"], extras["max_turns"]

    def ask(self, query):
        with sqlite3.connect(self.file) as connection:
            return connection.execute(query).fetchall()

    def step(self, action):
        self.turns += 1
        solution = re.search("<solution>(.*?)</solution>", action)
        if solution or self.turns >= self.max_turns:
            is_right = solution and self.ask(solution.group(1)) == self.ask(self.truth)
            reward = 1.0 if is_right else -1.0
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        rows = self.ask(re.search("<sql>(.*?)</sql>", action).group(1))
        left = f"<reminder>{self.max_turns - self.turns} turns left</reminder>"
        said = [{"role": "user", "content": str(rows)}, {"role": "user", "content": left}]
        return {"observations": said, "reward": 0.0, "done": False, "metadata": {}}


class Tools(TextEnv):
    """Several tools by name; a wrong call is told, and the prompt gets their list."""

    def __init__(self, env_config=None, extras={}):  # noqa: B006
        super().__init__()
        self.truth, self.max_turns = extras["reward_spec"]["ground_truth"], 4
        self.tools = {"python": lambda code: str(eval(code)), "search": lambda words: words}
        self.talk = []

    def init(self, prompt):
        listed = f" You have {', '.join(self.tools)}."
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + listed}], {}

    def step(self, action):
        self.turns += 1
        self.talk.append(action)
        if "####" in action or self.turns >= self.max_turns:
            reward = graded("\n".join(self.talk), self.truth)
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        try:
            found = re.search(r"<tool><(\w+)>(.*?)</\1></tool>", action)
            if found is None:
                raise ValueError("No <tool>...</tool> block found.")
            text = self.tools[found.group(1)](found.group(2))
        except Exception as error:  # noqa: BLE001
            text = f"{type(error).__name__}: {error}"
        said = [{"role": "user", "content": text}]
        return {
            "observations": said,
            "reward": 0,
            "done": False,
            "metadata": {},
            "postprocessed_action": action,
        }


class Rewrites(Grade):
    """Puts other words into the model's mouth."""

    def step(self, action):
        return {**super().step(action), "postprocessed_action": action[:2]}
