"""CUDA's memory calls as Python's bindings make them: every function comes from cuGetProcAddress, for one version of
CUDA, and handles are numbers. It runs with VERBENA_GPU=count=2,vram=64M."""

import array
import ctypes
import os
import sys
import unittest

VERSION = int(sys.argv.pop(1))
N = 1 << 20
lib = ctypes.CDLL("libcuda.so.1")


class Error(Exception):
    """What a function has returned."""


def find(name):
    function, status = ctypes.c_void_p(), ctypes.c_int(-1)
    r = lib.cuGetProcAddress_v2(name.encode(), ctypes.byref(function), VERSION, ctypes.c_uint64(0), ctypes.byref(status))
    if r or status.value:
        raise Error(name, r, status.value)
    return ctypes.CFUNCTYPE(ctypes.c_int)(function.value)


def call(name, *args):
    """Calls a function; integers are 64 bits wide, as addresses and sizes are."""
    r = find(name)(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in args))
    if r:
        raise Error(name, r)


def ask(name, *args, kind=ctypes.c_uint64):
    """Calls a function whose first argument is where the answer goes."""
    answer = kind()
    call(name, ctypes.byref(answer), *args)
    return answer.value


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        call("cuInit", 0)
        cls.context = ask("cuDevicePrimaryCtxRetain", ctypes.c_int(0))
        call("cuCtxSetCurrent", cls.context)

    def test_devices(self):
        self.assertEqual(ask("cuDeviceGetCount", kind=ctypes.c_int), 2)
        name = ctypes.create_string_buffer(64)
        call("cuDeviceGetName", name, ctypes.c_int(64), ctypes.c_int(1))
        self.assertTrue(name.value)
        self.assertEqual(ask("cuDeviceTotalMem", ctypes.c_int(0)), 64 << 20)
        self.assertEqual(ask("cuDeviceGetAttribute", ctypes.c_int(124), ctypes.c_int(0), kind=ctypes.c_int), 1)
        self.assertEqual(ask("cuCtxGetCurrent"), self.context)

    def test_copies(self):
        data, back = array.array("B", os.urandom(N)), array.array("B", bytes(N))
        one, two, stream = ask("cuMemAlloc", N), ask("cuMemAlloc", N), ask("cuStreamCreate", ctypes.c_uint(1))
        call("cuMemcpyHtoD", one, data.buffer_info()[0], N)
        call("cuMemcpyDtoDAsync", two, one, N, stream)
        call("cuMemsetD8Async", one, ctypes.c_ubyte(7), N, stream)
        call("cuStreamSynchronize", stream)
        call("cuMemcpyDtoH", back.buffer_info()[0], two, N)
        self.assertEqual(data, back)
        call("cuMemcpyDtoH", back.buffer_info()[0], one, N)
        self.assertEqual(back, array.array("B", b"\x07" * N))
        call("cuStreamDestroy", stream)
        call("cuMemFree", one)
        with self.assertRaisesRegex(Error, r"'cuMemFree', 1\)"):
            call("cuMemFree", one)
        call("cuMemFree", two)

    def test_managed(self):
        p = ask("cuMemAllocManaged", N, ctypes.c_uint(1))
        ctypes.memset(p, 3, N)
        call("cuMemsetD8", p + N // 2, ctypes.c_ubyte(4), N // 2)
        self.assertEqual(ctypes.string_at(p, N), b"\x03" * (N // 2) + b"\x04" * (N // 2))
        call("cuMemFree", p)

    def test_dmabuf(self):
        p = ask("cuMemAlloc", N)
        fd = ask("cuMemGetHandleForAddressRange", p, N, ctypes.c_int(1), 0, kind=ctypes.c_int)
        self.assertEqual(os.lseek(fd, 0, os.SEEK_END), N)
        os.close(fd)
        call("cuMemFree", p)

    def test_refused(self):
        with self.assertRaisesRegex(Error, r"'cuLaunchKernel', 801\)"):
            call("cuLaunchKernel", 0, 0, 0)
        with self.assertRaisesRegex(Error, r"'cuNothing', 0, 1\)"):
            call("cuNothing")
        with self.assertRaisesRegex(Error, r"'cuMemAlloc', 2\)"):
            ask("cuMemAlloc", 65 << 20)


unittest.main()
