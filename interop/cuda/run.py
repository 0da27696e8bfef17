#!/usr/bin/env python3
"""Runs what needs a real GPU: tests of our own, and NCCL, PyTorch, NVSHMEM, UCX and perftest on the drop-in libibverbs.

    make cuda-test, or  python3 interop/cuda/run.py --bin bin --out .logs/cuda

It needs a GPU, its driver and CUDA's toolkit, but neither Go nor a network: bin may come from another machine, where
"make build clib" makes bin/verbena and bin/lib ("go test -tags cuda -c -o bin/gpu-cuda.test ./gpu/cuda" what the step "go"
runs). --slot needs no more than those two, and ends within --limit, 9 minutes. It prints one table, writes it with the versions of everything to OUT/summary.txt and OUT/summary.md,
keeps all raw logs in OUT, also as one file, logs.tar.gz, and exits with 0 only if every case has passed. A case that was skipped has not passed.
"""

import argparse
import datetime
import os
import re
import signal
import sys

sys.dont_write_bytecode = True

from answers import answers
from harness import Harness, Step, pack, summarize, take_lines

HERE = os.path.dirname(os.path.abspath(__file__))


def arguments():
    root = os.path.dirname(os.path.dirname(HERE))
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--bin", default=os.path.join(root, "bin"), help="where verbena and lib are")
    p.add_argument("--out", default=os.path.join(root, ".logs", "cuda"), help="where logs and summaries go")
    p.add_argument("--only", default="", help="run only steps whose name this regular expression matches")
    p.add_argument("--list", action="store_true", help="list the steps in their order, and end")
    p.add_argument("--slot", action="store_true",
                   help="what is worth a machine that is lent for half an hour: the steps of steps.SLOT, fewer repetitions of NCCL, and answers")
    p.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    p.add_argument("--limit", type=float, default=540, help="seconds for everything; what does not fit is skipped")
    p.add_argument("--python", default=sys.executable, help="the Python that has torch")
    p.add_argument("--programs", default="", help="run the programs of a directory instead of the steps: to test this harness")
    p.add_argument("--program-limit", type=float, default=30, help="seconds for each of them")
    return p.parse_args()


def program_steps(directory, limit):
    """Returns a step for each executable file of a directory. They print the lines that take_lines reads."""
    def step(name):
        return Step(name, lambda h: take_lines(h, h.run(name, [os.path.join(os.path.abspath(directory), name)], limit)), limit, 0.5)
    return [step(n) for n in sorted(os.listdir(directory)) if os.access(os.path.join(directory, n), os.X_OK)]


def stop(number, frame):
    raise SystemExit(f"ended by {signal.Signals(number).name}")


def main():
    opts = arguments()
    if opts.programs:
        steps, stage = program_steps(opts.programs, opts.program_limit), None
    else:
        import steps as real
        stage = real.Stage(opts)
        steps = real.steps(stage, opts.slot)
    try:
        only = re.compile(opts.only)
    except re.error as err:
        sys.exit(f"--only: {err}")
    steps = [s for s in steps if only.search(s.name)]
    if opts.list:
        for s in steps:
            print(f"{s.name:20} at most {s.limit:.0f} s")
        return 0
    if not steps:
        sys.exit("no step has such a name; --list lists them")
    h = Harness(opts.out, opts.limit, opts.quick)
    h.few = opts.slot
    h.facts["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    ended = None
    try:
        if stage:
            stage.begin(h)
        for s in steps:
            h.run_step(s)
    except SystemExit as err:
        ended = err
    finally:
        h.close()
        if stage:
            stage.end(h)
    if ended:
        h.step = "the run"
        h.failed("whole", str(ended))
    if opts.slot:
        h.tables.insert(0, ("answers", answers(h)))
    print("\n" + summarize(h), flush=True)
    if opts.slot:
        print(h.tables[0][1], flush=True)
    h.journal.flush()
    pack(h)
    return 0 if h.verdict() else 1


if __name__ == "__main__":
    sys.exit(main())
