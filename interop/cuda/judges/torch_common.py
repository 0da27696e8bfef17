"""What the programs with torch.distributed share: a rank's start, and lines that the harness reads.

The harness sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and NCCL's variables. All ranks are on GPU 0.
"""

import datetime
import os
import sys

import torch
import torch.distributed as dist

RANK = int(os.environ.get("RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def start():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60), device_id=torch.device("cuda", 0))


def end():
    dist.destroy_process_group()
    sys.stdout.flush()


def check(case, ok, why="a wrong result"):
    """Prints a case's line, with the rank: each rank checks its own results."""
    if ok:
        print(f"PASS {case}, rank {RANK}", flush=True)
    else:
        print(f"FAIL {case}, rank {RANK}: {why}", flush=True)


def values(sender, n, turn=0):
    """Returns whole numbers below 2^24, also when a few of them are added, which float32 has without rounding."""
    return ((torch.arange(n, device="cuda") + 7 * turn) % 4093 * (sender + 1) + sender).float()


def sums(n, turn=0):
    return sum(values(r, n, turn) for r in range(RANKS))
