"""Checks of `lightrft doctor` on any machine, in seconds and without a model."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from lightrft.cli.preflight import device_files, environment_problems
from lightrft.config import ConfigError
from lightrft.engines.factory import ENGINES
from lightrft.engines.libraries import LIBRARIES, installed_version
from lightrft.tools.doctor.check import Check, CheckResult, check_imports, checked, unchecked
from lightrft.tools.rewards.sandbox import REMEDIES, Sandbox

GIGABYTE = 1e9
_ENGINES = [name for name in ENGINES if name in LIBRARIES]
REQUIRED = ("torch", "transformers")
MIN_SHARED_MEMORY = 1.0 * GIGABYTE
MIN_DISK = 20.0 * GIGABYTE
MIN_MEMORY = 4.0 * GIGABYTE
MIN_NCCL = (2, 18)
IMPORT_SECONDS = 90.0
LIBRARY_SECONDS = 120.0


def machine_checks() -> list[Check]:
    """Return all checks of a machine, in the order of the report."""
    return [*_package_checks(), *_device_checks(), *_host_checks()]


def _package_checks() -> list[Check]:
    return [
        Check("Python", ">= 3.11, < 3.14", "uv python install 3.11", check_python),
        *map(version_check, LIBRARIES),
        Check(
            "imports",
            f"{LIBRARY_SECONDS:g} s",
            "install Python's packages on a disk of this machine, not on a network file system",
            check_imports,
            deadline_seconds=LIBRARY_SECONDS,
        ),
        *map(import_check, _ENGINES),
    ]


def _device_checks() -> list[Check]:
    return [
        Check(
            "GPU",
            "torch sees every device of /dev",
            "install the driver and a torch built for CUDA, or unset CUDA_VISIBLE_DEVICES",
            check_gpu,
        ),
        Check("NCCL", ">= 2.18", "install a torch built for CUDA", check_nccl, needs_gpu=True),
        Check(
            "attention kernel",
            "FlashAttention for packed sequences, from compute capability 8.0",
            "runs pad their rows, or with --packing_samples call it for each of them: use a GPU "
            "from Ampere on, and another version of torch where the trial failed",
            check_attention,
            needs_gpu=True,
        ),
        Check(
            "compiled kernels",
            "the C++ extension is built, with CUDA where there is a GPU",
            "install a compiler (and nvcc) and build lightrft-kernels; torch serves until then",
            check_kernels,
        ),
    ]


def _host_checks() -> list[Check]:
    return [
        Check(
            "gloo address",
            "other processes reach the address that gloo listens on",
            "set GLOO_SOCKET_IFNAME on every node to the interface between the nodes",
            check_gloo,
        ),
        Check(
            "launcher's variables",
            "none, or all of RANK, LOCAL_RANK, WORLD_SIZE, MASTER_*",
            "unset them or start by torchrun",
            check_environment,
        ),
        Check(
            "shared memory",
            ">= 1 GB free in /dev/shm",
            "start the container with --shm-size=8g or --ipc=host",
            check_shared_memory,
        ),
        Check(
            "memory",
            ">= 4 GB available",
            "end other programs, or raise the limit of the job",
            check_memory,
        ),
        Check(
            "disk",
            ">= 20 GB free here",
            "go to a larger disk, or give --output_dir",
            lambda: free_space(Path.cwd(), MIN_DISK),
        ),
        Check(
            "temporary folder", "can be written", "set TMPDIR to a folder of yours", check_temporary
        ),
        Check("sandbox", "a program in it finds no way out", REMEDIES, check_sandbox),
    ]


def check_python(numbers: tuple[int, int] = sys.version_info[:2]) -> CheckResult:
    """Check the interpreter's version."""
    return checked((3, 11) <= numbers < (3, 14), ".".join(map(str, numbers)))


def version_check(name: str) -> Check:
    """Return the check that a package has a version that this release is tested with."""
    library = LIBRARIES[name]

    def examine() -> CheckResult:
        version = installed_version(name)
        if version is None:
            text = f"not installed (for {library.purpose})"
            return checked(False, text) if name in REQUIRED else unchecked(text)
        return checked(library.is_tested(version), version)

    remedy = f"install {name}{library.limits}, for {library.purpose}"
    return Check(name, library.limits, remedy, examine)


def import_check(name: str) -> Check:
    """Return the check that a separate process can import an engine: some only print and leave."""

    def examine() -> CheckResult:
        if importlib.util.find_spec(name) is None:
            return unchecked(f"{name} is not installed")
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
        )
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return checked(done.returncode == 0, "yes" if done.returncode == 0 else lines[-1])

    return Check(
        f"import {name}",
        "works",
        f"install {name} again, for this torch and this driver",
        examine,
        deadline_seconds=IMPORT_SECONDS + 5,
    )


def check_gpu() -> CheckResult:
    """Compare devices of the driver with those of torch."""
    import torch

    files, seen = device_files(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if files == 0 and seen == 0:
        return unchecked("this machine has no GPU; runs go to the CPU")
    names = sorted({torch.cuda.get_device_name(index) for index in range(seen)})
    return checked(
        seen > 0, f"torch {torch.version.cuda} sees {seen} of {files}: {', '.join(names)}"
    )


def check_nccl() -> CheckResult:
    """Check the version of NCCL that torch was built with."""
    import torch

    version: tuple[int, ...] = torch.cuda.nccl.version()
    return checked(version[:2] >= MIN_NCCL, ".".join(map(str, version)))


def check_attention(device_type: str = "cuda") -> CheckResult:
    """Try the attention kernel of packed sequences on the device."""
    import torch

    from lightrft.models.varlen import KernelShape, try_kernel, use_newer_kernel

    shape = KernelShape(device_type, torch.bfloat16, 64, 64)
    use_newer_kernel([shape])
    trial = try_kernel(shape)
    return checked(trial.works, trial.packing)


def check_kernels() -> CheckResult:
    """Check the compiled parts of lightrft.kernels."""
    from lightrft.kernels import capabilities

    have = capabilities()
    kinds = {"C++": have.native_extension, "CUDA": have.cuda_extension, "Triton": have.triton}
    parts = [f"{name} {'yes' if is_there else 'no'}" for name, is_there in kinds.items()]
    is_built = have.native_extension and (have.cuda_extension or not have.cuda)
    return checked(is_built, ", ".join([*parts, f"CPU {have.cpu_capability}"]))


def check_gloo(resolve: Callable[[str], str] = socket.gethostbyname) -> CheckResult:
    """Check the address behind this host's name, or the interface that was set."""
    import psutil

    name = socket.gethostname()
    addresses = {
        entry.address: interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is not None:
        missing = [
            part for part in chosen.split(",") if part.strip("=^ ") not in addresses.values()
        ]
        return checked(not missing, f"GLOO_SOCKET_IFNAME={chosen}")
    try:
        ip = resolve(name)
    except OSError:
        return checked(False, f"the host's name {name!r} resolves to nothing")
    if ip.startswith("127."):
        # One node works, and a run on several looks for the interface itself.
        return checked(
            True, f"{name} is {ip}: one node; several need an interface: set GLOO_SOCKET_IFNAME"
        )
    return checked(ip in addresses, f"{name} is {ip} ({addresses.get(ip, 'of no interface here')})")


def check_environment() -> CheckResult:
    """Check variables of a launcher."""
    problems = environment_problems()
    return checked(not problems, problems[0] if problems else "consistent")


def free_space(path: Path, limit: float) -> CheckResult:
    """Check the free bytes of the file system."""
    free = shutil.disk_usage(path).free
    return checked(free >= limit, f"{free / GIGABYTE:.1f} GB free in {path}")


def check_shared_memory() -> CheckResult:
    """Check shared memory, through which NCCL and data loaders exchange data."""
    path = Path("/dev/shm")
    return free_space(path, MIN_SHARED_MEMORY) if path.is_dir() else unchecked(f"no {path}")


def check_memory(limits: Path = Path("/sys/fs/cgroup/memory.max")) -> CheckResult:
    """Check available memory of the machine and of the job."""
    import psutil

    available = psutil.virtual_memory().available
    text = f"{available / GIGABYTE:.1f} GB available"
    try:
        job = int(limits.read_text())
    except (OSError, ValueError):  # no limit
        return checked(available >= MIN_MEMORY, text)
    return checked(
        min(available, job) >= MIN_MEMORY, f"{text}, the job may take {job / GIGABYTE:.1f}"
    )


def check_temporary() -> CheckResult:
    """Check that a temporary file can be written and read back."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"lightrft")
        file.flush()
        is_whole = Path(file.name).read_bytes() == b"lightrft"
    return checked(is_whole, tempfile.gettempdir())


def check_sandbox() -> CheckResult:
    """Check a program in the sandbox, which looks for ways out; few runs need one."""
    try:
        with contextlib.closing(Sandbox("bubblewrap")) as sandbox:
            python = sandbox.interpreter
    except ConfigError as error:
        return unchecked(f"unit_tests and agent_command need it: {error}")
    counted = "time and memory are counted by /proc; seccomp refuses what would hide them"
    return checked(True, f"bubblewrap with {python}; {counted}")
