"""all_reduce in a CUDA graph: captured once, replayed with other values each time. What a library does on the GPU while
another thread captures must neither break the capture nor become part of it."""

import torch
import torch.distributed as dist

from torch_common import RANK, check, end, start, sums, values


def replay(n, turns):
    x, y = torch.empty(n, device="cuda"), torch.empty(n, device="cuda")
    x.copy_(values(RANK, n))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # NCCL connects before the capture
        for _ in range(3):
            y.copy_(x)
            dist.all_reduce(y)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(x)
        dist.all_reduce(y)
        y.mul_(2)
    for turn in range(1, turns + 1):
        x.copy_(values(RANK, n, turn))
        y.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(y, 2 * sums(n, turn)):
            return f"replay {turn} is wrong"
    return ""


def main():
    start()
    for size in (1 << 10, 1 << 20, 16 << 20):
        wrong = replay(size // 4, 20)
        check(f"graph of {size} bytes", not wrong, wrong)
    end()


main()
