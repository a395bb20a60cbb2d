"""Commands, rewards and start hooks of other packages, by entry points."""

import os
import textwrap

import pytest
from tests.programs import run_python

PLUGIN = """
    import sys

    def run(argv):
        print("ran", *argv)
        return 3

    class Length:
        needs_labels = False

        def __init__(self, config, name):
            self.name, self.scale = name, config.reward_timeout_seconds

        def score(self, prompts, responses, labels, columns):
            from lightrft.rewards import RewardResult

            return [RewardResult(self.scale * len(text)) for text in responses]

        def close(self):
            pass
"""


@pytest.fixture
def lightrft(tmp_path):
    """Runs `lightrft` or a program where distributions with entry points are installed."""

    def plant(name, entry_points, module=None):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(entry_points)
        if module is not None:
            (tmp_path / f"{name.replace('-', '_')}.py").write_text(textwrap.dedent(module))

    def run(*argv, program="import sys; from lightrft.cli.main import main; sys.exit(main())"):
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        return run_python("-c", program, *argv, env={**os.environ, "PYTHONPATH": path})

    run.plant = plant
    return run


@pytest.mark.full
def test_an_installed_package_brings_a_command(lightrft):
    lightrft.plant("my-plugin", "[lightrft.commands]\nweigh = my_plugin:run\n", PLUGIN)
    done = lightrft("weigh", "a", "--b")
    assert (done.returncode, done.stdout.strip()) == (3, "ran a --b")
    listed = next(line for line in lightrft("--help").stdout.splitlines() if "weigh " in line)
    assert listed.split() == ["weigh", "of", "the", "package", "my-plugin"]
    assert "did you mean weigh" in lightrft("wiegh").stderr
    assert "weigh" in lightrft("completion", "bash").stdout


def test_an_installed_package_brings_a_reward(lightrft):
    lightrft.plant("my-plugin", "[lightrft.rewards]\nlength = my_plugin:Length\n", PLUGIN)
    program = (
        "from lightrft.config import TrainConfig\n"
        "from lightrft.rewards import build_reward\n"
        "with build_reward(['length'], config=TrainConfig(reward_timeout_seconds=2)) as reward:\n"
        "    (found,) = reward.score(['p'], ['abc'], [None], {})\n"
        "    print(reward.name, found.reward)\n"
        "build_reward(['lenght'])\n"
    )
    done = lightrft(program=program)
    assert done.stdout.split() == ["length", "6.0"]
    assert "unknown reward function 'lenght'" in done.stderr
    assert "did you mean length" in done.stderr


def test_an_installed_package_brings_a_start_hook(lightrft):
    lightrft.plant("my-plugin", "[lightrft.start_hooks]\nlook = my_plugin:run\n", PLUGIN)
    program = (
        "from lightrft.config.registry import START_HOOKS\n"
        "print(*START_HOOKS, *START_HOOKS.installed, START_HOOKS.load('look')(['now']))\n"
    )
    words = lightrft(program=program).stdout.split()
    assert words == ["ran", "now", "memory_budget", "compile_verdict", "look", "3"]


@pytest.mark.parametrize(
    "value, module, code, message",
    [
        ("my_plugin:walk", PLUGIN, 2, "my_plugin:walk cannot be loaded: AttributeError"),
        ("my_plugin:run", "1 / 0", 2, "cannot be loaded: ZeroDivisionError: division by zero"),
        ("my_plugin:run", "import sys; sys.exit(5)", 2, "cannot be loaded: SystemExit: 5"),
        ("my_plugin:run", "import fur", 3, "needs the package fur, which is not installed: pip in"),
        ("gone:run", PLUGIN, 3, "lightrft weigh needs the package gone, which is not installed"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(lightrft, value, module, code, message):
    lightrft.plant("my-plugin", f"[lightrft.commands]\nweigh = {value}\n", module)
    done = lightrft("weigh")
    (line,) = done.stderr.splitlines()
    assert message in line
    assert done.returncode == code
    assert lightrft("--help").returncode == 0


def test_one_name_of_two_packages_is_refused_and_ours_stay(lightrft):
    for name in ("my-plugin", "your-plugin"):
        entries = "weigh = my_plugin:run\n" if name == "my-plugin" else "weigh = your_plugin:run\n"
        text = f"[lightrft.commands]\n{entries}train = my_plugin:run\n"
        lightrft.plant(name, text, PLUGIN)
    (line,) = lightrft("weigh").stderr.splitlines()
    assert "command 'weigh' is brought by two packages, " in line
    assert "my-plugin" in line
    assert "your-plugin" in line
    assert "usage: lightrft train" in lightrft("train", "--help").stdout


def test_a_command_says_which_extra_brings_what_it_lacks(lightrft):
    lightrft.plant("my-plugin", "[lightrft.commands]\nweigh = my_plugin:run\n", PLUGIN)
    program = (
        "import sys; sys.modules['peft'] = None\n"
        "import lightrft.cli.main as cli\n"
        "def run(argv):\n"
        "    import peft\n"
        "cli.COMMANDS.entries['weigh'] = run\n"
        "sys.exit(cli.main(['weigh']))\n"
    )
    done = lightrft(program=program)
    assert done.returncode == 3
    assert "needs the package peft, which is not installed: pip install 'lightrft[lora]'" in (
        done.stderr
    )


@pytest.mark.full
def test_an_extra_that_only_transformers_asks_for_is_named_too(lightrft, tmp_path):
    argv = ["init-model", str(tmp_path / "vl"), "--preset", "tiny-qwen2.5-vl"]
    program = (
        "import sys; sys.modules['PIL'] = None\n"
        "import lightrft.cli.main as cli\n"
        f"sys.exit(cli.main({argv!r}))\n"
    )
    done = lightrft(program=program)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert "the package PIL, which is not installed: pip install 'lightrft[vision]'" in line


@pytest.mark.parametrize("names", [("PIL", "Torchvision"), ("Torchvision", "PIL")])
def test_of_several_missing_packages_the_same_one_is_named(names):
    """Transformers names them in the order of a set."""
    from lightrft.config.registry import missing_module

    error = ImportError("\n".join(f"Reader requires the {name} library but it" for name in names))
    assert missing_module(error) == "PIL"


def test_from_a_source_tree_a_missing_package_is_named(monkeypatch):
    """Nothing is installed there that could say which extra has it."""
    from lightrft.config.registry import installation_of

    monkeypatch.setattr("sys.path", [])
    assert installation_of("psutil.cpu") == "pip install psutil"
