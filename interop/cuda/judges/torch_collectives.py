"""torch.distributed's collectives with results that are checked, from 1 KiB to the size in argv[1]."""

import sys

import torch
import torch.distributed as dist

from torch_common import RANK, RANKS, check, end, start, sums, values


def all_reduce(n, turn):
    x = values(RANK, n, turn)
    dist.all_reduce(x)
    return torch.equal(x, sums(n, turn))


def all_gather(n, turn):
    part = n // RANKS
    out = torch.full((part * RANKS,), -1.0, device="cuda")
    dist.all_gather_into_tensor(out, values(RANK, part, turn))
    return torch.equal(out, torch.cat([values(r, part, turn) for r in range(RANKS)]))


def reduce_scatter(n, turn):
    part = n // RANKS
    out = torch.full((part,), -1.0, device="cuda")
    dist.reduce_scatter_tensor(out, values(RANK, part * RANKS, turn))
    return torch.equal(out, sums(part * RANKS, turn)[RANK * part:][:part])


def broadcast(n, turn):
    x = values(RANK, n, turn)
    dist.broadcast(x, RANKS - 1)
    return torch.equal(x, values(RANKS - 1, n, turn))


def send_recv(n, turn):
    out, x = torch.full((n,), -1.0, device="cuda"), values(RANK, n, turn)
    before = (RANK - 1) % RANKS
    ops = [dist.P2POp(dist.isend, x, (RANK + 1) % RANKS), dist.P2POp(dist.irecv, out, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return torch.equal(out, values(before, n, turn))


def all_to_all(n, turn):
    part = n // RANKS
    out = torch.full((part * RANKS,), -1.0, device="cuda")
    dist.all_to_all_single(out, values(RANK, part * RANKS, turn))
    return torch.equal(out, torch.cat([values(r, part * RANKS, turn)[RANK * part:][:part] for r in range(RANKS)]))


def main():
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 64 << 20
    start()
    for collective in (all_reduce, all_gather, reduce_scatter, broadcast, send_recv, all_to_all):
        wrong, turn, size = [], 0, 1 << 10
        while size <= most:
            for _ in range(2):
                turn += 1
                if not collective(size // 4, turn):
                    wrong.append(size)
            size *= 16
        check(collective.__name__, not wrong, f"wrong with {sorted(set(wrong))} bytes")
    end()


main()
