"""What the threads of programs do that stand still: where each of them waits in the kernel, and its calls, if there is a debugger.

It is written to OUT/NAME-stuck.txt. The library itself says on standard error which of its calls of CUDA's driver do not
return, and with which arguments: those lines are returned.
"""

import os
import re
import shutil
import subprocess

from harness import members

DEBUGGERS = (("gdb", "-batch", "-nx"), ("cuda-gdb", "-batch", "-nx"))
COMMANDS = ("set pagination off", "thread apply all backtrace 16")
LATE_CALL = re.compile(r"^.*(?:driver does not return|does not get on with a copy|does not say whether).*$", re.M)


def read(path):
    try:
        with open(path, errors="replace") as f:
            return f.read().strip()
    except OSError as err:
        return err.strerror


def threads(pid):
    """Returns a line for each thread: its name, where it waits, its system call with arguments, and what the kernel was called for."""
    lines = []
    for tid in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
        at = f"/proc/{pid}/task/{tid}/"
        lines.append(f"{tid:>8} {read(at + 'comm'):16} {read(at + 'wchan'):24} {read(at + 'syscall')}")
    return lines


def backtraces(pid, limit, homes=()):
    """Asks a debugger for all threads' calls."""
    for name, *args in DEBUGGERS:
        program = shutil.which(name) or next((p for d in homes if os.path.exists(p := os.path.join(d, "bin", name))), None)
        if not program:
            continue
        command = [program, *args, "-p", str(pid), *[word for c in COMMANDS for word in ("-ex", c)]]
        try:
            ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit, errors="replace")
            return f"{program}, exit {ran.returncode}\n{ran.stdout}"
        except subprocess.TimeoutExpired as err:
            return f"{program} takes longer than {limit} s\n{(err.stdout or b'').decode(errors='replace')}"
    return "neither gdb nor cuda-gdb was found"


def dump(h, name, groups, homes=(), limit=12):
    """Writes what all threads of some groups of processes do."""
    with open(os.path.join(h.out, name + "-stuck.txt"), "w", errors="replace") as f:
        for group in groups:
            for pid in members(group):
                f.write(f"== {pid}: {read(f'/proc/{pid}/cmdline').replace(chr(0), ' ')}\n")
                try:
                    f.write("\n".join(threads(pid)) + "\n")
                except OSError as err:
                    f.write(err.strerror + "\n")
                if os.path.exists(f"/proc/{pid}/maps") and "libcuda" in read(f"/proc/{pid}/maps"):
                    f.write("-- memory maps\n" + "\n".join(line for line in read(f"/proc/{pid}/maps").splitlines() if "libcuda" in line) + "\n")
                    f.write("-- backtraces\n" + backtraces(pid, limit, homes) + "\n")
    h.note(f"{name} stands still: {name}-stuck.txt")


def late_calls(text):
    """Returns what the library has said of calls and copies that do not end."""
    return LATE_CALL.findall(text)
