"""Whatever happens to the files of a run's checkpoints, the newest whole step is continued.

Each case damages files of three steps of an actor and a critic and loads. What must come is decided
here from the files alone: the newest step of which no file of either model has changed. The weights
must be those of that step to the last bit, and so must be the weights one step later (optimizer and
schedule) and the next random numbers; or there is one line that names what is damaged.
"""

import hashlib
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.ranks import run_multiprocess

from lightrft.config import TrainConfig
from lightrft.config.files import FileEntry
from lightrft.run.loop import LoopState, load_run, save_run
from lightrft.stages.policy.maker import PolicyMemory
from lightrft.stages.stage import TrainedModel, TrainedModels
from lightrft.strategy import get_fake_strategy, get_strategy
from lightrft.strategy.distributed.process_end import CheckpointError

pytestmark = pytest.mark.shard("damage")

STEPS = (1, 2, 3)
MODELS = ("actor", "critic")
BACKENDS = {
    "fake": None,
    "fsdp": {"fsdp": True},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
}


class Run:
    """A small actor and critic, their schedules, and what their states were at every step."""

    def __init__(self, strategy, folder):
        self.strategy, self.folder = strategy, folder
        self.config = TrainConfig(ckpt_path=str(folder), max_ckpt_num=5, max_ckpt_mem=1000)
        trained = []
        for seed, name in enumerate(MODELS):
            torch.manual_seed(seed)
            model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
            model = strategy.prepare_model(model, is_training=True)
            optimizer = strategy.create_optimizer(model, lr=1e-2)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
            trained.append(TrainedModel(name, *strategy.prepare((model, optimizer, schedule))))
        self.models = TrainedModels(tuple(trained))
        self.memory = PolicyMemory.initial(self.config)
        self.weights, self.draws = {}, {}

    def train(self, number):
        """One optimizer step of both models; the data are a function of the number."""
        rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
        for item in self.models.trained:
            with self.strategy.accumulation(1, item.optimizer):
                loss = item.model(rows).square().mean()
                self.strategy.backward(loss, item.model, item.optimizer)
                self.strategy.optimizer_step(item.optimizer, item.model, item.scheduler)

    def bits(self):
        """A hash of this rank's weights."""
        digest = hashlib.sha256()
        for item in self.models.trained:
            for entry in self.strategy.parameter_source(item.model).parameters():
                digest.update(entry.local_shard.detach().numpy().tobytes())
        return digest.hexdigest()

    def write(self):
        """The checkpoints, and what a load of each must bring back."""
        for step in STEPS:
            self.train(step)
            self.weights[step] = self.bits()
            self.save(step)
            self.draws[step] = draw()
        self.train(STEPS[-1] + 1)
        self.weights[STEPS[-1] + 1] = self.bits()

    def save(self, step):
        in_flight = replace(self.memory.in_flight, num_requests=10 * step)
        memory = replace(self.memory, in_flight=in_flight)
        state = {**LoopState(num_steps=step).to_client_state(), **memory.to_client_state()}
        save_run(self.strategy.checkpoints, self.config, state, self.models)

    def load(self):
        """The step that a load chooses, or its error; everything is spoiled before."""
        self.train(99)
        torch.manual_seed(99)
        try:
            found = load_run(self.strategy.checkpoints, self.config, self.memory, self.models)
        except CheckpointError as error:
            return str(error)
        if found is None:
            return None
        state, memory = found
        step = state.num_steps
        assert memory.num_requests == 10 * step
        assert self.bits() == self.weights[step], step
        assert draw() == self.draws[step], step
        self.train(step + 1)
        assert self.bits() == self.weights[step + 1], step
        return step


def damage(path, dice, folder):
    """Changes one file; what was done, for the message of a failure."""
    before = path.read_bytes()
    kind = dice.choice(
        ["flip", "flip", "cut", "delete", "noise", "append", "swap", "folder", "link"]
    )
    if kind == "flip" and before:
        place = dice.randrange(len(before))
        changed = bytes([before[place] ^ 1 << dice.randrange(8)])
        path.write_bytes(before[:place] + changed + before[place + 1 :])
    elif kind == "cut":
        path.write_bytes(before[: dice.randrange(len(before) or 1)])
    elif kind in ("delete", "folder", "link"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to("/etc/passwd")
    elif kind == "noise":
        path.write_bytes(dice.randbytes(max(1, len(before))))
    elif kind == "append":
        path.write_bytes(before + dice.randbytes(dice.randrange(1, 9)))
    elif kind == "swap":
        files = [other for other in folder.rglob(path.name) if other.is_file()]
        path.write_bytes(dice.choice(files).read_bytes())
    return f"{kind} {path.relative_to(folder)}"


def says_the_same(path, before):
    """Return whether a file says what it said; of a manifest, whatever its spaces are."""
    if path.is_symlink() or not path.is_file():
        return False
    now = path.read_bytes()
    if path.name != "manifest.json" or now == before:
        return now == before
    try:
        return json.dumps(json.loads(now)) == json.dumps(json.loads(before))
    except ValueError:
        return False


def expected_step(contents, folder):
    """The newest step of which every file of every model says what it said, and none was added."""
    broken = {p for p, before in contents.items() if not says_the_same(p, before)}
    added = {p for p in folder.rglob("*.safetensors") if p not in contents}
    for step in reversed(STEPS):
        if not any(f"global_step{step}" in path.parts for path in broken | added):
            return step
    return None


def choose_files(contents, dice):
    """One file, or several, or one of every step."""
    paths = sorted(contents)
    if dice.random() < 0.1:
        return [
            dice.choice([p for p in paths if f"global_step{step}" in p.parts]) for step in STEPS
        ]
    return dice.sample(paths, dice.choice([1, 1, 1, 2, 3]))


def run_case(run, contents, dice):
    """Damages, loads, compares."""
    strategy, done = run.strategy, []
    if strategy.is_rank_0():
        done = [damage(path, dice, run.folder) for path in choose_files(contents, dice)]
        if dice.random() < 0.1:
            folder = run.folder / "_actor" / f"global_step{dice.choice(STEPS)}"
            if folder.is_dir():
                (folder / "rank_00007.safetensors").write_bytes(b"not of this checkpoint")
                done.append("add a file")
    wanted, done = strategy.gather_objects((expected_step(contents, run.folder), done))[0]
    found = run.load()
    if wanted is None:
        assert isinstance(found, str), (done, found)
        assert "\n" not in found, (done, found)
        assert all(f"global_step{step}" in found for step in STEPS), (done, found)
        return
    assert found == wanted, (done, found, wanted)


def draw():
    return torch.rand(3).tolist()


def run_backends(rank, world_size, backends, folder, num_cases, seed):
    """Every case of several backends in one process, which imports what they need once."""
    torch.set_num_threads(1)
    if any(BACKENDS[name] is not None for name in backends):
        # Kept over all backends: to end one and start the next at the same address is a race.
        torch.distributed.init_process_group("gloo")
    return [
        run_cases(rank, world_size, name, f"{folder}/{name}/checkpoints", num_cases, seed)
        for name in backends
    ]


def run_cases(rank, world_size, backend, folder, num_cases, seed):
    """Every case on one set of checkpoints, which is put back after each."""
    settings = {
        "train_batch_size": world_size,
        "micro_train_batch_size": 1,
        "bf16": False,
        "timeout_minutes": 2.0,
        **(BACKENDS[backend] or {}),
    }
    build = get_fake_strategy if BACKENDS[backend] is None else get_strategy
    folder, dice = Path(folder), random.Random(seed)
    with build(settings) as strategy:
        run = Run(strategy, folder)
        run.write()
        contents = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        kept = folder.with_name("kept")
        if rank == 0:
            shutil.copytree(folder, kept)
        for _ in range(num_cases):
            strategy.barrier()
            run_case(run, contents, dice)
            strategy.barrier()
            if rank == 0:
                shutil.rmtree(folder)
                shutil.copytree(kept, folder)
    return num_cases


SHARDED = tuple(name for name, settings in BACKENDS.items() if settings is not None)


@pytest.mark.full
@pytest.mark.deepspeed
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "backends, world_size, num_cases",
    [
        (tuple(BACKENDS), 1, 20),
        pytest.param(tuple(BACKENDS), 1, 360, marks=pytest.mark.slow),
        pytest.param(SHARDED, 2, 100, marks=pytest.mark.slow),
    ],
    ids=["100 cases", "1800 cases", "400 cases of two ranks"],
)
def test_the_newest_whole_step_is_continued_whatever_is_damaged(
    tmp_path, backends, world_size, num_cases
):
    # Other cases in every session; the seed stands in the message of a failure.
    seed = random.randrange(2**32)
    done = run_multiprocess(
        run_backends,
        world_size,
        timeout_seconds=1500,
        args=(backends, str(tmp_path), num_cases, seed),
    )
    assert done == [[num_cases] * len(backends)] * world_size, seed


def test_a_load_that_does_not_verify_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(FileEntry, "damage", lambda entry, folder: None)
    with pytest.raises(AssertionError):
        run_cases(0, 1, "fake", str(tmp_path / "checkpoints"), 40, 1)
