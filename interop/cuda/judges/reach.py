"""reach.c from Python: its functions, with their types. As a program, it tries them on memory of cuMemAlloc."""

import ctypes
import sys


def load(path):
    lib = ctypes.CDLL(path)
    lib.reach_why.restype = ctypes.c_char_p
    lib.reach_open.restype = ctypes.c_void_p
    lib.reach_open.argtypes = [ctypes.c_size_t]
    lib.reach_register.restype = ctypes.c_void_p
    lib.reach_register.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int]
    lib.reach_deregister.argtypes = [ctypes.c_void_p]
    lib.reach_move.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int]
    return lib


def call(result, what):
    if result:
        sys.exit(f"FAIL {what}: error {result} of CUDA")


def main():
    lib, cuda, n = load(sys.argv[1]), ctypes.CDLL("libcuda.so.1"), 100_000
    context, memory, fetched = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.create_string_buffer(n)
    call(cuda.cuInit(0), "cuInit")
    call(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    call(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    call(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)), "cuMemAlloc")
    host = (ctypes.c_ubyte * n).from_address(lib.reach_open(n))
    for dmabuf, way in enumerate(("address", "dma-buf")):
        for offset in (0, 512, 70_000):
            at, data = memory.value + offset, bytes((i * 7 + offset + dmabuf) % 251 for i in range(n))
            host[:] = list(data)
            mr = lib.reach_register(at, n, dmabuf)
            if not mr or lib.reach_move(mr, at, n, 0):
                sys.exit(f"FAIL {way}: {lib.reach_why().decode()}")
            call(cuda.cuMemcpyDtoH_v2(fetched, ctypes.c_uint64(at), ctypes.c_size_t(n)), "cuMemcpyDtoH")
            if fetched.raw != data:
                sys.exit(f"FAIL {way}: what was written is not there")
            host[:] = [0] * n
            if lib.reach_move(mr, at, n, 1) or lib.reach_deregister(mr):
                sys.exit(f"FAIL {way}: {lib.reach_why().decode()}")
            if bytes(host) != data:
                sys.exit(f"FAIL {way}: what was read is not what was there")
        print(f"PASS {way}", flush=True)


if __name__ == "__main__":
    main()
