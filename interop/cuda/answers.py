"""The answers of a run with --slot: for each thing that was not known, or was changed, one line."""

import re

from harness import FAIL, PASS

# The questions about speed: what was changed, the cases of speed.c, and what was seen before.
SPEED = (
    ("memory that is not page-locked, one process", r"goal/one/malloc/(WRITE|READ)/64Mi", "WRITE 0.45, READ 0.32; goal 2"),
    ("memory that is not page-locked, two processes", r"goal/two/malloc/(WRITE|READ)/64Mi", "WRITE 0.32, READ 0.34; goal 2"),
    ("WRITE from another process's memory", r"goal/two/(locked|allocmr|dm)/WRITE/64Mi", "0.08 to 0.10; goal 0.9"),
    ("GPU to GPU, two processes", r"goal/two/gpu/(WRITE|READ)/256Mi", "0.52 and 0.62; goal 0.9"),
    ("8 bytes, one process, beside a synchronous copy", r"goal/one/\w+/(WRITE|READ)/8", "11 to 15 us more; goal 2"),
    ("8 bytes, two processes, beside a synchronous copy", r"goal/two/\w+/(WRITE|READ)/8", "21 to 44 us more; goal 2"),
)
ONE_GPU = re.compile(r"^(one|two) +gpu +(?:->|<-) gpu +(WRITE|READ) +(256Mi|64Mi|1Mi) .*?([\d.]+) GB/s +copy .* ([\d.]+)$", re.M)


def answers(h):
    lines = [f"{question}: {answer}" for question, answer in [ddp(h), waits(h), *[speed(h, *s) for s in SPEED], within(h), nccl(h), rest(h)]]
    return "\n".join(lines)


def of(h, step):
    return [r for r in h.results if r.step == step]


def counted(results):
    good = sum(r.verdict == PASS for r in results)
    return f"{good} of {len(results)} passed" if results else "not run"


def ddp(h):
    results = of(h, "torch-ddp")
    losses = "; ".join(f"{r.case}: {r.verdict} {r.figure}".strip() for r in results if "losses" in r.case)
    calls = "; ".join(r.why for r in results if "calls of the driver" in r.case)
    return "DistributedDataParallel", f"{losses or counted(results)}" + (f"; waits: {calls}" if calls else "; no call of the driver was reported")


def waits(h):
    """Which calls wait for a kernel, each once."""
    notes = dict(h.tables).get("calls that are not before or behind each copy, beside a kernel", "")
    ours = sorted({r.case.split(", beside ")[0] for r in of(h, "locks") if r.verdict == FAIL})
    others = sorted({m.group(1) for m in re.finditer(r"^NOTE (.*?), beside .*WAITS", notes, re.M)})
    if not of(h, "locks"):
        return "calls that wait for a kernel", "not run"
    return "calls that wait for a kernel", f"of those beside each copy: {', '.join(ours) or 'none'}; of others: {', '.join(others) or 'none'}"


def speed(h, question, pattern, before):
    found = [r for r in of(h, "speed") if re.fullmatch(pattern, r.case)]
    told = "; ".join(f"{r.case.removeprefix('goal/')} {r.verdict} {(r.figure or r.why).split(',')[0]}" for r in found)
    return question, f"{told or 'not run'} (before: {before})"


def within(h):
    found = ONE_GPU.findall(dict(h.tables).get("speed", ""))
    told = "; ".join(f"{place} {op} {size} {ratio}" for place, op, size, _, ratio in found)
    return "GPU to GPU, of a copy", f"{told or 'not run'} (before, 256Mi: 0.72 and 0.52 to 0.62; 64Mi: 0.59 to 0.79; 1Mi: 0.58 to 0.76)"


def nccl(h):
    goals = "; ".join(f"{r.case}: {r.figure}" for r in of(h, "nccl-goals")) or "not run"
    wrong = [r for r in h.results if r.step.startswith("nccl-") and r.step != "nccl-goals" and r.verdict == FAIL]
    return "NCCL", goals + (f"; {len(wrong)} cases FAIL: {wrong[0].step} {wrong[0].case}" if wrong else "; no wrong result")


def rest(h):
    return "the rest", "; ".join(f"{step}: {counted(of(h, step))}" for step in ("faults", "memory", "order", "torch-collectives"))
