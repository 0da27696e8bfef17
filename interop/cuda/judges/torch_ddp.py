"""A small training loop with DistributedDataParallel. The losses are printed to the last digit, for the harness to
compare: bytes that take another way must not change them."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may add in another order each time

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_common import RANK, check, end, start


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    start()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)  # the same model everywhere
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(),
                                torch.nn.Linear(2048, 10)).cuda()
    model = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + RANK)  # other data on each rank
    began, first, last = time.monotonic(), None, None
    for step in range(steps):
        x = torch.randn(256, 512, generator=generator).cuda()
        y = (x[:, :10].argmax(dim=1))
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        last = mean.item()
        first = last if first is None else first
        print(f"LOSS {step} {last.hex()}", flush=True)
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum().item()
    print(f"WEIGHTS {total.hex()}", flush=True)
    print(f"SECONDS {time.monotonic() - began:.3f}", flush=True)
    check("the loss falls", last < first, f"from {first} to {last}")
    end()


main()
