"""Programs that want more than a sandbox gives: time, memory, files, network, other processes.

Each stops by itself: at 1 GiB, or after a minute. Where it gets what it wants it prints `SURVIVED`,
and raises where it is refused. Beside it stands how it ends: a limit (`timeout`, `memory`,
`output`), a signal, or a word of its last line.
"""

from __future__ import annotations

PRELUDE = """
import ctypes, errno, fcntl, json, mmap, os, re, resource, select, signal, socket, struct
import subprocess, sys, tempfile, threading, time
MIB, MOST = 1 << 20, 1 << 30
END = time.monotonic() + 60
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    function = getattr(libc, name)
    function.restype = ctypes.c_long
    result = function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result in (-1, 0xFFFFFFFF):  # some return 32 bits
        number = ctypes.get_errno()
        raise OSError(number, errno.errorcode[number])
    return result
def burn(seconds=0.05):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
def lives():
    return time.monotonic() < END
def fork(child, pause=0.01):
    while lives():
        try:
            process = os.fork()
        except OSError:
            time.sleep(pause)
            continue
        if not process:
            try:
                child()
            finally:
                os._exit(0)
        return process
def family(child, count=12):
    processes = [fork(child) for _ in range(count)]
    for process in processes:
        os.waitpid(process, 0)
def hold():
    time.sleep(1)
def take(step, size, most=MOST):
    kept = []
    for number in range(most // size):
        kept.append(step(number))
    hold()
    return kept
def filled(size, *flags):
    memory = mmap.mmap(-1, size, *flags)
    for at in range(0, size, 4096):
        memory[at] = 1
    return memory
def fill(send, most=MOST):
    total = 0
    while total < most:
        try:
            total += send()
        except BlockingIOError:
            break
    return total
"""

IGNORED = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
# Flags of `clone`: share the table of files, wait as vfork does, the parent's parent.
CLONE = """
def clone(flags):
    number = 56 if os.uname().machine == "x86_64" else 220
    return libc.syscall(number, ctypes.c_long(flags), 0, 0, 0, 0)
"""
COUNTS = "['sh', '-c', 'i=0; while [ $i -lt 9999 ]; do i=$((i+1)); done']"

TIME = {
    "computes": ("while lives(): pass", "timeout"),
    "children that are ignored": (f"{IGNORED}while lives(): fork(burn)", "timeout"),
    "children that are ignored by a flag": (
        "class Action(ctypes.Structure):\n"
        "    _fields_ = [('handler', ctypes.c_void_p), ('mask', ctypes.c_byte * 128),\n"
        "                ('flags', ctypes.c_int), ('restorer', ctypes.c_void_p)]\n"
        "libc.sigaction(17, ctypes.byref(Action(None, flags=2)), None)\n"
        "while lives(): fork(burn)",
        "timeout",
    ),
    "children that are ignored by a program that is started": (
        f"{IGNORED}while lives(): subprocess.Popen(['sh', '-c', ':']); fork(burn)",
        "timeout|BlockingIOError",
    ),
    "children that are waited for": ("while lives(): os.waitpid(fork(burn), 0)", "timeout"),
    "children without a signal at their end": (
        f"{CLONE}while lives():\n    if clone(0) == 0: burn(); os._exit(0)\n    time.sleep(0.05)",
        "timeout",
    ),
    "children of the parent": (
        f"{CLONE}while lives():\n"
        "    if clone(0x8000 | signal.SIGCHLD) == 0: burn(); os._exit(0)\n"
        "    time.sleep(0.05)",
        "timeout",
    ),
    "orphans": ("while lives(): os.waitpid(fork(lambda: fork(burn)), 0)", "timeout"),
    "orphans of sessions": (
        "while lives(): os.waitpid(fork(lambda: (os.setsid(), fork(burn))), 0)",
        "timeout",
    ),
    "orphans that a process adopts": (
        f"libc.prctl(36, 1, 0, 0, 0)\n{IGNORED}"
        "while lives(): fork(lambda: fork(burn)); time.sleep(0.05)",
        "timeout",
    ),
    "a chain of orphans": (
        "def hop():\n    burn()\n    fork(hop)\nfork(hop)\ntime.sleep(60)",
        "timeout",
    ),
    "programs, one after another": (
        f"while lives(): subprocess.run({COUNTS})",
        "timeout",
    ),
    "programs that are ignored": (
        f"{IGNORED}while lives(): os.posix_spawn('/bin/sh', {COUNTS}, {{}}); time.sleep(0.05)",
        "timeout",
    ),
    "a program that becomes itself": (
        "if lives(): burn(); os.execv(sys.executable, [sys.executable, '/tmp/main.py'])",
        "timeout",
    ),
    "a child that a vfork waits for": (
        f"{CLONE}if clone(0x4000 | signal.SIGCHLD) == 0: time.sleep(60); os._exit(0)",
        "timeout",
    ),
    "a brother that a vfork waits for": (
        f"{CLONE}if clone(0xC000 | signal.SIGCHLD) == 0: time.sleep(60); os._exit(0)",
        "timeout",
    ),
    "gives way to all others": (
        "os.nice(19)\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "assert os.sched_getscheduler(0) == os.SCHED_IDLE, 'no effect'",
        "no effect",
    ),
    "gives way by its session": (
        "open('/proc/self/autogroup', 'w').write('19')\nwhile lives(): pass",
        "timeout",
    ),
    "sleeps": ("time.sleep(60)", "timeout"),
    "naps": ("while lives(): time.sleep(0.002)", "timeout"),
    "many that sleep": ("family(lambda: time.sleep(60))", "timeout"),
    "threads that sleep": (
        "threads = [threading.Thread(target=time.sleep, args=(60,)) for _ in range(2)]\n"
        "for each in threads: each.start()\nfor each in threads: each.join()",
        "timeout",
    ),
    "threads that compute": (
        "import hashlib\nblock = bytes(MIB)\ndef work():\n"
        "    while lives(): hashlib.sha256(block)\n"
        "for _ in range(4): threading.Thread(target=work).start()\nwork()",
        "timeout",
    ),
    "threads whose first one has ended": (
        "def work():\n    time.sleep(0.5)\n    while lives(): pass\n"
        "threading.Thread(target=work).start()\n"
        "libc.syscall(60 if os.uname().machine == 'x86_64' else 93, 0)",
        "timeout",
    ),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "a child that is stopped": (
        "child = fork(lambda: os.kill(os.getpid(), signal.SIGSTOP)); os.waitpid(child, 0)",
        "timeout",
    ),
    "ignores signals": (
        "for number in set(signal.Signals) - {9, 19}: signal.signal(number, signal.SIG_IGN)\n"
        "while lives(): pass",
        "timeout",
    ),
    "a name that is no text": (
        "libc.prctl(15, b'\\xff) R 1', 0, 0, 0); time.sleep(60)",
        "timeout",
    ),
    "raises its limit": (
        "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "not allowed to raise maximum limit",
    ),
    "a timer": (
        "signal.signal(signal.SIGALRM, lambda *_: burn(0.02))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)\nwhile lives(): signal.pause()",
        "timeout",
    ),
    "signals to and fro": (
        "signal.signal(signal.SIGUSR1, lambda *_: None)\nparent = os.getpid()\n"
        "def answer():\n    while lives(): os.kill(parent, signal.SIGUSR1); time.sleep(0.001)\n"
        "fork(answer)\nwhile lives(): signal.pause()",
        "timeout",
    ),
    "bytes to and fro": (
        "a, b = socket.socketpair()\ndef answer():\n    while lives(): b.send(b.recv(1))\n"
        "fork(answer)\nwhile lives(): a.send(b'x'); a.recv(1)",
        "timeout",
    ),
    "waits for a pipe": ("os.read(os.pipe()[0], 1)", "timeout"),
    "waits for a lock": ("lock = threading.Lock(); lock.acquire(); lock.acquire()", "timeout"),
    "waits for a file": (
        "file = open('lock', 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "fcntl.flock(open('lock', 'w'), fcntl.LOCK_EX)",
        "timeout",
    ),
    "waits for a caller": ("socket.create_server(('127.0.0.1', 0)).accept()", "timeout"),
    "writes to nowhere": (
        "null = os.open('/dev/null', os.O_WRONLY)\nwhile lives(): os.write(null, b'x')",
        "timeout",
    ),
    "random numbers": ("while lives(): os.urandom(4 * MIB)", "timeout"),
    "an expression": ("re.fullmatch('(a+)+b', 'a' * 60)", "timeout"),
    "a number": ("10 ** (10 ** 8) % 7", "timeout"),
    "sleeps in the answer": ("def add(a, b): time.sleep(60)\nadd(1, 2)", "timeout"),
}

MEMORY = {
    "segments that nobody is attached to": (
        "def step(_):\n    name = call('shmget', 0, 16 * MIB, 0o1600)\n"
        "    libc.shmat.restype = ctypes.c_void_p\n    place = libc.shmat(name, None, 0)\n"
        "    ctypes.memset(place, 1, 16 * MIB); libc.shmdt(ctypes.c_void_p(place))\n"
        "take(step, 16 * MIB)",
        "ENOSYS",
    ),
    "small segments": ("take(lambda _: call('shmget', 0, 4096, 0o1600), 4096)", "ENOSYS"),
    "queues of messages": ("take(lambda _: call('msgget', 0, 0o1600), 16384)", "ENOSYS"),
    "semaphores": ("take(lambda _: call('semget', 0, 32000, 0o1600), 4 * MIB)", "ENOSYS"),
    "queues of messages by name": (
        "class Limits(ctypes.Structure): _fields_ = [(n, ctypes.c_long) for n in 'abcdefgh']\n"
        "rt = ctypes.CDLL('librt.so.1', use_errno=True)\n"
        "def step(number):\n"
        "    made = rt.mq_open(b'/q%d' % number, os.O_RDWR | os.O_CREAT, 0o600,\n"
        "                      ctypes.byref(Limits(b=10, c=8192)))\n"
        "    if made == -1: raise OSError(errno.errorcode[ctypes.get_errno()])\n"
        "take(step, 81920)",
        "EMFILE",
    ),
    "files without a name": (
        "def step(_):\n    file = os.memfd_create('x'); os.write(file, bytes(8 * MIB))\n"
        "take(step, 8 * MIB)",
        "Function not implemented",
    ),
    "files without a name in a family": (
        "def child():\n    file = os.memfd_create('x'); os.write(file, bytes(8 * MIB)); hold()\n"
        "    os.kill(0, 9)\n"
        "family(child); sys.exit('no child got one')",
        "no child got one",
    ),
    "secret files": ("call('syscall', 447, 0)", "ENOSYS"),
    "files in shared memory": (
        "take(lambda n: open(f'/dev/shm/{n}', 'wb').write(bytes(8 * MIB)), 8 * MIB)",
        "No space left",
    ),
    "shared memory by its module": (
        "from multiprocessing import shared_memory as shared\n"
        "def step(_):\n    memory = shared.SharedMemory(create=True, size=8 * MIB)\n"
        "    memory.buf[:] = bytes(8 * MIB); return memory\n"
        "take(step, 8 * MIB)",
        "SIGBUS",
    ),
    "files": ("take(lambda n: open(f'{n}', 'wb').write(bytes(8 * MIB)), 8 * MIB)", "No space left"),
    "a large file": (
        "file = open('x', 'wb')\ntake(lambda _: file.write(bytes(8 * MIB)), 8 * MIB)",
        "File too large",
    ),
    "files that are removed": (
        "def step(n):\n    file = open('x', 'wb', 0); os.unlink('x'); file.write(bytes(8 * MIB))\n"
        "    return file\ntake(step, 8 * MIB)",
        "No space left",
    ),
    "files that are removed and mapped": (
        "def step(n):\n    file = open('x', 'w+b'); os.unlink('x'); file.truncate(8 * MIB)\n"
        "    memory = mmap.mmap(file.fileno(), 8 * MIB); memory[::4096] = b'x' * 2048\n"
        "    return memory\ntake(step, 8 * MIB)",
        "SIGBUS",
    ),
    "empty files": ("take(lambda n: open(f'{n}', 'w').close(), 2048)", "memory|timeout"),
    "names of one file": (
        "open('x', 'w').close()\ntake(lambda n: os.link('x', f'{n}'), 2048)",
        "memory|timeout",
    ),
    "folders": ("take(lambda n: os.mkdir(f'{n}'), 2048)", "memory|timeout"),
    "links": ("take(lambda n: os.symlink('x' * 120, f'{n}'), 2048)", "memory|timeout"),
    "attributes": (
        "open('x', 'w').close()\n"
        "take(lambda n: os.setxattr('x', f'user.{n}', bytes(60000)), 60000)",
        "Function not implemented",
    ),
    "lists of rights": (
        "entry = struct.Struct('<HHI').pack\n"
        "others = [(1, 7, 0), *[(2, 7, os.getuid())] * 8000, (4, 7, 0), (16, 7, 0), (32, 7, 0)]\n"
        "rights = struct.pack('<I', 2) + b''.join(entry(*each) for each in others)\n"
        "def step(n):\n    open(f'{n}', 'w').close()\n"
        "    os.setxattr(f'{n}', 'system.posix_acl_access', rights)\ntake(step, 64000)",
        "Function not implemented",
    ),
    "pipes": (
        "def step(_):\n    a, b = os.pipe(); os.set_blocking(b, False)\n"
        "    fill(lambda: os.write(b, bytes(65536)))\ntake(step, 65536)",
        "Too many open files",
    ),
    "large pipes": (
        "def step(_):\n    a, b = os.pipe(); os.set_blocking(b, False)\n"
        "    fcntl.fcntl(b, 1031, MIB); fill(lambda: os.write(b, bytes(65536)))\n"
        "take(step, MIB)",
        "PermissionError|Too many open files",
    ),
    "pipes of a family": (
        "def child():\n    for _ in range(28):\n        a, b = os.pipe()\n"
        "        os.set_blocking(b, False); fill(lambda: os.write(b, bytes(65536)))\n    hold()\n"
        "family(child, 24)\nsys.exit('they end at the bound of a user')",
        "bound of a user",
    ),
    "sockets": (
        "def child():\n    kept = []\n    for _ in range(28):\n        pair = socket.socketpair()\n"
        "        for each in pair: each.setblocking(False); fill(lambda: each.send(bytes(65536)))\n"
        "        kept.append(pair)\n    hold()\nfamily(child, 24)",
        "memory",
    ),
    "sockets with large buffers": (
        "def step(_):\n    a, b = socket.socketpair(); a.setblocking(False)\n"
        "    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * MIB)\n"
        "    if fill(lambda: a.send(bytes(65536)), 16 * MIB) < MIB: raise OSError('as before')\n"
        "    return a, b\ntake(step, 16 * MIB)",
        "as before",
    ),
    "datagrams": (
        "def child():\n    kept = []\n    for _ in range(28):\n"
        "        pair = socket.socketpair(type=socket.SOCK_DGRAM)\n"
        "        for each in pair: each.setblocking(False); fill(lambda: each.send(bytes(65536)))\n"
        "        kept.append(pair)\n    hold()\nfamily(child, 24)",
        "memory",
    ),
    "sockets within sockets": (
        "kept = []\nwhile len(kept) < 40000:\n    outer = socket.socketpair()\n    kept.append(0)\n"
        "    for _ in range(20):\n        pair = socket.socketpair()\n"
        "        pair[0].setblocking(False); fill(lambda: pair[0].send(bytes(65536)))\n"
        "        socket.send_fds(outer[0], [b'x'], [each.fileno() for each in pair])\n"
        "    socket.send_fds(outer[0], [b'x'], [each.fileno() for each in outer])",
        "memory|ETOOMANYREFS|Too many references",
    ),
    "connections": (
        "def child():\n    server = socket.create_server(('127.0.0.1', 0)); kept = []\n"
        "    for _ in range(25):\n        a = socket.create_connection(server.getsockname())\n"
        "        a.setblocking(False); fill(lambda: a.send(bytes(65536)))\n"
        "        kept.append((a, server.accept()))\n    hold()\nfamily(child, 24)",
        "memory",
    ),
    "packets": (
        "def child():\n    kept = []\n    for _ in range(50):\n"
        "        a = socket.socket(type=socket.SOCK_DGRAM); a.bind(('127.0.0.1', 0))\n"
        "        for _ in range(9): a.sendto(bytes(60000), a.getsockname())\n"
        "        kept.append(a)\n    hold()\nfamily(child, 24)",
        "memory",
    ),
    "large pages without a file": ("take(lambda _: filled(32 * MIB), 32 * MIB)", "Cannot allocate"),
    "pages that are given back": (
        "def child():\n    kept = []\n    for _ in range(6):\n        memory = filled(8 * MIB)\n"
        "        memory.madvise(4); kept.append(memory)\n    hold()\nfamily(child, 24)",
        "memory",
    ),
    "pages of which one stays": (
        "libc.mmap.restype = ctypes.c_void_p\ndef step(_):\n"
        "    at = libc.mmap(None, ctypes.c_long(8 * MIB), 3, 0x21, -1, ctypes.c_long(0))\n"
        "    ctypes.memset(at, 1, 8 * MIB)\n"
        "    libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_long(8 * MIB - 4096))\n"
        "take(step, 8 * MIB)",
        "memory",
    ),
    "pages that a child has without looking": (
        "kept = []\nfor _ in range(24):\n    memory = filled(8 * MIB)\n"
        "    fork(lambda: time.sleep(60)); memory.close()\nhold()\nhold()",
        "memory",
    ),
    "pieces of memory": (
        "libc.mmap.restype = ctypes.c_void_p\n"
        "def grow(depth):\n    if depth: os.waitpid(fork(lambda: grow(depth - 1)), 0)\n"
        "    else: hold()\n"
        "for at in range(15000):\n"
        "    libc.mmap(None, ctypes.c_long(4096), 1 + 2 * (at % 2), 0x22, -1, ctypes.c_long(0))\n"
        "grow(28)",
        "memory",
    ),
    "huge pages of which one stays": (
        "def step(_):\n    memory = mmap.mmap(-1, 4 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "    memory.madvise(14); memory[::4096] = b'x' * 1024; return memory\n"
        "take(step, 4 * MIB)",
        "Invalid argument",
    ),
    "pages of a device": (
        "file = open('/dev/zero', 'r+b', 0)\n"
        "for at in range(128): mmap.mmap(file.fileno(), 8 * MIB)",
        "No such device",
    ),
    "an array": ("x = bytearray(MOST)", "MemoryError"),
    "a text": ("x = 'x' * MOST", "MemoryError"),
    "a list": ("x = [0]\nwhile len(x) < MOST: x += x", "MemoryError"),
    "a compressed text": (
        "import zlib\nx = zlib.compress(bytes(MIB)); y = [zlib.decompress(x) for _ in range(1024)]",
        "MemoryError",
    ),
    "a family": (
        "def child():\n    x = bytearray(b'x') * (60 * MIB); hold()\nfamily(child)",
        "memory",
    ),
    "a family that copies": (
        "x = bytearray(b'x') * (100 * MIB)\ndef child():\n"
        "    for at in range(0, len(x), 4096): x[at] = 2\n    hold()\nfamily(child, 8)",
        "memory",
    ),
    "threads whose first one has ended, in a family": (
        "def work():\n    x = bytearray(b'x') * (60 * MIB); hold()\n"
        "def child():\n    threading.Thread(target=work).start()\n"
        "    libc.syscall(60 if os.uname().machine == 'x86_64' else 93, 0)\nfamily(child)",
        "memory",
    ),
    "pages in pipes": (
        "class Piece(ctypes.Structure):\n"
        "    _fields_ = [('at', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "page = ctypes.create_string_buffer(8192)\n"
        "call('vmsplice', os.pipe()[1], ctypes.byref(Piece(ctypes.addressof(page), 8192)), 1, 0)",
        "ENOSYS",
    ),
    "rings": ("call('syscall', 425, 8, ctypes.create_string_buffer(120))", "ENOSYS"),
    "requests": ("call('syscall', 206, 65536, ctypes.byref(ctypes.c_long()))", "ENOSYS"),
    "faults": ("call('syscall', 323, 1)", "ENOSYS"),
    "keys": (
        "take(lambda n: call('syscall', 248, b'user', b'%d' % n, b'x' * 9, 9, -3), 64)",
        "ENOSYS",
    ),
    "maps of the kernel": (
        "call('syscall', 321, 0, ctypes.create_string_buffer(72), 72)",
        "ENOSYS",
    ),
    "counters": ("call('syscall', 298, ctypes.create_string_buffer(112), 0, -1, -1, 0)", "ENOSYS"),
    "events of files": (
        "def step(_):\n    watch = call('inotify_init1', 0)\n"
        "    call('inotify_add_watch', watch, b'/tmp', 4095)\n"
        "take(step, 4 * MIB)",
        "ENOSYS",
    ),
    "timers": (
        "def step(_):\n    timer = ctypes.c_void_p()\n"
        "    call('timer_create', 0, None, ctypes.byref(timer))\n"
        "take(step, 512)",
        "EAGAIN|timeout",
    ),
    "locks": (
        "file = open('x', 'w'); file.truncate(MIB)\n"
        "take(lambda n: fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * n), 256)",
        "timeout",
    ),
    "a deep stack": (
        "sys.setrecursionlimit(10 ** 9); threading.stack_size(512 * MIB)\n"
        "threading.Thread(target=lambda: None).start()",
        "can't start new thread",
    ),
    "pages that stay": ("call('mlockall', 3); x = bytearray(MOST)", "ENOMEM|EPERM|MemoryError"),
}

OTHERS = {
    "files that are opened": ("take(lambda _: open('/dev/null'), MIB)", "Too many open files"),
    "copies of a file": ("take(lambda _: os.dup(0), MIB)", "Too many open files"),
    "selectors": ("take(lambda _: select.epoll(), MIB)", "Too many open files"),
    "handles of processes": (
        "take(lambda _: os.pidfd_open(os.getpid()), MIB)",
        "Too many open files",
    ),
    "a limit of files": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
        "not allowed to raise maximum limit",
    ),
    "a fork bomb": ("for _ in range(1000): fork(lambda: time.sleep(60), 1)", "timeout"),
    "a fork bomb that computes": ("for _ in range(1000): fork(lambda: burn(60), 1)", "timeout"),
    "a fork bomb in a tree": (
        "def grow():\n    fork(grow, 1); fork(grow, 1)\n    time.sleep(60)\ngrow()",
        "timeout",
    ),
    "a fork bomb of sessions": (
        "def grow():\n    os.setsid(); fork(grow, 1)\n    time.sleep(60)\n"
        "fork(grow); time.sleep(60)",
        "timeout",
    ),
    "threads without end": (
        "threading.stack_size(65536)\n"
        "for _ in range(1000): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "can't start new thread",
    ),
    "an output": ("while lives(): print('x' * 4096)", "output"),
    "errors": ("while lives(): sys.stderr.write('x' * 4096)", "output"),
    "an output of children": (
        "def child():\n    while lives(): os.write(1, b'x' * 4096)\nfamily(child)",
        "output|timeout",
    ),
    "an output of an orphan": (
        "def child():\n    os.setsid()\n    while lives(): os.write(2, b'x' * 4096)\n"
        "fork(child); time.sleep(60)",
        "output",
    ),
    "a machine behind": (
        "socket.socket(40, socket.SOCK_STREAM).connect((2, 22))",
        "Address family",
    ),
    "packets of the link": ("socket.socket(17, socket.SOCK_RAW)", "Address family"),
    "algorithms of the kernel": ("socket.socket(38, socket.SOCK_SEQPACKET)", "Address family"),
    "radio": ("socket.socketpair(31, socket.SOCK_RAW)", "Address family"),
    "raw packets": ("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", "not permitted"),
    "another network": ("socket.create_connection(('192.0.2.1', 80), 5)", "unreachable"),
    "names of hosts": ("socket.getaddrinfo('example.org', 80)", "gaierror"),
    "users of its own": ("call('unshare', 0x10000000)", "ENOSPC|EPERM"),
    "a network of its own": ("call('unshare', 0x40000000)", "EPERM"),
    "users of a child": (f"{CLONE}assert clone(0x10000000 | 17) != -1, 'refused'", "refused"),
    "the host's namespaces": (
        "call('setns', os.open('/proc/1/ns/mnt', os.O_RDONLY), 0)",
        "EPERM|PermissionError",
    ),
    "a mount": ("call('mount', b'x', b'/tmp', b'tmpfs', 0, None)", "EPERM"),
    "a root": ("os.chroot('/tmp')", "not permitted"),
    "a name": ("socket.sethostname('x')", "not permitted"),
    "the first process, traced": ("call('ptrace', 16, 1, 0, 0)", "ENOSYS"),
    "a child, traced": ("call('ptrace', 0, 0, 0, 0)", "ENOSYS"),
    "the first process, killed": ("os.kill(1, 9); time.sleep(60)", "timeout"),
    "all processes, killed": ("os.kill(-1, 9); burn(0.1); sys.exit('none but its own')", "its own"),
    "a device": ("os.mknod('x', 0o60600, os.makedev(1, 1))", "not permitted"),
    "rights": ("os.setuid(0)", "not permitted|Invalid argument"),
    "a log of the kernel": ("open('/dev/kmsg').read(1)", "No such file"),
    "a setting of the kernel": (
        "open('/proc/sys/vm/overcommit_memory', 'w')",
        "Permission|Read-only",
    ),
    "a key of the kernel": ("open('/proc/sysrq-trigger', 'w')", "No such|Permission|Read-only"),
    "users of the machine": ("open('/etc/passwd').read()", "No such file"),
    "a library": ("open('/usr/lib/x', 'w')", "Permission|Read-only"),
    "itself": ("open('/tmp/main.py', 'a')", "Permission|Read-only"),
    "a way up": ("os.listdir('/proc/1/root/home')", "No such file|Permission"),
    "a clock": ("time.clock_settime(time.CLOCK_REALTIME, 0)", "not permitted"),
}

PROGRAMS = {
    f"{kind}: {name}": program
    for kind, table in {"time": TIME, "memory": MEMORY, "other": OTHERS}.items()
    for name, program in table.items()
}
# What the quick tests run: one of each kind that a bound of its own holds.
QUICK = (
    "time: children that are ignored",
    "time: children that are ignored by a flag",
    "time: orphans of sessions",
    "time: a brother that a vfork waits for",
    "time: gives way to all others",
    "time: a name that is no text",
    "memory: segments that nobody is attached to",
    "memory: files without a name",
    "memory: empty files",
    "memory: sockets",
    "memory: pages of which one stays",
    "memory: threads whose first one has ended, in a family",
    "memory: lists of rights",
    "other: a machine behind",
    "other: an output of an orphan",
)
WITH_AGENTS = (
    "memory: files without a name in a family",
    "memory: sockets",
    "memory: pages of which one stays",
)

HONEST = """
import asyncio, mmap, multiprocessing, os, signal, socket, sqlite3, subprocess, threading
from multiprocessing import shared_memory
def square(x):
    return x * x
async def serve():
    process = await asyncio.create_subprocess_shell("echo a | cat", stdout=subprocess.PIPE)
    assert (await process.communicate())[0] == b"a\\n"
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    reader, _ = await asyncio.open_connection(*server.sockets[0].getsockname())
    assert await reader.read() == b""
    server.close()
def main():
    for method in ("fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(square, range(3)) == [0, 1, 4]
    queue = multiprocessing.Queue()
    queue.put(multiprocessing.Value("i", 3).value)
    assert queue.get() == 3
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    memory.close()
    memory.unlink()
    mmap.mmap(-1, 8 << 20).close()
    asyncio.run(serve())
    base = sqlite3.connect("x.db")
    base.execute("pragma journal_mode=wal")
    base.execute("create table t (a)")
    base.close()
    assert subprocess.run(["sh", "-c", "sleep 0.1 & wait; timeout 60 true"]).returncode == 0
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.nice(1)
    assert open("/dev/zero", "rb").read(3) == bytes(3)
    a, b = socket.socketpair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    threads = [threading.Thread(target=square, args=(2,)) for _ in range(20)]
    for each in threads: each.start()
    for each in threads: each.join()
    print("well")
if __name__ == "__main__":
    main()
"""
