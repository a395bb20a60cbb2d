"""Programs that try to get out of the sandbox. A machine without one fails here, never skips."""

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.machine import seconds
from tests.programs import run_program

from lightrft.strategy.config import ConfigError
from lightrft.tools.rewards import sandbox as module
from lightrft.tools.rewards.sandbox import Ending, Sandbox, SandboxLimits

# An AVX2 machine with other work: programs need little, but may wait for a processor.
LIMITS = SandboxLimits(cpu_seconds=4.0)


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox("bubblewrap", LIMITS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def unsafe():
    """Shows that an attempt works where nothing stands in its way."""
    made = Sandbox("unsafe", LIMITS)
    yield made
    made.close()


@pytest.fixture
def public_folder():
    """A folder outside that every user may read."""
    folder = Path(tempfile.mkdtemp(prefix="lightrft-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def printed(ending):
    assert ending.reason == "ended", ending
    assert ending.returncode == 0, ending
    return json.loads(ending.stdout)


NETWORK = """
import json, socket
found = []
for address in (("127.0.0.1", {port}), "\\0{name}"):
    family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
    try:
        socket.socket(family).connect(address)
        found.append("connected")
    except OSError as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""


def test_no_listener_of_the_machine_is_reached(sandbox, unsafe):
    name = f"lightrft-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{name}")
        unix.listen()
        tcp.settimeout(0.0)
        source = NETWORK.format(port=tcp.getsockname()[1], name=name).encode()
        assert printed(sandbox.run(source)) == ["ConnectionRefusedError"] * 2
        with pytest.raises(BlockingIOError):
            tcp.accept()
        assert printed(unsafe.run(source)) == ["connected"] * 2


FILES = """
import json, os
found = {{"read": [], "written": []}}
for path in {paths!r}:
    try:
        open(path).read(1)
        found["read"].append(path)
    except OSError:
        pass
for path in ("/x", "/usr/x", "/etc/x", "/dev/x", "/proc/sys/kernel/core_pattern",
             "/proc/sys/vm/drop_caches", "/tmp/main.py", "/tmp/x", {folder!r} + "/x"):
    try:
        open(path, "r+" if os.path.exists(path) else "w").close()
        found["written"].append(path)
    except OSError:
        pass
print(json.dumps(found))
"""


def test_files_outside_are_absent_and_nothing_but_its_folder_can_be_written(
    sandbox, unsafe, public_folder
):
    secret = public_folder / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    paths = [str(secret), "/etc/passwd", "/etc/hostname", str(Path(__file__).resolve())]
    source = FILES.format(paths=paths, folder=str(public_folder)).encode()
    assert printed(sandbox.run(source)) == {"read": [], "written": ["/tmp/x"]}
    assert str(secret) in printed(unsafe.run(source))["read"]  # type: ignore[index]
    assert list(public_folder.iterdir()) == [secret]


SHOWN = """
import json, os
found = []
for path in {paths!r}:
    found.append(open(path).read())
    try:
        open(path, "w").close()
        found.append("written")
    except OSError:
        pass
print(json.dumps(found))
"""


def test_what_is_shown_besides_can_be_read_and_not_written(sandbox, public_folder):
    own, shared = public_folder / "own", public_folder / "folder" / "shared"
    shared.parent.mkdir(mode=0o755)
    for file in (own, shared):
        file.write_text(file.name)
        file.chmod(0o666)
    own.chmod(0o600)  # only this user can read it
    sandbox.show([own, shared.parent])
    source = SHOWN.format(paths=[str(own), str(shared)]).encode()
    assert printed(sandbox.run(source)) == ["own", "shared"]
    sandbox.show([])
    assert sandbox.run(source).returncode == 1


def test_the_next_program_finds_nothing_of_the_last_one(sandbox):
    sandbox.run(b"open('/tmp/left', 'w').write('x'); open('/dev/shm/left', 'w').write('x')")
    ending = sandbox.run(
        b"import json, os; print(json.dumps([os.listdir('/tmp'), os.listdir('/dev/shm')]))"
    )
    assert printed(ending) == [["main.py"], []]


FORKS = """
import json, os, signal, time
children = []
for _ in range(200):
    try:
        child = os.fork()
    except OSError:
        break
    if not child:
        time.sleep(60)
        os._exit(0)
    children.append(child)
print(json.dumps(len(children)), flush=True)
"""


def test_a_bounded_fork_bomb_is_cut_and_harms_no_other_program(sandbox):
    process = sandbox.run(FORKS.encode())
    found = int(process.stdout)
    assert 0 < found <= LIMITS.num_processes
    assert sandbox.run(b"print('well')").stdout == b"well\n"


# Says how many processes it could start, and holds them until the other side closes.
CROWD = """
import os, socket, time
with socket.socket(fileno={channel}) as channel:
    for number in range(7):
        try:
            child = os.fork()
        except OSError:
            break
        if not child:
            time.sleep(60)
            os._exit(0)
    channel.send(bytes([number]))
    channel.recv(1)
"""


def test_programs_of_one_user_each_have_their_own_limit(monkeypatch):
    monkeypatch.setattr(module, "NUM_USERS", 1)
    monkeypatch.setattr(module, "MAX_SLOTS", 1)
    crowd = Sandbox("bubblewrap", replace(LIMITS, num_processes=12))
    with contextlib.ExitStack() as held:
        held.callback(crowd.close)
        threads = held.enter_context(ThreadPoolExecutor(4))
        pairs = [socket.socketpair() for _ in range(4)]
        for ours, theirs in pairs:
            held.enter_context(theirs)
            held.enter_context(ours).settimeout(seconds(30))
            source = CROWD.format(channel=theirs.fileno()).encode()
            threads.submit(crowd.run, source, channel=theirs.fileno())
        assert [ours.recv(1) for ours, _ in pairs] == [b"\x06"] * 4


def test_a_process_with_many_open_files_runs_programs(sandbox):
    own, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(own, 1200), most))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert sandbox.run(b"print('well')").stdout == b"well\n"
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (own, most))


# Orphans come to this process, as they come to the first process of a machine or container.
ADOPTING = """
import ctypes, os
from lightrft.tools.rewards import sandbox

PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
sandbox.NUM_USERS = 1
made = sandbox.Sandbox("bubblewrap", sandbox.SandboxLimits(num_processes=4))
outputs = [made.run(b"print('well')").stdout for _ in range(12)]
made.close()
assert outputs == [b"well\\n"] * 12, outputs
"""


def test_programs_start_where_nobody_waits_for_the_ended_ones():
    done = subprocess.run(
        [sys.executable, "-c", ADOPTING], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's programs are all of that user")
def test_what_the_last_program_left_does_not_count_for_the_next(unsafe):
    mark = f"left-{os.getpid()}"
    leave = f"""
import os
null = os.open(os.devnull, os.O_RDWR)
for _ in range({LIMITS.num_processes // 2}):
    if os.fork() == 0:
        os.setsid()
        for file in (0, 1, 2): os.dup2(null, file)
        os.execv("/bin/sh", ["sh", "-c", "sleep 60; true", "{mark}"])
"""
    try:
        for _ in range(4):
            assert unsafe.run(leave.encode()).returncode == 0
    finally:
        for process in processes_with(mark):
            # One between fork and exec leads no group, and ends with that of its parent.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)


def test_memory_is_bounded(sandbox):
    ending = sandbox.run(b"x = bytearray(2 << 30); print(len(x))")
    assert ending.returncode == 1
    assert b"MemoryError" in ending.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_ends_the_program(sandbox, stream):
    ending = sandbox.run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)".encode())
    assert ending.reason == "output"
    assert len(ending.stdout) + len(ending.stderr) == LIMITS.output_bytes


SIGNALS = """
import json, os, signal
done = []
for target in (os.getppid(), 1, {outside}, -1):
    try:
        os.kill(target, signal.SIGKILL)
    except OSError as error:
        done.append(type(error).__name__)
print(json.dumps(done), flush=True)
"""


def test_signals_reach_no_process_outside(sandbox):
    with subprocess.Popen(["sleep", "60"], user=os.geteuid()) as outside:
        try:
            ending = sandbox.run(SIGNALS.format(outside=outside.pid).encode())
            assert ending.reason == "ended"
            assert outside.poll() is None
        finally:
            outside.kill()


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for file in (0, 1, 2): os.dup2(null, file)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(20)", {mark!r}])
    os._exit(0)
time.sleep(0.3)
print(1)
"""


def processes_with(mark):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def test_a_daemon_with_a_session_of_its_own_ends_with_its_program(sandbox, unsafe):
    mark = f"lightrft-daemon-{os.getpid()}"
    assert printed(sandbox.run(DAEMON.format(mark=mark).encode())) == 1
    deadline = time.monotonic() + seconds(10)
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes_with(mark)
    assert printed(unsafe.run(DAEMON.format(mark=mark).encode())) == 1
    survivors = processes_with(mark)
    for process in survivors:
        os.kill(process, signal.SIGKILL)
    assert survivors


ENVIRONMENT = """
import os
print(dict(os.environ))
for name in os.listdir("/proc"):
    if name.isdigit():
        print(open(f"/proc/{name}/environ").read(), open(f"/proc/{name}/cmdline").read())
"""


def test_no_variable_of_the_trainer_is_seen(sandbox, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a-key-of-the-trainer")
    ending = sandbox.run(ENVIRONMENT.encode())
    assert ending.returncode == 0
    assert b"PYTHONHASHSEED" in ending.stdout
    assert b"a-key-of" not in ending.stdout
    assert b"VIRTUAL_ENV" not in ending.stdout


def test_a_program_that_waits_ends_in_time_and_one_that_computes_at_its_limit(sandbox):
    short = Sandbox("bubblewrap", SandboxLimits(cpu_seconds=0.5))
    waits = short.run(b"import time; time.sleep(60)")
    short.close()
    assert waits == Ending("timeout", None, b"", b"")
    started = time.monotonic()
    ending = sandbox.run(b"import time; time.sleep(60)", deadline=started + 0.5)
    assert ending.reason == "deadline"


@pytest.mark.full
def test_a_busy_machine_ends_no_program():
    """A program that waits for a processor most of the time gets what it may use all the same."""
    short = Sandbox("bubblewrap", SandboxLimits(cpu_seconds=1.0))
    source = b"import time\nwhile time.process_time() < 0.6: pass\nprint('well')"
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(24)]
    try:
        assert short.run(source) == Ending("ended", 0, b"well\n", b"")
    finally:
        for other in others:
            other.kill()
            other.wait()
        short.close()


def test_a_program_prints_the_same_each_time(sandbox):
    """The order of a set of texts depends on a seed, which is random outside."""
    runs = {sandbox.run(b"print(set(map(str, range(20))))").stdout for _ in range(3)}
    assert len(runs) == 1
    command = [sys.executable, "-c", "print(set(map(str, range(20))))"]
    assert len({subprocess.check_output(command, env={}) for _ in range(3)}) > 1


def test_a_program_that_closes_its_outputs_is_waited_for(sandbox):
    source = b"import os, time; os.close(1); os.close(2); time.sleep(0.3); os._exit(7)"
    assert sandbox.run(source) == Ending("ended", 7, b"", b"")


def test_input_that_nobody_reads_and_long_input_are_no_problem(sandbox):
    text = b"x" * (1 << 20)
    assert sandbox.run(b"print('well')", stdin=text).stdout == b"well\n"
    assert sandbox.run(b"import sys; print(len(sys.stdin.read()))", stdin=text).stdout == (
        b"1048576\n"
    )


# Stand-ins for bubblewrap, run by the distribution's Python where users differ.
FAKES = {
    "refuses": (
        "#!/bin/sh\necho 'bwrap: Creating new namespace failed: No permissions' >&2\nexit 1\n",
        "Creating new namespace failed",
    ),
    "does nothing": (
        "#!{python}\nimport os, subprocess, sys\nargs = sys.argv\n"
        "status = int(args[args.index('--json-status-fd') + 1])\n"
        "source = int(args[args.index('--ro-bind-data') + 1])\n"
        "done = subprocess.run(['{python}', f'/proc/self/fd/{{source}}'], pass_fds=[source])\n"
        "os.write(status, b'{{\"exit-code\": 0}}')\n",
        "a program in it reaches a listener of this machine",
    ),
}


@pytest.mark.parametrize("fake", FAKES)
def test_a_sandbox_that_does_not_hold_is_refused_with_its_remedies(
    fake, public_folder, monkeypatch
):
    text, message = FAKES[fake]
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    (public_folder / "bwrap").write_text(text.format(python=python))
    (public_folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{public_folder}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=message) as caught:
        Sandbox("bubblewrap", LIMITS)
    for remedy in ("user.max_user_namespaces", "apparmor_restrict", "--sandbox unsafe"):
        assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


# What an ordinary user starts: its programs are of the same user as the trainer.
ORDINARY = """
import json, os, socket, subprocess, sys
from lightrft.tools.rewards.sandbox import Sandbox, SandboxLimits

network, signals, forks, folder, hidden = sys.argv[1:]
made = Sandbox("bubblewrap", SandboxLimits(cpu_seconds=4.0))
outside = subprocess.Popen(["sleep", "60"])
with socket.create_server(("127.0.0.1", 0)) as listener:
    network = network.replace("{port}", str(listener.getsockname()[1])).replace("{name}", "none")
    signals = signals.replace("{outside}", str(outside.pid))
    seen = made.run(f"import os; print(os.path.exists({folder!r}), os.getuid())".encode())
    found = {
        "user": os.geteuid(),
        "network": json.loads(made.run(network.encode()).stdout),
        "signals": json.loads(made.run(signals.encode()).stdout),
        "forks": int(made.run(forks.encode()).stdout),
        "next": made.run(b"print('well')").stdout.decode(),
        "seen": seen.stdout.decode().split(),
        "memory": made.run(b"bytearray(2 << 30)").returncode,
        "lives": outside.poll() is None,
    }
outside.kill()
made.close()
sys.executable = hidden
again = Sandbox("bubblewrap")
found["again"] = again.interpreter
again.close()
print(json.dumps(found))
"""
_USER = 60123


def ordinary_command():
    """Starts Python as an ordinary user, who may not reach the interpreter of this environment."""
    if os.geteuid() != 0:
        return [sys.executable]
    as_user = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", "--"]
    is_right = "import sys; sys.exit(sys.version_info < (3, 11))"
    for interpreter in ("/usr/bin/python3", os.path.realpath(sys.executable)):
        command = [*as_user, interpreter]
        if subprocess.run([*command, "-c", is_right], capture_output=True, check=False).returncode:
            continue
        return command
    pytest.skip("no Python of 3.11 or later that another user than root can start")


def test_an_ordinary_user_gets_the_same_sandbox(public_folder, tmp_path):
    # An interpreter in a folder that only root may enter is passed over.
    hidden = tmp_path / "python" if os.geteuid() == 0 else Path(sys.executable)
    if os.geteuid() == 0:
        tmp_path.chmod(0o700)
        hidden.symlink_to(sys.executable)
    packages = [path for path in sys.path if path and not path.startswith(sys.base_prefix)]
    done = run_program(
        *ordinary_command(),
        "-c",
        ORDINARY,
        NETWORK,
        SIGNALS,
        FORKS,
        str(public_folder),
        str(hidden),
        timeout_seconds=120,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(packages)},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["user"] != 0
    assert found["seen"] == ["False", str(found["user"])]
    assert "connected" not in found["network"]
    assert found["lives"]
    assert 0 < found["forks"] <= LIMITS.num_processes
    assert found["next"] == "well\n"
    assert found["memory"] == 1
    assert found["again"] != str(hidden) or os.geteuid() != 0
