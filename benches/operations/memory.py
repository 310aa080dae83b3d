"""One allocation and its free, as the host sees them, through ctypes on both sides.

On a GPU the peer is the CUDA runtime's stream-ordered pool (cudaMallocAsync), on a CPU the C library's malloc.
"""
import ctypes
import math
import re
from ctypes import byref, c_size_t, c_void_p
from functools import partial

from case import Case

SIZES = (4096, 1 << 20, 4 << 20, 64 << 20)


def loaded_library(pattern):
    """The path of a library that this process has loaded: the runtime that PyTorch uses."""
    for line in open("/proc/self/maps"):
        if found := re.search(rf"(/\S*{pattern}\S*)$", line):
            return found.group(1)
    raise RuntimeError(f"no library {pattern} is loaded in this process")


def prototype(function, *arguments, result=ctypes.c_int):
    function.argtypes, function.restype = arguments, result
    return function


def our_memory(context, size):
    """Our pair, and a check that live blocks are aligned and apart: 0, or infinite."""
    library, check = context.backend.library, context.backend.check
    manager = context.backend.memory_manager()
    allocate = prototype(library.nvb_memory_allocate, c_void_p, c_size_t, c_void_p, c_void_p)
    free = prototype(library.nvb_memory_free, c_void_p, c_void_p, c_void_p)
    pointer, handle, stream = c_void_p(), manager.pointer, context.backend.stream.pointer
    target = ctypes.addressof(pointer)

    def pair(_, keep=(manager, pointer)):
        check(allocate(handle, size, stream, target))
        check(free(handle, pointer, stream))

    def blocks_error(_):
        blocks = [c_void_p() for _ in range(16)]
        for block in blocks:
            check(allocate(handle, size, stream, byref(block)))
        addresses = sorted(block.value for block in blocks)
        for block in blocks:
            check(free(handle, block, stream))
        apart = all(low + size <= high for low, high in zip(addresses, addresses[1:]))
        return 0.0 if apart and all(address % 256 == 0 for address in addresses) else math.inf
    return pair, blocks_error


def runtime_pair(context, size):
    runtime = ctypes.CDLL(loaded_library("libcudart"))
    allocate = prototype(runtime.cudaMallocAsync, c_void_p, c_size_t, c_void_p)
    free = prototype(runtime.cudaFreeAsync, c_void_p, c_void_p)
    pointer, stream = c_void_p(), c_void_p(context.timer.stream.cuda_stream)
    target = ctypes.addressof(pointer)

    def check(status):
        if status != 0:
            raise RuntimeError(f"the CUDA runtime returned {status}")

    def pair(_, keep=pointer):
        check(allocate(target, size, stream))
        check(free(pointer, stream))
    return pair


def malloc_pair(size):
    libc = ctypes.CDLL(None)
    allocate = prototype(libc.malloc, c_size_t, result=c_void_p)
    free = prototype(libc.free, c_void_p, result=None)

    def check(failed):
        if failed:
            raise MemoryError(size)

    def pair(_):
        pointer = allocate(size)
        check(pointer is None)
        check(free(pointer))
    return pair


def memory(context):
    for size in SIZES:
        yield partial(memory_case, context, size)


def memory_case(context, size):
    on_gpu = context.device.type == "cuda"
    peer = {"cudaMallocAsync, cudaFreeAsync": runtime_pair(context, size)} if on_gpu else {"malloc, free": malloc_pair(size)}
    pair, blocks_error = our_memory(context, size)
    return Case("memory pair", f"bytes={size}", "µs", ours=pair, peers=[peer], check=blocks_error, bound=0.0, outputs=[], on_host=True)
