"""The printed Slurm script: its content, its syntax, and what it does under a stand-in of Slurm."""

import os
import shutil
import subprocess
import sys

import pytest

from lightrft.cli.main import main

SRUN = """#!/bin/bash
[ "$2" = --cpus-per-task=8 ] || exit 99
shift 2  # --kill-on-bad-exit=1 --cpus-per-task=8
worst=0
for rank in 0 1 2 3; do
  export SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2
  "$@" || worst=$?
done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo node7; echo node8; else echo "scontrol $*" >> "$LOG"; fi
"""
WORKER = """#!/bin/bash
echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT" >> "$LOG"
printf '[%s]' "$@" >> "$LOG"; echo >> "$LOG"
exit "$CODE"
"""


def printed(capsys, *argv):
    code = main(["launch", "slurm", *argv])
    return code, capsys.readouterr()


def script_of(capsys, *argv):
    code, shown = printed(capsys, "--print", *argv)
    assert (code, shown.err) == (0, "")
    return shown.out


def test_the_script_asks_for_the_machines(capsys):
    asked = "--nodes 2 --gpus_per_node 4 --time 2-00:00:00 --job_name big --partition gpu,long"
    text = script_of(capsys, *asked.split(), "--", "--pretrain", "m")
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    for wanted in (
        "--job-name=big",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--time=2-00:00:00",
        "--output=big_%j.log",
        "--requeue",
        "--signal=TERM@600",
        "--partition=gpu,long",
    ):
        assert f"#SBATCH {wanted}" in directives
    assert not any("--account" in line for line in directives)
    first_command = text.index("set -euo pipefail")
    assert all(text.index(line) < first_command for line in directives)


@pytest.mark.parametrize("code, requeues", [(0, False), (75, True), (7, False)])
def test_the_script_starts_every_rank_and_passes_its_code_on(tmp_path, capsys, code, requeues):
    prompt = 'it\'s $HOME; {} "now"'
    text = script_of(capsys, "--nodes", "2", "--", "--pretrain", "m", "--input_template", prompt)
    folder = tmp_path / "bin"
    folder.mkdir()
    text = text.replace(sys.executable, "worker")
    (tmp_path / "job.sh").write_text(text)
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL), ("worker", WORKER)):
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    bash = shutil.which("bash")
    assert subprocess.run([bash, "-n", "job.sh"], cwd=tmp_path, check=False).returncode == 0
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "CODE": str(code),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "40123",
        "SLURM_CPUS_PER_TASK": "8",
    }
    done = subprocess.run([bash, "job.sh"], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == code
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0:8:2] == [f"{rank}/4 {rank % 2}/2 node7:20123" for rank in range(4)]
    expected = ["-m", "lightrft.cli.train", "--pretrain", "m", "--input_template", prompt]
    assert lines[1] == "".join(f"[{part}]" for part in expected)
    assert (lines[8:] == ["scontrol requeue 40123"]) == requeues
