"""Memory of PyTorch's caching allocator, registered by address and as a dma-buf, written and read by RDMA.

    torch_register.py REACH.so

With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True the allocator maps its memory by CUDA's virtual memory management.
"""

import ctypes
import os
import sys

import torch

import reach

lib = reach.load(sys.argv[1])

HOST = 32 << 20
KIND = "expandable segments" if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") else "segments"


def turn(tensor, host, dmabuf, seed):
    """Registers a tensor's memory for one exchange. Returns what is wrong."""
    torch.cuda.synchronize()
    mr = lib.reach_register(tensor.data_ptr(), tensor.numel(), dmabuf)
    if not mr:
        return lib.reach_why().decode()
    wrong = exchange(tensor, host, mr, seed)
    if lib.reach_deregister(mr) and not wrong:
        wrong = lib.reach_why().decode()
    return wrong


def exchange(tensor, host, mr, seed):
    """Writes into a tensor by RDMA and looks at it with torch; then the other way round. Returns what is wrong."""
    address, n = tensor.data_ptr(), tensor.numel()
    data = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    host[:n].copy_(data)
    if lib.reach_move(mr, address, n, 0):
        return lib.reach_why().decode()
    if not torch.equal(tensor.cpu(), data):
        return "what was written is not there"
    tensor.add_(3)
    torch.cuda.synchronize()
    host[:n].zero_()
    if lib.reach_move(mr, address, n, 1):
        return lib.reach_why().decode()
    return "" if torch.equal(host[:n], data + 3) else "what was read is not what was there"


def main():
    torch.cuda.set_device(0)
    torch.empty(1, device="cuda")  # the context is torch's
    memory = (ctypes.c_ubyte * HOST).from_address(lib.reach_open(HOST))
    host = torch.frombuffer(memory, dtype=torch.uint8)
    for dmabuf in (0, 1):
        way = "a dma-buf" if dmabuf else "address"
        wrong, seed = [], 0
        for n in (512, 4096, 100_000, 1 << 20, 3 << 20, 30 << 20):
            # Several at a time: small ones share a segment, and begin anywhere in it.
            for tensor in [torch.zeros(n, dtype=torch.uint8, device="cuda") for _ in range(3)]:
                seed += 1
                bad = turn(tensor, host, dmabuf, seed)
                if bad:
                    wrong.append(f"{n} bytes: {bad}")
        case = f"{KIND} by {way}"
        print(f"FAIL {case}: {wrong[0]}" if wrong else f"PASS {case}", flush=True)
        torch.cuda.empty_cache()  # the next round's memory is allocated anew, often at the same addresses


main()
