"""More programs that a sandbox must contain: attacks, network, kernel, traces between jobs."""

# ruff: noqa: E501

from __future__ import annotations

from tests.sandbox.hostile_programs import CALLS, DISK, MEMORY, OUTPUT, PROCESSES, READING, TIME

PIDS = "@PARENT@, @WORKER@, @TEMPLATE@, @VICTIM@"

ATTACK = {
    "kill_parent": "import os\nos.kill(os.getppid(), 9)",
    "kill_each": (
        f"import os\nfor pid in ({PIDS}, 1, os.getppid()):\n    for n in (9, 19, 15, 2):\n"
        "        try: os.kill(pid, n)\n        except OSError: pass"
    ),
    "kill_all": "import os\nos.kill(-1, 9)",
    "kill_group": "import os\nos.kill(0, 9)",
    "kill_groups": (
        f"import os\nfor pid in ({PIDS}):\n    try: os.killpg(pid, 9)\n    except OSError: pass"
    ),
    "signal_first_process": (
        "import os, time\nfor n in range(1, 65):\n    try: os.kill(1, n)\n    except OSError: pass\n"
        "time.sleep(0.1)\nprint('still here')"
    ),
    "kill_by_calls": CALLS + f"for pid in ({PIDS}):\n"
    "    call('kill', pid, 9); call('tkill', pid, 9); call('tgkill', pid, pid, 9)\n"
    "    call('rt_sigqueueinfo', pid, 9, ctypes.create_string_buffer(128))\n"
    "    fd = call('pidfd_open', pid, 0)\n    call('pidfd_send_signal', fd, 9, None, 0)\n",
    "kill_by_owner": (
        f"import fcntl, os\nfor pid in ({PIDS}):\n    r, w = os.pipe()\n"
        "    for command, value in ((8, pid), (10, 9), (fcntl.F_SETFL, os.O_ASYNC)):\n"
        "        try: fcntl.fcntl(r, command, value)\n        except OSError: pass\n"
        "    os.write(w, b'x')"
    ),
    "kill_by_terminal": (
        f"import fcntl, os, struct\nfor pid in ({PIDS}):\n    r, w = os.pipe()\n"
        "    for request in (0x8901, 0x8902, 0x5410, 0x540E, 0x5412):\n"
        "        try: fcntl.ioctl(r, request, struct.pack('i', pid)); print('LEAK')\n"
        "        except OSError: pass"
    ),
    "kill_worker_children": (
        "import os\nfor pid in range(max(2, @TEMPLATE@ - 50), @TEMPLATE@ + 50):\n"
        "    if pid != os.getpid():\n        try: os.kill(pid, 9)\n        except OSError: pass"
    ),
    "ptrace": CALLS + f"for pid in ({PIDS}, os.getppid(), 1):\n"
    "    call('ptrace', 16, pid, 0, 0); call('ptrace', 0x4206, pid, 0, 0)\n",
    "process_vm": CALLS + "class V(ctypes.Structure): "
    "_fields_ = [('a', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
    "b = ctypes.create_string_buffer(8)\nv = V(ctypes.addressof(b), 8)\n"
    f"for pid in ({PIDS}, os.getppid(), 1):\n"
    "    for name in ('process_vm_readv', 'process_vm_writev'):\n"
    "        call(name, pid, ctypes.byref(v), 1, ctypes.byref(v), 1, 0)\n",
    "steal_descriptor": CALLS + f"for pid in ({PIDS}, 1):\n"
    "    fd = call('pidfd_open', pid, 0)\n    call('pidfd_getfd', fd, 0, 0)\n"
    "    call('kcmp', pid, pid, 0, 0, 0)\n",
    "core": "import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (-1, -1))\nos.abort()",
    "core_here": "import os\nos.abort()",
    "segmentation_fault": "import ctypes; ctypes.string_at(0)",
    "illegal_instruction": "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
    "real_time_signal": "import os; os.kill(os.getpid(), 40)",
    "stack": "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n"
    "    def __getattr__(self, n): return getattr(self, n)\nA().x",
    "raise_limits": (
        "import resource\nfor name in dir(resource):\n    if name.startswith('RLIMIT_'):\n"
        "        n = getattr(resource, name); soft, hard = resource.getrlimit(n)\n"
        "        try: resource.setrlimit(n, (-1, -1)); hard != -1 and print('LEAK', name)\n"
        "        except (OSError, ValueError): pass"
    ),
    "others_limits": CALLS + "import struct\nzero = struct.pack('QQ', 0, 0)\n"
    f"for pid in ({PIDS}, 1, os.getppid()):\n"
    "    if pid:\n        for n in range(16): call('prlimit64', pid, n, zero, None)\n",
    "priority": (
        f"import os\nfor pid in ({PIDS}, 1):\n    for call in (\n"
        "        lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),\n"
        "        lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),\n"
        "        lambda: os.setpriority(os.PRIO_USER, 0, 19),\n"
        "        lambda: os.sched_setaffinity(pid, {0}),\n"
        "        lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),\n"
        "        lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))):\n"
        "        try: call(); print('LEAK')\n        except OSError: pass"
    ),
    "io_priority": CALLS + "call('ioprio_set', 1, @TEMPLATE@, 3 << 13)\n"
    "call('ioprio_set', 3, 0, 3 << 13)\n",
    "outlive_parent": CALLS + "print(libc.prctl(1, 0, 0, 0, 0) == 0 and 'LEAK')\n"
    "print(libc.prctl(36, 1, 0, 0, 0) == 0 and 'LEAK')\n"
    "print(libc.prctl(0x59616d61, -1, 0, 0, 0) == 0 and 'LEAK')",
    "forged_outcome": (
        "import json, os, sys\nmessage = json.dumps({'ended': 0, 'cpu_s': 0, 'peak_kb': 0}).encode()\n"
        "for n in range(3, 4096):\n    try: os.write(n, message); print('LEAK')\n"
        "    except OSError: pass\nos._exit(7)"
    ),
    "forged_end": (
        "import threading, os\nthreading._shutdown = lambda: None\nos._exit = lambda code: None\n"
        "import sys\nsys.exit(9)"
    ),
    "exception_with_code": (
        "class E(Exception):\n    def __str__(self): raise self\n"
        "    __class__ = property(lambda s: SystemExit)\nraise E"
    ),
    "import_hook": (
        "import builtins, sys\nbuiltins.__import__ = None\nsys.modules.clear()\nsys.path[:] = []\n"
        "sys.stdout = None\nbuiltins.print = None"
    ),
}

ATTACK |= {
    "signal_by_timer": CALLS + f"for pid in ({PIDS}, 1, os.getppid()):\n"
    "    event = ctypes.create_string_buffer(64)\n"
    "    for at, value in ((8, 9), (12, 4), (16, pid)):\n"  # signal, SIGEV_THREAD_ID, thread
    "        event[at:at + 4] = value.to_bytes(4, 'little')\n    timer = ctypes.c_int()\n"
    "    NR['timer_create'] = (222, 107)\n"
    "    call('timer_create', 1, event, ctypes.byref(timer))\n",
    "signal_by_lease": (
        "import fcntl, os\nfor path in (os.__file__, '.', '/'):\n"
        "    try: fd = os.open(path, os.O_RDONLY)\n    except OSError: continue\n"
        "    for command, value in ((1024, 0), (1026, 0x8000001F)):\n"
        "        try: fcntl.fcntl(fd, command, value); print('LEAK', command)\n"
        "        except OSError: pass"
    ),
    "joins_groups": (
        f"import os\nfor pid in ({PIDS}, 1, os.getppid()):\n"
        "    try: os.setpgid(0, pid); print('LEAK')\n    except OSError: pass\n"
        "    try: os.tcsetpgrp(0, pid); print('LEAK')\n    except OSError: pass"
    ),
    "settings_of_the_process": CALLS
    + "for option in (8, 23, 24, 28, 31, 32, 33, 35, 41, 53, 55, 57, 59, 62):\n"
    "    if libc.prctl(option, 1, 1, 1, 0) == 0 or libc.prctl(option, 1, 0, 0, 0) == 0:\n"
    "        option == 23 or print('LEAK', option)",
}

NETWORK = {
    "tcp": "import socket\nsocket.create_connection(('127.0.0.1', @PORT@), 1).send(b'x')",
    "tcp_outside": "import socket\nsocket.create_connection(('1.1.1.1', 53), 1)\nprint('LEAK')",
    "tcp6": "import socket\nsocket.create_connection(('::1', @PORT@), 1).send(b'x')",
    "udp": (
        "import socket\nsocket.socket(2, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @PORT@))"
    ),
    "listening": (
        "import socket\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print('LEAK')"
    ),
    "abstract": "import socket\nsocket.socket(1).connect('\\0@ABSTRACT@')",
    "abstract_datagram": (
        "import socket\nsocket.socket(1, socket.SOCK_DGRAM).sendto(b'x', '\\0@ABSTRACT@d')"
    ),
    "pair_sends_elsewhere": (
        "import socket\na, b = socket.socketpair(1, socket.SOCK_DGRAM)\n"
        "for place in ('\\0@ABSTRACT@d', '@FOLDER@/datagrams'):\n"
        "    try: a.sendto(b'x', place)\n    except OSError as error: print(error)\n"
        "    try: a.connect(place); a.send(b'x')\n    except OSError as error: print(error)"
    ),
    "path": "import socket\nsocket.socket(1).connect('@FOLDER@/socket')",
    "netlink": "import socket\nsocket.socket(16, socket.SOCK_RAW, 0)\nprint('LEAK')",
    "raw": "import socket\nsocket.socket(2, socket.SOCK_RAW, 1)\nprint('LEAK')",
    "packet": "import socket\nsocket.socket(17, socket.SOCK_RAW, 0)\nprint('LEAK')",
    "vsock": "import socket\nsocket.socket(40, 1)\nprint('LEAK')",
    "crypto": "import socket\nsocket.socket(38, 5)\nprint('LEAK')",
    "names": "import socket\nprint(socket.gethostbyname('example.org') and 'LEAK')",
    "pass_descriptors": (
        "import os, socket\na, b = socket.socketpair()\n"
        "while True: socket.send_fds(a, [b'x'], [a.fileno(), b.fileno()]); print('LEAK')"
    ),
}

NETWORK |= {
    "all_families": (
        "import socket\nfor family in range(64):\n    for kind in range(1, 11):\n"
        "        try: socket.socket(family, kind).close(); print('LEAK', family, kind)\n"
        "        except OSError: pass"
    ),
}

KERNEL = {
    "namespaces": CALLS + "for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, "
    "0x4000000, 0x2000000, 0x80): call('unshare', flag)\n",
    "clone": CALLS + "for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000): "
    "call('clone', flag | 17, 0, 0, 0, 0) == 0 and os._exit(0)\n",
    "clone3": CALLS + "call('clone3', (0x10000000).to_bytes(8, 'little') + bytes(80), 88)\n",
    "enter": CALLS + "call('setns', 0, 0)\ncall('pidfd_open', 1, 0)\n",
    "mount": CALLS + "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)\n"
    "call('mount', b'/', b'/tmp', None, 4096, None)\n"
    "call('mount', b'proc', b'/proc', b'proc', 0, None)\n",
    "umount": CALLS + "for place in (b'/proc', b'/tmp', b'/', b'/usr/lib'): "
    "call('umount2', place, 2)\n",
    "new_mounts": CALLS + "call('open_tree', -100, b'/', 1)\ncall('fsopen', b'tmpfs', 0)\n"
    "call('mount_setattr', -100, b'/', 0, bytes(32), 32)\n",
    "chroot": CALLS + "call('chroot', b'.')\ncall('pivot_root', b'.', b'.')\n",
    "setuid": CALLS + "for n in (0, 1, 65534): call('setuid', n) == 0 and n == 0 and "
    "print('LEAK')\nprint('LEAK' if os.getuid() == 0 and @DROPPED@ else '')",
    "capabilities": CALLS + "header = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"
    "data = (ctypes.c_uint32 * 6)()\nlibc.capget(header, data)\n"
    "print('LEAK' if any(data) else '')\ndata[0] = data[1] = 0xffffffff\n"
    "call('capset', header, data)\n",
    "mknod": CALLS + "call('mknodat', -100, b'disk', 0o60666, 0xfe00)\n"
    "call('mknodat', -100, b'mem', 0o20666, 0x101)\n",
    "devices": (
        "import os\nfor name in ('vda', 'sda', 'nvme0n1', 'mem', 'kvm', 'tty', 'console', 'fuse', "
        "'ptmx', 'vsock', 'net/tun', 'loop-control', 'userfaultfd', 'kmsg', 'input', 'dri'):\n"
        "    try: os.open('/dev/' + name, os.O_RDONLY); print('LEAK', name)\n"
        "    except OSError: pass"
    ),
    "sysctl": (
        "import os\nfor name in ('kernel/core_pattern', 'vm/drop_caches', 'kernel/hostname', "
        "'kernel/randomize_va_space'):\n    try:\n"
        "        fd = os.open('/proc/sys/' + name, os.O_WRONLY); print('LEAK')\n"
        "    except OSError: pass\n"
        "for name in ('/proc/self/oom_score_adj', '/proc/self/uid_map', '/proc/self/coredump_filter',"
        " '/proc/self/autogroup'):\n    try: open(name, 'w').write('0')\n    except OSError: pass"
    ),
    "io_uring": CALLS + "call('io_uring_setup', 8, bytes(120))\n",
    "bpf": CALLS + "call('bpf', 0, bytes(72), 72)\n",
    "userfaultfd": CALLS + "call('userfaultfd', 1)\n",
    "keyring": CALLS + "call('keyctl', 0, -3, 1)\ncall('add_key', b'user', b'k', b'x', 1, -3)\n",
    "perf": CALLS + "call('perf_event_open', bytes(112), 0, -1, -1, 0)\n",
    "modules": CALLS + "call('init_module', b'x', 1, b'')\ncall('swapon', b'x', 0)\n"
    "call('reboot', 0xfee1dead, 672274793, 0, None)\ncall('acct', None)\n"
    "call('syslog', 3, ctypes.create_string_buffer(64), 64)\ncall('quotactl', 0, None, 0, None)\n",
    "machine": CALLS + "call('settimeofday', bytes(16), None)\ncall('sethostname', b'x', 1)\n",
    "watching": CALLS + "call('fanotify_init', 0, 0)\ncall('inotify_init1', 0)\n"
    "call('migrate_pages', @PARENT@, 1, bytes(8), bytes(8))\ncall('vmsplice', 1, None, 0, 0)\n"
    "call('process_madvise', 0, None, 0, 0, 0)\ncall('execveat', 0, b'', None, None, 0x1000)\n",
    "personality": CALLS + "call('personality', 0x0040000)\n",
    "new_filter": CALLS + "call('seccomp', 1, 0, None)\ncall('seccomp', 2, 0, bytes(4))\n"
    "call('landlock_create_ruleset', None, 0, 1)\n"
    "print(libc.prctl(22, 2, bytes(16), 0, 0) == 0 and 'LEAK')",
    "x32": CALLS + "print(libc.syscall(ctypes.c_long(0x40000000 + 39)) > 0 and 'LEAK')",
    "int80": (
        "import ctypes, mmap, os\ncode = bytes.fromhex('b814000000cd80c3')\n"  # getpid of i386
        "m = mmap.mmap(-1, 4096, prot=7)\nm.write(code)\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
        "print('LEAK' if f() > 0 else '')"
    ),
    "setuid_program": (
        "import os, subprocess\nfor name in ('su', 'sudo', 'mount', 'passwd', 'newuidmap'):\n"
        "    try: subprocess.run([name, '--version'], timeout=1)\n    except Exception: pass\n"
        "done = subprocess.run(['unshare', '-Ur', 'id', '-u'], capture_output=True)\n"
        "print('LEAK' if done.returncode == 0 else '')"
    ),
    "truncated_high_bits": CALLS + "call('socket', (1 << 32) | 2, 1, 0)\n"
    "call('unshare', (1 << 32) | 0x10000000)\n"
    "call('prlimit64', 1 << 32 | @TEMPLATE@, 7, bytes(16), None)\n",
}

KERNEL |= {
    "new_calls": CALLS + "import errno\nallowed = (436, 439)\n"
    "for n in [*range(424, 700), *range(1000, 1100)]:\n    if n not in allowed:\n"
    "        result = libc.syscall(ctypes.c_long(n), *[ctypes.c_long(-1)] * 6)\n"
    "        if result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):\n"
    "            print('LEAK', n, result, ctypes.get_errno())",
    "moving_data": CALLS
    + "NR |= dict(splice=(275, 76), tee=(276, 77), process_vm_writev=(311, 271),\n"
    "    move_pages=(279, 239), mbind=(237, 235), set_mempolicy=(238, 237), remap_file_pages=(216, 234),\n"
    "    kexec_load=(246, 104), lookup_dcookie=(212, 18), nfsservctl=(180, 42), vhangup=(153, 58),\n"
    "    iopl=(172, 1000), ioperm=(173, 1000), modify_ldt=(154, 1000), uselib=(134, 1000))\n"
    "r, w = os.pipe()\nfor name in ('splice', 'tee'): call(name, r, 0, w, 0, 1, 2)\n"
    "for name in ('move_pages', 'mbind', 'set_mempolicy', 'remap_file_pages', 'kexec_load',\n"
    "    'lookup_dcookie', 'nfsservctl', 'vhangup', 'iopl', 'ioperm', 'modify_ldt', 'uselib'):\n"
    "    call(name, 0, 0, 0, 0, 0, 0)\n",
}

BETWEEN = {
    "builtins": "import builtins\nbuiltins.print = lambda *a: None\nbuiltins.KEPT = 1",
    "modules": "import json, sys\njson.dumps = lambda x: 'forged'\nsys.modules['math'] = None",
    "files": "open('/tmp/kept', 'w').write('x')",
    "heap": "held = [b''.join([b'OLD', b'_SECRET_', b'WORD'] * 9) for _ in range(1000)]",
    "environment": "import os\nos.environ['KEPT'] = '1'\nos.chdir('/')\nos.umask(0o777)",
    "collector": "import gc, sys\ngc.disable()\nsys.setrecursionlimit(50)\nsys.setswitchinterval(100)",
    "signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))"
    ),
    "open_files": (
        "import os, sys\nfor name in (os.__file__, sys.executable, '.'):\n"
        "    try:\n        for _ in range(60): os.dup(os.open(name, os.O_RDONLY))\n"
        "    except OSError: break"
    ),
    "linecache": "import linecache, sys\nlinecache.cache.clear()\nsys.stdin.close()",
}

PROGRAMS: dict[str, str] = {
    f"{kind}-{name}": text
    for kind, programs in {
        "time": TIME,
        "processes": PROCESSES,
        "memory": MEMORY,
        "disk": DISK,
        "output": OUTPUT,
        "reading": READING,
        "attack": ATTACK,
        "network": NETWORK,
        "kernel": KERNEL,
        "between": BETWEEN,
    }.items()
    for name, text in programs.items()
}

HONEST = """
import builtins, json, math, os, sys
a, b = map(int, input().split())
left = [hasattr(builtins, "KEPT"), "KEPT" in os.environ, os.path.exists("/tmp/kept")]
print(json.dumps([a + b, math.gcd(a, b), left, sys.getrecursionlimit() > 900]))
"""
HONEST_INPUT, HONEST_OUTPUT = "84 36", "[120, 12, [false, false, false], true]\n"
"""What runs after each program on the same worker."""

SEARCH = """
import gc
word, found = b"".join([b"OLD", b"_SECRET_", b"WORD"]), 0
found += sum(type(o) is list and any(type(x) is bytes and word in x for x in o)
             for o in gc.get_objects() if o is not None)
try:
    ranges = [line.split()[0] for line in open("/proc/self/maps") if "rw-p" in line]
    with open("/proc/self/mem", "rb") as memory:
        for each in ranges:
            first, last = (int(x, 16) for x in each.split("-"))
            memory.seek(first)
            found += max(0, memory.read(last - first).count(word * 2))
except OSError:
    pass
print(found)
"""
"""Runs after `between-heap`, and finds nothing of it."""
