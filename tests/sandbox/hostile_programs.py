"""Programs that a sandbox must contain, by kind. Each prints LEAK if it gets what it should not.

Words between @ are replaced by what the programs are after: `tests.sandbox.run_hostile` lays it
out, and looks from outside at what became of it.
"""

# ruff: noqa: E501

from __future__ import annotations

CALLS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
column = 0 if os.uname().machine == "x86_64" else 1
NR = dict(
    io_uring_setup=(425, 425), bpf=(321, 280), userfaultfd=(323, 282), keyctl=(250, 219),
    add_key=(248, 217), perf_event_open=(298, 241), unshare=(272, 97), setns=(308, 268),
    clone=(56, 220), mount=(165, 40), umount2=(166, 39), chroot=(161, 51), pivot_root=(155, 41),
    setuid=(105, 146), mknodat=(259, 33), memfd_create=(319, 279), shmget=(29, 194),
    semget=(64, 190), msgget=(68, 186), mq_open=(180, 180), ptrace=(101, 117),
    process_vm_readv=(310, 270), process_vm_writev=(311, 271), pidfd_open=(434, 434),
    pidfd_getfd=(438, 438), pidfd_send_signal=(424, 424), kcmp=(312, 272),
    open_by_handle_at=(304, 265), name_to_handle_at=(303, 264), prlimit64=(302, 261),
    kill=(62, 129), tkill=(200, 130), tgkill=(234, 131), rt_sigqueueinfo=(129, 138),
    sched_setscheduler=(144, 119), ioprio_set=(251, 30), personality=(135, 92),
    init_module=(175, 105), syslog=(103, 116), socket=(41, 198), clone3=(435, 435),
    open_tree=(428, 428), fsopen=(430, 430), mount_setattr=(442, 442), seccomp=(317, 277),
    landlock_create_ruleset=(444, 444), swapon=(167, 224), reboot=(169, 142), acct=(163, 89),
    settimeofday=(164, 170), sethostname=(170, 161), capset=(126, 91), fanotify_init=(300, 262),
    migrate_pages=(256, 238), vmsplice=(278, 75), process_madvise=(440, 440),
    memfd_secret=(447, 447), quotactl=(179, 60), execveat=(322, 281), inotify_init1=(294, 26),
)
def call(name, *arguments):
    typed = (ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    result = libc.syscall(ctypes.c_long(NR[name][column]), *typed)
    if result >= 0:
        print("LEAK", name, arguments, result)
    return result
"""

TIME = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "huge_power": "x = 9 ** 9 ** 9",
    "long_to_text": "import sys; sys.set_int_max_str_digits(0); print(len(str(7 ** 9_000_000)))",
    "backtracking": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "signals_ignored": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "signals_blocked": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass"
    ),
    "exit_hook": "import atexit\n@atexit.register\ndef go():\n    while True: pass",
    "thread_stays": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    ),
    "stops_itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "destructor": ("class A:\n    def __del__(self):\n        while True: pass\na = A(); del a"),
    "catches_all": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "parser": "eval('(' * 150 + ')' * 150)\nwhile True: compile('x=' + '-' * 80 + '1', 'f', 'exec')",
    "alarm_off": "import signal; signal.alarm(0); signal.setitimer(0, 0)\nwhile True: pass",
    "waits_for_input": "import os, select\nr, w = os.pipe()\nselect.select([r], [], [])",
    "relay": (  # the CPU time of children that nobody waits for is in no sum of the kernel's
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n"
        "    try: pid = os.fork()\n    except OSError: pid = -1\n    if pid == 0:\n"
        "        end = time.monotonic() + 0.005\n        while time.monotonic() < end: pass\n"
        "        os._exit(0)\n    time.sleep(0.005)"
    ),
    "timer_storm": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *a: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)\nwhile True: pass"
    ),
}

PROCESSES = {
    "fork_bomb": "import os\nwhile True: os.fork()",
    "fork_bomb_quiet": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    "fork_tree": (
        "import os, time\nfor _ in range(6):\n    try: os.fork()\n    except OSError: pass\n"
        "time.sleep(60)"
    ),
    "threads": (
        "import threading, time\nthreading.stack_size(65536)\n"
        "while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    ),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        for n in range(3): os.close(n)\n        time.sleep(60)\n    os._exit(0)"
    ),
    "daemon_holds_stdout": (
        "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(60)\nprint('done')"
    ),
    "daemon_ignores_signals": (
        "import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    for n in range(1, 65):\n        try: signal.signal(n, signal.SIG_IGN)\n"
        "        except (OSError, ValueError): pass\n    while True: time.sleep(1)"
    ),
    "shell": "import os; os.system('sleep 60 & echo $$; cat @SECRET@')",
    "shell_in_background": (
        "import subprocess\nsubprocess.Popen(['/bin/sh', '-c', 'sleep 60'], start_new_session=True)"
    ),
    "exec": "import os; os.execv('/bin/sh', ['sh', '-c', 'cat @SECRET@; sleep 60'])",
    "vfork_loop": (
        "import subprocess, sys\nwhile True: subprocess.Popen([sys.executable, '-c', 'input()'])"
    ),
    "clone_parent": CALLS + "print(libc.syscall(ctypes.c_long(NR['clone'][column]), "
    "ctypes.c_long(0x8000 | 17), ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(0), "
    "ctypes.c_long(0)) >= 0 and 'LEAK')",
}

PROCESSES |= {
    "zombies": (
        "import os, time\nwhile True:\n    try:\n        if os.fork() == 0: os._exit(0)\n"
        "    except OSError: time.sleep(0.01)"
    ),
    "orphans": (
        "import os\nwhile True:\n    try:\n        if os.fork() == 0:\n            os.fork()\n"
        "            os._exit(0)\n    except OSError: pass"
    ),
    "executes_itself": (
        "import os, sys\nopen('p.py', 'w').write('import os, sys\\n"
        "os.execv(sys.executable, [sys.executable, __file__])')\n"
        "os.execv(sys.executable, [sys.executable, 'p.py'])"
    ),
    "output_from_behind": (
        "import os, time\nif os.fork():\n    print('done', flush=True)\n    os._exit(0)\n"
        "os.setsid()\nwhile True: os.write(1, b'x' * 4096)"
    ),
}

MEMORY = {
    "one_block": "x = bytearray(10**10)",
    "one_block_touched": "x = b'x' * (700 * 2**20)\nprint('LEAK')",
    "growth": "x = []\nwhile True: x.append(b'x' * 2**20)",
    "small_objects": "x = []\nwhile True: x.append([len(x)])",
    "over_forks": (
        "import os, time\nfor _ in range(5): os.fork()\nx = []\n"
        "try:\n    while len(x) < 150: x.append(os.urandom(2**20))\nexcept MemoryError: pass\n"
        "time.sleep(60)"
    ),
    "shared_map": ("import mmap\nm = mmap.mmap(-1, 2**31)\nwhile True: m.write(b'x' * 2**20)"),
    "shared_maps_over_forks": (
        "import mmap, os, time\nfor _ in range(4): os.fork()\nm = mmap.mmap(-1, 2**27)\n"
        "m.write(b'x' * 2**27)\ntime.sleep(60)"
    ),
    "memfd": CALLS + "fd = call('memfd_create', b'x', 0)\n"
    "while fd >= 0: os.write(fd, b'x' * 2**20)",
    "memfd_secret": CALLS + "call('memfd_secret', 0)",
    "sysv": CALLS + "call('shmget', 0, 2**30, 0o1600)\ncall('semget', 0, 1, 0o1600)\n"
    "call('msgget', 0, 0o1600)",
    "message_queue": CALLS + "call('mq_open', b'/queue', 0o102, 0o600, None)",
    "pipes": (
        "import fcntl, os\nfds = []\ntry:\n    while True:\n        r, w = os.pipe()\n"
        "        os.set_blocking(w, False)\n        fds += [r, w]\n"
        "        try: fcntl.fcntl(w, 1031, 2**20); print('LEAK')\n        except OSError: pass\n"
        "        try:\n            while True: os.write(w, b'x' * 65536)\n"
        "        except BlockingIOError: pass\nexcept OSError as error: print(error, len(fds))"
    ),
    "sockets": (
        "import socket\nheld = []\ntry:\n    while True:\n        a, b = socket.socketpair()\n"
        "        held += [a, b]\n        a.setblocking(False)\n"
        "        try:\n            while True: a.send(b'x' * 65536)\n"
        "        except BlockingIOError: pass\nexcept OSError as error: print(error)"
    ),
    "decompression": (
        "import zlib\ndata = zlib.compress(bytes(2**20)) \n"
        "for _ in range(3): data = zlib.compress(data * 100)\n"
        "x = [zlib.decompress(data)]\nwhile True: x.append(b''.join(x * 200))"
    ),
    "repetition": "x = '*' * (2**33)",
    "range_list": "x = list(range(10**10))",
    "deep_recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f([x, x])\nf(0)"
    ),
    "locked": CALLS + "x = bytearray(2**26)\nprint(libc.mlockall(3) == 0 and 'LEAK')",
}

MEMORY |= {
    "sparse_pages": (
        "import mmap\nheld = []\nwhile True:\n    m = mmap.mmap(-1, 2**26, flags=0x4022)\n"
        "    for at in range(0, 2**26, 4096): m[at] = 1\n    held.append(m)"
    ),
    "stacks": (
        "import threading, time\nthreading.stack_size(2**25)\n"
        "def deep(n): return time.sleep(60) if n == 0 else deep(n - 1)\n"
        "while True: threading.Thread(target=deep, args=(900,), daemon=True).start()"
    ),
    "mapped_file_over_forks": (
        "import mmap, os, time\nf = open('f', 'wb+'); f.truncate(2**22)\n"
        "for _ in range(3): os.fork()\n"
        "held = [mmap.mmap(f.fileno(), 2**22, flags=mmap.MAP_PRIVATE) for _ in range(20)]\n"
        "for m in held: m[:] = b'x' * 2**22\ntime.sleep(60)"
    ),
}

DISK = {
    "full": "with open('f', 'wb') as f:\n    while True: f.write(bytes(2**20))",
    "full_quietly": (
        "import os\nn = 0\nfor i in range(200):\n    try:\n        with open(f'f{i}', 'wb') as f:\n"
        "            for _ in range(8): n += f.write(os.urandom(2**20))\n"
        "    except OSError: pass\nprint('LEAK' if n > 2**25 else n)"
    ),
    "inodes": (
        "n = 0\ntry:\n    while n < 10_000:\n        open(str(n), 'w').close(); n += 1\n"
        "except OSError: pass\nprint('LEAK' if n > 100 else n)"
    ),
    "sparse": "with open('f', 'wb') as f:\n    f.truncate(2**40)\n    print('LEAK')",
    "deep": ("import os\nfor _ in range(5000):\n    os.mkdir('d' * 100); os.chdir('d' * 100)"),
    "odd_names": (
        "import os\nfor name in (b'\\xff\\xfe', b'a\\nb', b'-rf', b'\\x1b[2J', b' '):\n"
        "    open(name, 'w').close()"
    ),
    "unreadable": (
        "import os\nos.mkdir('d'); open('d/f', 'w').close(); os.chmod('d/f', 0); os.chmod('d', 0)"
    ),
    "outside": "open('@FOLDER@/written', 'w').write('x')",
    "outside_up": "open('../../../../../../@FOLDER@/written', 'w').write('x')",
    "outside_remove": "import os; os.remove('@SECRET@')",
    "outside_rename": "import os; os.rename('@SECRET@', '@FOLDER@/renamed')",
    "outside_mode": "import os; os.chmod('@SECRET@', 0)",
    "outside_truncate": "import os; os.truncate('@SECRET@', 0)",
    "outside_times": "import os; os.utime('@SECRET@', (0, 0))",
    "outside_link": "import os; os.symlink('/etc', '@FOLDER@/link')",
    "outside_folder": "import shutil; shutil.rmtree('@FOLDER@')",
    "shared_memory": (
        "import os\nfor place in ('/dev/shm', '/run', '/var/tmp', '/home', '/'):\n"
        "    try:\n        open(place + '/@WORD@', 'wb').write(bytes(2**24))\n"
        "    except OSError as error: print(error)"
    ),
    "interpreter": (
        "import os\nfor name in (os.__file__, '/usr/lib/x', '/usr/bin/python3'):\n"
        "    try: open(name, 'ab').write(b'#'); print('LEAK')\n    except OSError: pass"
    ),
    "interpreter_truncate": (
        "import os\nfd = os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)\nprint('LEAK')"
    ),
}

DISK |= {
    "deleted_but_open": (
        "import os\nheld = []\nwhile True:\n    f = open('f', 'wb'); os.unlink('f'); held.append(f)\n"
        "    f.write(bytes(2**20)); f.flush()"
    ),
    "reserved": (
        "import os\nfd = os.open('f', os.O_RDWR | os.O_CREAT)\n"
        "os.posix_fallocate(fd, 0, 2**26)\nprint('LEAK')"
    ),
    "names": (
        "import os\nopen('f', 'w').close()\nn = 0\ntry:\n    while n < 5000:\n"
        "        os.link('f', f'{n}'.rjust(200, 'x')); n += 1\nexcept OSError: pass\n"
        "print('LEAK' if n > 100 else n)"
    ),
    "attributes": (
        "import os\nopen('f', 'w').close()\nos.setxattr('f', 'user.x', b'x' * 60000)\nprint('LEAK')"
    ),
}

OUTPUT = {
    "flood": "while True: print('x' * 65536)",
    "flood_errors": "import sys\nwhile True: sys.stderr.write('x' * 65536)",
    "one_line": "import sys\nsys.stdout.write('x' * 50_000_000)",
    "raw": "import os\nos.write(1, bytes(range(256)))",
    "closed": "import os\nos.close(1); os.close(2); os.close(0)",
    "closed_then_opened": (
        "import os\nos.close(1)\nr, w = os.pipe()\nos.write(w, b'x')\nprint('lost')"
    ),
    "unread_input": "print('done')",
    "escape_codes": "print('\\x1b[2J\\x1b]0;title\\x07' * 1000, end='\\0')",
    "through_channel": (
        "import os\nfor n in range(3, 1024):\n    try: os.write(n, b'R'); print('LEAK', n)\n"
        "    except OSError: pass"
    ),
    "flood_slowly": ("import os, time\nwhile True: os.write(1, b'x' * 20_000); time.sleep(0.001)"),
}

OUTPUT |= {
    "opened_again": (
        "for name in ('/dev/stdout', '/proc/self/fd/1'):\n    try:\n"
        "        with open(name, 'wb') as f:\n            while True: f.write(b'x' * 65536)\n"
        "    except OSError as error: print(error)"
    ),
    "through_the_error": "import os\nwhile True: os.writev(2, [b'x' * 65536] * 16)",
}

READING = {
    "passwd": "print(open('/etc/passwd').read().count('root') and 'LEAK')",
    "shadow": "print(open('/etc/shadow').read() and 'LEAK')",
    "repository": "print(open('@REPOSITORY@/pyproject.toml').read() and 'LEAK')",
    "repository_import": "import sys\nsys.path.insert(0, '@REPOSITORY@')\nimport roll\nprint('LEAK')",
    "folder": "import os; print(os.listdir('@FOLDER@') and 'LEAK')",
    "secret": "print(open('@SECRET@').read())",
    "secret_by_parts": (
        "import os\nfd = os.open('/', os.O_RDONLY)\n"
        "print(os.read(os.open('@SECRET@'.lstrip('/'), os.O_RDONLY, dir_fd=fd), 100))"
    ),
    "secret_by_link": "import os\nos.symlink('@SECRET@', 'link')\nprint(open('link').read())",
    "secret_by_hard_link": "import os\nos.link('@SECRET@', 'link')\nprint(open('link').read())",
    "secret_by_dots": "print(open('../' * 20 + '@SECRET@').read())",
    "secret_by_proc": (
        "import glob\nfor root in [*glob.glob('/proc/[0-9]*/root'), '/proc/1/root', "
        "'/proc/@PARENT@/root', '/proc/@TEMPLATE@/root']:\n"
        "    try: print(open(root + '@SECRET@').read())\n    except OSError: pass"
    ),
    "secret_by_cwd": (
        "import glob\nfor cwd in [*glob.glob('/proc/[0-9]*/cwd'), '/proc/@PARENT@/cwd']:\n"
        "    try: print('LEAK' if open(cwd + '/pyproject.toml').read() else '')\n"
        "    except OSError: pass"
    ),
    "secret_by_handle": CALLS + "handle = ctypes.create_string_buffer(256)\n"
    "handle[0] = 128\nmount = ctypes.c_int()\n"
    "print(call('name_to_handle_at', -100, b'@SECRET@', handle, ctypes.byref(mount), 0))\n"
    "call('open_by_handle_at', 0, handle, 0)",
    "secret_by_mapping": (
        "import mmap, os\nfd = os.open('@SECRET@', os.O_RDONLY)\n"
        "print(mmap.mmap(fd, 0, prot=mmap.PROT_READ)[:])"
    ),
    "environment": (
        "import os\nprint(os.environ)\n"
        "for n in ('self', '@PARENT@', '@WORKER@', '@TEMPLATE@', '1'):\n"
        "    try: print(open(f'/proc/{n}/environ').read())\n    except OSError: pass"
    ),
    "others_processes": (
        "import os\nfor n in range(1, 5000):\n    try: data = open(f'/proc/{n}/cmdline').read()\n"
        "    except OSError: continue\n    print('LEAK' if data and 'inside' not in data else '')\n"
    ),
    "others_memory": (
        "import os\nfor n in ('@PARENT@', '@WORKER@', '@TEMPLATE@', '1', str(os.getppid())):\n"
        "    for name in ('mem', 'maps', 'auxv', 'syscall', 'stack', 'fd', 'fdinfo', 'map_files'):\n"
        "        try: open(f'/proc/{n}/{name}', 'rb').read(1); print('LEAK', n, name)\n"
        "        except OSError: pass\n"
        "        try: os.listdir(f'/proc/{n}/{name}') and print('LEAK', n, name)\n"
        "        except OSError: pass"
    ),
    "descriptors": (
        "import os\nfor n in range(3, 4096):\n    try: os.fstat(n); print('LEAK', n)\n"
        "    except OSError: pass"
    ),
    "input_changed": (
        "import os\nfor call in (lambda: os.write(0, b'x'), lambda: os.ftruncate(0, 0), "
        "lambda: os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x')):\n"
        "    try: call(); print('LEAK')\n    except OSError: pass"
    ),
    "kernel_text": (
        "import os\nfor name in ('/proc/kallsyms', '/proc/kmsg', '/dev/mem', '/dev/kmsg', "
        "'/proc/config.gz', '/sys/kernel/notes', '/proc/mounts', '/proc/self/mountinfo', "
        "'/proc/net/tcp', '/proc/partitions', '/proc/kcore', '/boot'):\n"
        "    try: open(name, 'rb').read(10) and not name.startswith('/proc/self') and "
        "name != '/proc/mounts' and print('LEAK', name)\n    except OSError: pass"
    ),
    "frames": (
        "import gc, sys\nframe = sys._getframe()\nwhile frame:\n"
        "    print(frame.f_locals)\n    frame = frame.f_back\n"
        "for each in gc.get_objects():\n    if type(each) is dict: print(str(each)[:200])"
    ),
}
