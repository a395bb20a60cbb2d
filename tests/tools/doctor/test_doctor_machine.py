"""`lightrft doctor` without a model: each check has a limit, a remedy and an end."""

import shutil
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.models import planted_kernels

from lightrft.cli.main import main
from lightrft.tools.doctor import check as checks, gpu_checks, machine_checks
from lightrft.tools.doctor.check import Check, Verdict, checked, unchecked

pytestmark = pytest.mark.shard("command_line")

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_a_line_shows_limit_and_remedy_where_they_are_needed():
    check = Check("disk", ">= 20 GB", "free some", lambda: checked(False, "3 GB"))
    assert checks.line(check, checked(True, "30 GB")) == (
        "ok  disk                  30 GB  (limit: >= 20 GB)"
    )
    bad = checks.line(check, checks.run_check(check))
    assert bad == "BAD disk                  3 GB  (limit: >= 20 GB)\n      free some"
    assert checks.line(check, unchecked("no disk")).startswith("--  disk")


def test_a_check_that_raises_or_never_answers_is_bad_and_the_rest_goes_on():
    def fails():
        raise OSError("no such device")

    def hangs():
        time.sleep(30)
        return checked(True, "late")

    lines: list[str] = []
    verdicts = checks.report(
        [
            Check("a", "x", "y", fails),
            Check("b", "x", "y", hangs, deadline_seconds=0.2),
            Check("c", "x", "y", lambda: checked(True, "here")),
        ],
        lines.append,
    )
    assert verdicts == [Verdict.BAD, Verdict.BAD, Verdict.OK]
    assert "OSError: no such device" in lines[0]
    assert "no answer in 0.2 s" in lines[1]
    assert lines[-1] == "1 ok, 2 bad, 0 could not be checked"


def test_b12_a_slow_disk_is_no_broken_driver(monkeypatch):
    wanted = [check.name for check in machine_checks.machine_checks()]
    assert wanted.index("imports") < min(wanted.index(name) for name in ("GPU", "attention kernel"))
    is_over = threading.Event()
    monkeypatch.setattr(checks.importlib, "import_module", lambda _: is_over.wait(30))
    imports = Check("imports", "x", "use a disk of this machine", checks.check_imports)
    slow = replace(imports, deadline_seconds=0.2)
    driver = Check("GPU", "x", "install the driver", lambda: is_over.wait(30), deadline_seconds=0.2)
    lines: list[str] = []
    try:
        verdicts = checks.report([slow, driver], lines.append)
    finally:
        is_over.set()
        # What goes on importing in the background must not outlive the patch.
        for thread in threading.enumerate():
            if thread.name == "check:imports":
                thread.join(30)
    assert verdicts == [Verdict.BAD, Verdict.UNCHECKED]
    assert "use a disk of this machine" in lines[0]
    assert "install the driver" not in "".join(lines)


def test_b13_the_rate_of_a_sync_leaves_out_what_every_sync_costs():
    def report(num_bytes, seconds):
        return SimpleNamespace(num_bytes=num_bytes, seconds=seconds, verify_seconds=0.5)

    # 0.8 GB in 20 ms beside 60 ms of fixed costs: 40 GB/s, not 10.
    probe = gpu_checks.EngineProbe(report(800_000_000, 0.58), report(0, 0.56))
    assert gpu_checks.rate_of(probe).text == "40.0 GB/s, and 60 ms whatever is sent"
    assert gpu_checks.rate_of(probe).verdict is Verdict.OK
    slow = gpu_checks.EngineProbe(report(800_000_000, 0.76), report(0, 0.56))
    assert gpu_checks.rate_of(slow).verdict is Verdict.BAD


@without_gpu
def test_every_check_of_this_machine_has_limit_and_remedy_and_says_what_it_left_out(
    monkeypatch, capsys
):
    for name in ("MIN_DISK", "MIN_MEMORY", "MIN_SHARED_MEMORY"):
        monkeypatch.setattr(machine_checks, name, 1.0)
    wanted = machine_checks.machine_checks()
    assert all(check.limit and check.remedy for check in wanted)
    slow = {"import vllm", "import sglang"}
    chosen = [check for check in wanted if check.name not in slow]
    monkeypatch.setattr(machine_checks, "machine_checks", lambda: chosen)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    left_out = [line for line in lines if line.startswith("-- ")]
    for name in ("GPU", "NCCL", "attention kernel"):
        assert any(line[4:].startswith(name) and "not checked" in line for line in left_out)
    assert any(line.startswith("ok  torch ") for line in lines)
    assert not any(line.startswith("BAD") for line in lines)


@without_gpu
def test_without_a_gpu_nothing_is_timed_and_the_code_says_so(capsys):
    assert main(["doctor", "--gpu"]) == 3
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert all("not checked: torch sees no GPU" in line for line in lines)
    assert last == "0 ok, 0 bad, 10 could not be checked"
    assert all(check.limit and check.remedy for check in gpu_checks.gpu_checks())


def test_what_is_beyond_its_limit_is_bad_and_gives_code_3(monkeypatch, capsys):
    usage = SimpleNamespace(free=64 * 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    chosen = [check for check in machine_checks.machine_checks() if check.name == "disk"]
    monkeypatch.setattr(machine_checks, "machine_checks", lambda: chosen)
    assert main(["doctor"]) == 3
    assert "BAD disk                  0.1 GB free" in capsys.readouterr().out
    assert machine_checks.check_shared_memory().verdict is Verdict.BAD


@pytest.mark.parametrize(
    "version, is_good", [("2.13.0+cu130", True), ("2.10.1", False), ("2.16.0a1", False)]
)
def test_versions_are_compared_as_numbers(version, is_good, monkeypatch):
    monkeypatch.setattr(machine_checks, "installed_version", lambda _: version)
    finding = machine_checks.version_check("torch").examine()
    assert (finding.verdict is Verdict.OK) == is_good


def test_a_missing_package_is_bad_only_if_nothing_works_without(monkeypatch):
    monkeypatch.setattr(machine_checks, "installed_version", lambda _: None)
    names = machine_checks.LIBRARIES
    verdicts = {name: machine_checks.version_check(name).examine().verdict for name in names}
    assert verdicts["torch"] is verdicts["transformers"] is Verdict.BAD
    assert verdicts["vllm"] is verdicts["deepspeed"] is Verdict.UNCHECKED


def test_python_gpu_files_and_limits_of_the_job_are_read(tmp_path):
    assert machine_checks.check_python((3, 10)).verdict is Verdict.BAD
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert machine_checks.device_files(tmp_path) == 2
    limit = tmp_path / "memory.max"
    limit.write_text("1000000\n")
    assert machine_checks.check_memory(limit).verdict is Verdict.BAD
    limit.write_text("max\n")
    assert "the job" not in machine_checks.check_memory(limit).text


def test_the_address_of_gloo_is_that_of_an_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert machine_checks.check_gloo(lambda _: "127.0.1.1").verdict is Verdict.OK
    assert "several need an interface" in machine_checks.check_gloo(lambda _: "127.0.1.1").text
    assert machine_checks.check_gloo(lambda _: "203.0.113.9").verdict is Verdict.BAD

    def nowhere(name):
        raise socket.gaierror(name)

    assert "resolves to nothing" in machine_checks.check_gloo(nowhere).text
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    assert machine_checks.check_gloo().verdict is Verdict.BAD


def test_the_steps_of_a_gpu_compute_what_they_claim_on_a_processor():
    finding = gpu_checks.compare_attention("cpu", torch.float32)
    assert finding.verdict is Verdict.OK
    assert gpu_checks.head_error("cpu", torch.float32) <= 1e-5
    assert gpu_checks.relative_error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0])) == 0.25


@pytest.mark.parametrize(
    "kernel, verdict, text",
    [
        (
            "without_argument",
            Verdict.OK,
            "one kernel for all rows: varlen_attn, tried here with",
        ),
        ("raising", Verdict.BAD, "one call for each row: varlen_attn fails with grouped heads"),
        ("mixing", Verdict.BAD, "one call for each row: varlen_attn computes others than plain"),
    ],
)
def test_the_attention_kernel_is_tried_and_not_read_off_a_signature(
    kernel, verdict, text, monkeypatch
):
    planted_kernels.plant(monkeypatch, getattr(planted_kernels, kernel))
    finding = machine_checks.check_attention("cpu")
    assert finding.verdict is verdict
    assert finding.text.startswith(text)


@pytest.mark.slow
def test_the_engines_steps_find_report_runner_and_parity():
    probe = gpu_checks.EngineProbe()
    gpu_checks.run_probe(probe, "hf", hidden=128, layers=2)
    assert probe.problem == ""
    assert gpu_checks.runner_of(probe).text == "HFEngine"
    assert gpu_checks.canary_of(probe).verdict is Verdict.OK
    assert gpu_checks.parity_of(probe).verdict is Verdict.OK
    assert probe.parity < 1e-3
    assert gpu_checks.sleep_of(probe).verdict is Verdict.UNCHECKED
    # The last sync would send only the norms' weights.
    assert probe.empty_report.num_resident_bytes > 0.95 * probe.report.num_verified_bytes
