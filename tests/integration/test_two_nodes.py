"""Two nodes on one machine: network namespaces with addresses, links and host tables of their own.

Each node resolves its own name to a loopback address, as Debian writes it into /etc/hosts.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.machine import seconds
from tests.programs import run_program
from tests.runs import lines, rollout_options, tiny_models, words, write_inputs

pytestmark = pytest.mark.shard("training")

LIMIT_SECONDS = 60.0
START_SECONDS = 240.0
FIRST, SECOND = "10.77.91.1", "10.77.91.2"
DEADLINE_MINUTES = 0.35


@dataclass(frozen=True)
class Node:
    """A namespace.

    Args:
        name: Of the namespace.
        address: In the network between the nodes.
    """

    name: str
    address: str

    def command(self, *arguments):
        return [shutil.which("ip") or "ip", "netns", "exec", self.name, *arguments]

    def cut_off(self):
        """Nothing leaves or reaches the node any more, as after a loss of power."""
        ip("-n", self.name, "link", "set", "between", "down")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def nodes():
    """Two nodes with a cable between them; skips where namespaces may not be made."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is missing")
    names = [f"lightrft{os.getpid()}{side}" for side in "ab"]
    made = [Node(name, address) for name, address in zip(names, (FIRST, SECOND), strict=True)]
    tables = [Path("/etc/netns", name) for name in names]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ends = ("between", "netns", names[0], "type", "veth", "peer", "between", "netns")
            ip("link", "add", *ends, names[1])
            for node, table in zip(made, tables, strict=True):
                ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", "between")
                for device in ("lo", "between"):
                    ip("-n", node.name, "link", "set", device, "up")
                table.mkdir(parents=True)
                own = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"
                (table / "hosts").write_text(own)
        except (subprocess.CalledProcessError, OSError) as error:
            reason = error.stderr.strip() if hasattr(error, "stderr") else error
            pytest.skip(f"network namespaces may not be made here: {reason}")
        yield made
    finally:
        for name, table in zip(names, tables, strict=True):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
            shutil.rmtree(table, ignore_errors=True)


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    kept["PYTHONPATH"] = str(Path(__file__).parents[2])
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **changes}


def start_rank(node, rank, folder):
    changes = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": FIRST,
        "MASTER_PORT": "29511",
    }
    with (folder / f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(
            node.command(sys.executable, __file__, str(folder)),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(**changes),
        )


def run_rank(folder):
    """One process of a node; what it raises becomes its exit code as in the command."""
    from lightrft.cli.errors import run_guarded
    from lightrft.strategy import get_strategy
    from lightrft.strategy.distributed.deadlines import phase

    def program():
        settings = {
            "fsdp": True,
            "bf16": False,
            "train_batch_size": 2,
            "micro_train_batch_size": 1,
            "timeout_minutes": START_SECONDS / 60,
        }
        with get_strategy(settings) as strategy:
            rank = int(os.environ["RANK"])
            gathered = strategy.gather_objects([rank, os.environ.get("GLOO_SOCKET_IFNAME")])
            Path(folder, f"together{rank}").write_text(repr(gathered))
            while not Path(folder, "cut").exists():
                time.sleep(0.1)
            with phase("wait for the other node", 60 * DEADLINE_MINUTES):
                strategy.gather_objects(rank)
        return 0

    return run_guarded("two nodes", program)


def wait(process, nominal):
    try:
        return process.wait(seconds(nominal))
    except subprocess.TimeoutExpired:
        return None


def wait_for(folder, processes, names):
    limit = time.monotonic() + seconds(START_SECONDS)
    while not all((folder / name).exists() for name in names):
        texts = [path.read_text()[-2000:] for path in sorted(folder.glob("*.log"))]
        assert time.monotonic() < limit, texts
        assert all(process.poll() is None for process in processes), texts
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_nodes_named_by_loopback_meet_and_a_lost_one_ends_the_other_in_time(nodes, tmp_path):
    processes = [start_rank(node, rank, tmp_path) for rank, node in enumerate(nodes)]
    try:
        wait_for(tmp_path, processes, ["together0", "together1"])
        met = "[[0, 'between'], [1, 'between']]"
        assert [(tmp_path / f"together{rank}").read_text() for rank in range(2)] == [met, met]
        nodes[1].cut_off()
        begin = time.monotonic()
        (tmp_path / "cut").touch()
        code = wait(processes[0], 3 * LIMIT_SECONDS)
        took = time.monotonic() - begin
    finally:
        for process in processes:
            process.kill()
            process.wait()
    text = (tmp_path / "rank0.log").read_text()
    assert code == 7, text[-3000:]
    assert took <= seconds(LIMIT_SECONDS)
    assert "deadline: rank 0" in text
    assert "'wait for the other node'" in text


REWARD = """
def score(responses):
    return [sum(c.isdigit() for c in r) / max(1, len(r)) for r in responses]
"""
STRATEGIES = {"hsdp": {"fsdp_shard_size": 2}, "zero2": {"fsdp": False, "zero_stage": 2}}


def start_training(node, folder, options):
    """Two ranks on a node under torchrun, which meet those of the other one."""
    launch = {
        "nnodes": 2,
        "nproc-per-node": 2,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"{FIRST}:29512",
        "max-restarts": 0,
        "rdzv-conf": f"is_host={int(node.address == FIRST)}",
        "local-addr": node.address,
    }
    command = (sys.executable, "-m", "torch.distributed.run", *words(launch))
    with (folder / f"{node.name}.log").open("w") as log:
        return subprocess.Popen(
            node.command(*command, "-m", "lightrft.cli.train", *words(options)),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )


def steps_of(folder):
    path = folder / "run/metrics.jsonl"
    rows = lines(path) if path.exists() else []
    return [row for row in rows if "grad_norm" in row]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["hsdp", pytest.param("zero2", marks=pytest.mark.deepspeed)])
def test_two_nodes_train_on_real_questions_and_end_when_one_is_killed(
    strategy, nodes, tmp_path, test_data
):
    write_inputs(tiny_models(tmp_path, "model"), [], reward=REWARD)
    options = rollout_options(
        tmp_path,
        prompt_data=test_data / "gsm8k/train.jsonl",
        input_key="question",
        label_key="answer",
        apply_chat_template=True,
        max_samples=64,
        prompt_max_len=512,
        generate_max_len=16,
        train_batch_size=16,
        micro_train_batch_size=4,
        timeout_minutes=START_SECONDS / 60,
        max_steps=500,
        **STRATEGIES[strategy],
    )
    agents = [start_training(node, tmp_path, options) for node in nodes]
    try:
        limit = time.monotonic() + seconds(3 * START_SECONDS)
        while len(steps_of(tmp_path)) < 3:
            texts = [path.read_text()[-3000:] for path in sorted(tmp_path.glob("*.log"))]
            assert time.monotonic() < limit, texts
            assert all(agent.poll() is None for agent in agents), texts
            time.sleep(0.5)
        assert all(row["grad_norm"] > 0 for row in steps_of(tmp_path)[:3])
        listed = run_program("ip", "netns", "pids", nodes[1].name, code=0)
        for number in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
        begin = time.monotonic()
        code = wait(agents[0], 3 * LIMIT_SECONDS)
        took = time.monotonic() - begin
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    text = (tmp_path / f"{nodes[0].name}.log").read_text()
    assert code == 1, text[-3000:]  # torchrun's own, whatever its processes ended with
    assert took <= seconds(LIMIT_SECONDS)
    assert "ended because another rank failed" in text, text[-3000:]


if __name__ == "__main__":
    sys.exit(run_rank(*sys.argv[1:]))
