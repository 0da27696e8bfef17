"""What run.py runs steps with: processes that end in time, their logs, results and the table of them.

A step is a function that is given a Harness and adds results to it by passed, failed and skipped. Its processes have
process groups of their own, which are ended by their ids when the step's time is over. A step that adds no result,
or that raises an exception, has failed.
"""

import dataclasses
import glob
import os
import re
import signal
import subprocess
import tarfile
import time
import traceback

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
NO_TIME = "no time left"


@dataclasses.dataclass
class Result:
    step: str
    case: str
    verdict: str
    figure: str = ""
    goal: str = ""
    why: str = ""


@dataclasses.dataclass
class Step:
    name: str
    run: object  # a function of a Harness
    limit: float  # seconds
    least: float = 5  # with fewer seconds left it is not begun


@dataclasses.dataclass
class Ran:
    """A process that has ended. rc is negative if a signal has ended it."""

    args: list
    rc: int
    late: bool  # it was ended, because its time was over or its neighbour had failed
    text: str
    log: str
    seconds: float

    def ok(self):
        return self.rc == 0 and not self.late

    def why(self):
        """Says in one line why it failed: how it ended, and its last words."""
        words = [line.strip() for line in self.text.splitlines() if re.search(r"\w", line)]
        last = words[-1][:160] if words else "it said nothing"
        how = f"exit {self.rc}"
        if self.late:
            how = f"ended after {self.seconds:.0f} s"
        elif self.rc < 0:
            how = f"ended by {signal.Signals(-self.rc).name}"
        return f"{how}: {last} ({os.path.basename(self.log)})"


class Harness:
    def __init__(self, out, limit, quick=False):
        self.out, self.quick = os.path.abspath(out), quick
        self.few = False  # fewer repetitions, of all sizes
        self.results, self.tables, self.facts = [], [], {}
        self.started = time.monotonic()
        self.end = self.step_end = self.started + limit
        self.step = ""
        self.running = []  # groups of processes that are not over
        self.names = {}
        os.makedirs(self.out, exist_ok=True)
        forget(self.out)
        self.journal = open(os.path.join(self.out, "harness.log"), "w", buffering=1)

    # What is said.

    def note(self, text):
        line = f"[{time.monotonic() - self.started:6.1f}] {text}"
        print(line, flush=True)
        self.journal.write(line + "\n")

    def add(self, case, verdict, figure="", goal="", why=""):
        self.results.append(Result(self.step, case, verdict, figure, goal, why))
        self.note(f"{verdict} {self.step} {case} {figure}{': ' + why if why else ''}")

    def passed(self, case, figure="", goal=""):
        self.add(case, PASS, figure, goal)

    def failed(self, case, why, figure="", goal=""):
        self.add(case, FAIL, figure, goal, why)

    def skipped(self, case, why):
        self.add(case, SKIP, why=why)

    def table(self, title, text):
        """Keeps a table for the summary as it is."""
        self.tables.append((title, text.rstrip("\n")))

    # Processes.

    def left(self):
        return self.step_end - time.monotonic()

    def log(self, name):
        """Returns the path of a new log. The same name again gets a number."""
        self.names[name] = self.names.get(name, 0) + 1
        if self.names[name] > 1:
            name = f"{name}.{self.names[name]}"
        return os.path.join(self.out, name + ".log")

    def run(self, name, args, limit, env=None, cwd=None):
        return self.together(name, [(args, env or {})], limit, cwd)[0]

    def together(self, name, sides, limit, cwd=None, ready=None, grace=10, stuck=None):
        """Runs several programs at a time, each with variables of its own, and waits for all of them.

        If some are late, stuck is called with the ids of their groups before they are ended. Once one has failed, the others have grace seconds to end by themselves. If ready is given, the next one is
        started when it returns true, or the one before has ended, or after half of the time.
        """
        limit = max(1, min(limit, self.left()))
        procs, started = [], time.monotonic()
        try:
            for i, (args, env) in enumerate(sides):
                path = self.log(f"{name}-{i}" if len(sides) > 1 else name)
                procs.append(self.start(args, env, cwd, path))
                until = time.monotonic() + limit / 2
                while ready and procs[-1][0].poll() is None and time.monotonic() < until and not ready():
                    time.sleep(0.02)
                if ready and procs[-1][0].poll():
                    break  # a server that has failed has no clients
            late = wait_all([p for p, _ in procs], started + limit, grace)
            if late and stuck:
                stuck(sorted(late))
        finally:
            for p, _ in procs:
                self.finish(p)
        seconds = time.monotonic() - started
        return [Ran(a, p.returncode, p.pid in late, read(path), path, seconds) for (a, _), (p, path) in zip(sides, procs)]

    def start(self, args, env, cwd, path):
        out = open(path, "wb")
        with out:
            out.write(("$ " + " ".join([f"{k}={v}" for k, v in env.items()] + args) + "\n").encode())
            out.flush()
            try:
                p = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=cwd,
                                     env={**os.environ, **env}, start_new_session=True)
            except OSError as err:
                out.write(f"{args[0]}: {err.strerror}\n".encode())
                p = subprocess.Popen(["false"], start_new_session=True)
        self.running.append(p)
        return p, path

    def finish(self, p):
        """Ends what is left of a process's group, and waits for the process."""
        end_group(p.pid)
        p.wait()
        if p in self.running:
            self.running.remove(p)

    def close(self):
        for p in list(self.running):
            self.finish(p)

    # Steps.

    def run_step(self, step):
        self.step = step.name
        now = time.monotonic()
        if self.end - now < step.least:
            self.skipped(step.name, NO_TIME)
            return
        self.step_end = min(now + step.limit, self.end)
        self.note(f"-- {step.name}, at most {self.step_end - now:.0f} s")
        before = len(self.results)
        try:
            step.run(self)
        except Exception as err:  # one broken step is no reason to lose the others
            self.journal.write(traceback.format_exc())
            self.failed(step.name, f"the harness itself: {type(err).__name__}: {err}")
        if len(self.results) == before:
            self.failed(step.name, "no case has a result")

    def verdict(self):
        """Whether something was run, and all of it has passed."""
        return bool(self.results) and all(r.verdict == PASS for r in self.results)


# What a run leaves in its directory, beside programs.
LOGS = ("*.log", "*.nccl", "*.txt", "*.md", "*.counters", "mps-*", "logs.tar.gz")


def forget(out):
    """Removes the logs of an earlier run: none of them may be taken for one of this run."""
    for pattern in LOGS:
        for path in glob.glob(os.path.join(out, pattern)):
            os.remove(path)


def pack(h):
    """Puts all logs into one file, which is easily carried to another machine."""
    with tarfile.open(os.path.join(h.out, "logs.tar.gz"), "w:gz") as tar:
        for path in sorted({p for pattern in LOGS[:-1] for p in glob.glob(os.path.join(h.out, pattern))}):
            tar.add(path, os.path.basename(path))


def read(path):
    """Returns what a program has printed."""
    with open(path, "rb") as f:
        return f.read().decode(errors="replace").partition("\n")[2]  # behind the command


def listens(port):
    """Whether a program listens on a TCP port."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path) as f:
                rows = [line.split() for line in f.readlines()[1:]]
        except OSError:
            continue
        if any(r[3] == "0A" and int(r[1].rpartition(":")[2], 16) == port for r in rows):
            return True
    return False


def wait_all(procs, end, grace):
    """Waits for processes and returns the ids of those that are not over when they should be."""
    while True:
        alive = [p for p in procs if p.poll() is None]
        if not alive:
            return set()
        if any(p.returncode not in (None, 0) for p in procs):
            end, grace = min(end, time.monotonic() + grace), float("inf")
        if time.monotonic() >= end:
            return {p.pid for p in alive}
        time.sleep(0.02)


def end_group(pid):
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(pid, sig)
        except (ProcessLookupError, PermissionError):
            return
        until = time.monotonic() + (2 if sig == signal.SIGTERM else 0)
        while time.monotonic() < until and group_alive(pid):
            time.sleep(0.02)


def group_alive(pgid):
    """Whether a group has a process that has not ended. One that nobody has waited for yet has ended."""
    return bool(members(pgid))


def members(pgid):
    """Returns the processes of a group that have not ended."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as f:
                fields = f.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[2] == str(pgid) and fields[0] != "Z":
            found.append(int(entry))
    return found


LINE = re.compile(r"^(PASS|FAIL|SKIP) ([^:\n]+?)(?:: *(.*))?$", re.M)
GOAL = re.compile(r"(.*?) *(?:\[goal ([^\]]*)\] *)?")


def take_lines(h, ran, prefix=""):
    """Turns the lines PASS, FAIL and SKIP of a program into results, and its end into one if the lines do not tell.

    Behind the case a line may have a figure or a reason, and at its end a goal: "PASS write: 53.1 GB/s [goal >= 49.5]".
    """
    told = LINE.findall(ran.text)
    for verdict, case, rest in told:
        rest, goal = GOAL.fullmatch(rest).groups(default="")
        if verdict == PASS:
            h.passed(prefix + case, rest, goal)
        elif verdict == FAIL:
            h.failed(prefix + case, rest or "no reason given", goal=goal)
        else:
            h.skipped(prefix + case, rest or "no reason given")
    if not ran.ok() and not any(v == FAIL for v, _, _ in told):
        h.failed(prefix + "the program", ran.why())
    elif not told:
        h.failed(prefix + "the program", "it printed no result: " + ran.why())


def rows(results):
    head = ("step", "case", "result", "figure", "goal")
    return [head] + [(r.step, r.case, r.verdict, "; ".join(x for x in (r.figure, r.why) if x), r.goal) for r in results]


def text_table(results):
    table = rows(results)
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    return "\n".join("  ".join([c.ljust(w) for c, w in zip(row, widths)] + [row[4]]).rstrip() for row in table)


def md_table(results):
    lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows(results)]
    return "\n".join([lines[0], "|---|---|---|---|---|"] + lines[1:])


def summarize(h):
    """Writes summary.txt and summary.md, and returns the text of the former."""
    counts = ", ".join(f"{sum(r.verdict == v for r in h.results)} {v}" for v in (PASS, FAIL, SKIP))
    facts = "\n".join(f"{k}: {v}" for k, v in h.facts.items())
    whole = f"{'PASS' if h.verdict() else 'FAIL'}: {counts}, {time.monotonic() - h.started:.0f} s"
    text = facts + "\n\n" + text_table(h.results) + "\n\n" + whole + "\n"
    with open(os.path.join(h.out, "summary.txt"), "w") as f:
        f.write(text)
        for title, table in h.tables:
            f.write(f"\n{title}\n{table}\n")
    with open(os.path.join(h.out, "summary.md"), "w") as f:
        f.write("# `make cuda-test`\n\n" + "".join(f"- {k}: {v}\n" for k, v in h.facts.items()))
        f.write(f"\n{whole}\n\n{md_table(h.results)}\n")
        for title, table in h.tables:
            f.write(f"\n## {title}\n\n```\n{table}\n```\n")
    return text
