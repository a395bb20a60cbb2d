"""The printed script under a real Slurm: a controller and one node on this machine.

Needs Slurm and munge from the system's packages (Debian: slurmctld, slurmd, slurm-client, munge)
and root, under which the node's daemon starts the ranks.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.machine import seconds
from tests.ranks import find_free_port

from lightrft.cli.main import main

TOOLS = ("slurmctld", "slurmd", "sbatch", "scontrol", "srun", "munged")
pytestmark = [
    pytest.mark.shard("command_line"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason="needs root and slurmctld, slurmd, slurm-client, munge",
    ),
]
CONFIGURATION = """\
ClusterName=lightrft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
MessageTimeout=60
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 \
RealMemory=500 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
DEVICES = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
WORKER = """#!/bin/bash
echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS" \
  >> "{log}"
[ -n "${{SLURM_RESTART_COUNT:-}}" ] || exit {code}
"""


class Cluster:
    """One controller and one node; `run` runs a command that speaks to them."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        for name in ("state", "spool"):
            (folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        ports = {"controller_port": find_free_port(), "node_port": find_free_port()}
        text = CONFIGURATION.format(host=host, folder=folder, **ports)
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(DEVICES)
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        # sbatch passes its environment on, and this one may be that of a job or of a test.
        for name in [n for n in self.environment if n.startswith(("SLURM_", "SBATCH_", "OMP_"))]:
            if name != "SLURM_CONF":
                del self.environment[name]

    def start(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            *(f"--{what}-file={self.folder}/munge.{what}" for what in ("pid", "log", "seed")),
            f"--socket={self.folder}/munge.socket",
        )
        self.wait_until(lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D")
        self.wait_until(lambda: "idle" in self.run("sinfo", "--noheader", "-o", "%T").stdout)

    def _daemon(self, *command):
        with (self.folder / f"{command[0]}.out").open("w") as log:
            self.processes.append(
                subprocess.Popen(
                    command, env=self.environment, stdout=log, stderr=subprocess.STDOUT
                )
            )

    def run(self, *command):
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds(120),
            check=False,
        )

    def wait_until(self, is_so):
        limit = time.monotonic() + seconds(240)
        while not is_so():
            told = "\n".join(p.read_text()[-1500:] for p in sorted(self.folder.glob("*.out")))
            assert time.monotonic() < limit, told
            assert all(process.poll() is None for process in self.processes), told
            time.sleep(0.5)

    def stop(self):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def cluster():
    # Sockets have short names: not in pytest's folders.
    folder = Path("/tmp") / f"lightrft-slurm-{os.getpid()}"
    folder.mkdir(mode=0o755)
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


def write_job(cluster, capsys, *, code):
    argv = ("--nodes", "1", "--gpus_per_node", "2", "--cpus_per_task", "2", "--time", "10:00")
    assert main(["launch", "slurm", "--print", *argv, "--", "--pretrain", "m"]) == 0
    worker = cluster.folder / "worker"
    worker.write_text(WORKER.format(log=cluster.folder / "ranks", code=code))
    worker.chmod(0o755)
    job = cluster.folder / "job.sh"
    job.write_text(capsys.readouterr().out.replace(sys.executable, str(worker)))
    return job


def state_of(cluster, job_id):
    shown = cluster.run("scontrol", "show", "job", "--oneliner", job_id).stdout
    return dict(part.split("=", 1) for part in shown.split() if "=" in part)


def ranks_of(cluster):
    log = cluster.folder / "ranks"
    return sorted(log.read_text().splitlines()) if log.exists() else []


@pytest.mark.parametrize("code, end", [(0, "COMPLETED"), (7, "FAILED")], ids=["finished", "failed"])
def test_slurm_takes_the_script_and_starts_every_rank(cluster, capsys, code, end):
    job = write_job(cluster, capsys, code=code)
    tried = cluster.run("sbatch", "--test-only", str(job))
    assert tried.returncode == 0, tried.stderr
    assert "to start at" in tried.stderr
    job_id = cluster.run("sbatch", "--parsable", str(job)).stdout.strip()
    cluster.wait_until(lambda: state_of(cluster, job_id)["JobState"] == end)
    assert state_of(cluster, job_id)["ExitCode"] == f"{code}:0"
    port = 20000 + int(job_id) % 20000
    host = socket.gethostname().partition(".")[0]
    assert ranks_of(cluster) == [f"{rank}/2 {rank}/2 {host}:{port} 2" for rank in range(2)]


def test_a_run_that_stopped_before_its_time_is_queued_again(cluster, capsys):
    job = write_job(cluster, capsys, code=75)
    job_id = cluster.run("sbatch", "--parsable", str(job)).stdout.strip()
    cluster.wait_until(lambda: state_of(cluster, job_id).get("Restarts") == "1")
    # Slurm waits two minutes before it starts the job again: now, for a test.
    cluster.wait_until(lambda: state_of(cluster, job_id)["JobState"] == "PENDING")
    cluster.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")
    cluster.wait_until(lambda: state_of(cluster, job_id)["JobState"] == "COMPLETED")
    assert len(ranks_of(cluster)) == 4
    assert "queued again" in next(cluster.folder.glob("lightrft_*.log")).read_text()
