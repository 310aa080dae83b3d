"""libnvbackend for people whose engine comes from Python: where the library, its headers and the plug-in for hosts of ggml
lie, and which devices the library sees. Needs nothing but Python.

    import nvbackend, os
    os.environ["GGML_BACKEND_PATH"] = str(nvbackend.ggml_plugin())      # before llama_cpp is imported
    for device in nvbackend.devices(): print(device)

A program in C or C++ links the library that `include_folder()`, `library()` and `cmake_folder()` name:
cmake -DCMAKE_PREFIX_PATH=$(python -m nvbackend --prefix).
"""

import ctypes
import dataclasses
import pathlib

_FOLDER = pathlib.Path(__file__).resolve().parent


def prefix():
    """The folder below which everything is installed, as `CMAKE_PREFIX_PATH` wants it."""
    return _FOLDER


def library():
    """libnvbackend.so."""
    return next(_FOLDER.glob("lib/libnvbackend.so.*"))


def ggml_plugin():
    """libggml-nvb.so, which llama.cpp and other hosts of ggml load where GGML_BACKEND_PATH names it."""
    return _FOLDER / "lib" / "libggml-nvb.so"


def include_folder():
    """The folder of nvbackend.h and nvbackend.hpp."""
    return _FOLDER / "include"


def cmake_folder():
    """What `find_package(nvbackend)` reads, for `nvbackend_DIR`."""
    return _FOLDER / "lib" / "cmake" / "nvbackend"


def pkgconfig_folder():
    """For PKG_CONFIG_PATH."""
    return _FOLDER / "lib" / "pkgconfig"


class DeviceInfo(ctypes.Structure):
    """`nvb_device_info` of nvbackend.h."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("kind", ctypes.c_uint32), ("ordinal", ctypes.c_int32),
        ("compute_capability", ctypes.c_int32), ("multiprocessors", ctypes.c_int32), ("total_memory", ctypes.c_uint64),
        ("l2_bytes", ctypes.c_uint64), ("driver_version", ctypes.c_int32), ("reserved", ctypes.c_int32),
        ("name", ctypes.c_char * 128), ("features", ctypes.c_uint64), ("peak_bandwidth", ctypes.c_uint64),
        ("uuid", ctypes.c_char * 48), ("architecture", ctypes.c_char * 32), ("pci_bus_id", ctypes.c_char * 16),
        ("numa_node", ctypes.c_int32), ("clock_mhz", ctypes.c_int32), ("memory_clock_mhz", ctypes.c_int32),
        ("memory_bus_bits", ctypes.c_int32), ("shared_memory_per_block", ctypes.c_int32),
        ("shared_memory_per_multiprocessor", ctypes.c_int32), ("registers_per_multiprocessor", ctypes.c_int32),
        ("threads_per_multiprocessor", ctypes.c_int32), ("warp_size", ctypes.c_int32), ("copy_engines", ctypes.c_int32),
        ("obstacle", ctypes.c_char * 256),
    ]


class CpuProfile(ctypes.Structure):
    """`nvb_cpu_profile` of nvbackend.h."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("name", ctypes.c_char * 128), ("vendor", ctypes.c_char * 32),
        ("architecture", ctypes.c_char * 16), ("instruction_sets", ctypes.c_char * 256), ("sockets", ctypes.c_uint32),
        ("cores", ctypes.c_uint32), ("threads", ctypes.c_uint32), ("available_threads", ctypes.c_uint32),
        ("maximum_mhz", ctypes.c_uint32), ("numa_nodes", ctypes.c_uint32), ("l1_data_bytes", ctypes.c_uint64),
        ("l1_instruction_bytes", ctypes.c_uint64), ("l2_bytes", ctypes.c_uint64), ("l3_bytes", ctypes.c_uint64),
        ("l3_shared_by", ctypes.c_uint32), ("cache_line_bytes", ctypes.c_uint32), ("total_memory", ctypes.c_uint64),
        ("memory_limit", ctypes.c_uint64),
    ]


class Error(RuntimeError):
    """A call of the library failed; the text is the library's."""


def load():
    """The library as a `ctypes.CDLL`, opened with its symbols visible to nobody else."""
    opened = ctypes.CDLL(str(library()))
    opened.nvb_version_string.restype = ctypes.c_char_p
    opened.nvb_status_name.restype = ctypes.c_char_p
    opened.nvb_last_error_message.restype = ctypes.c_size_t
    opened.nvb_last_error_message.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    return opened


def version():
    """Such as "0.1.0"."""
    return load().nvb_version_string().decode()


def _last_error(opened):
    text = ctypes.create_string_buffer(2048)
    opened.nvb_last_error_message(text, len(text))
    return text.value.decode(errors="replace")


def _described(opened, call, description):
    description.struct_size = ctypes.sizeof(description)
    if call(ctypes.byref(description)) != 0:
        raise Error(_last_error(opened))
    return description


@dataclasses.dataclass(frozen=True)
class Device:
    """What a backend can be created on."""

    selector: str
    """What `nvb_backend_options.device` takes, such as "cuda:0" or "cpu"."""
    name: str
    total_memory: int
    """Bytes."""
    obstacle: str
    """Why no backend can be created on it; empty if one can."""

    def __str__(self):
        text = f"{self.selector}  {self.name}, {self.total_memory / 2 ** 30:.1f} GiB"
        return f"{text}: {self.obstacle}" if self.obstacle else text


def devices():
    """The GPUs, and the CPU behind them. Loads the GPU driver if there is one."""
    opened = load()
    found = []
    count = ctypes.c_int32(0)
    # Without a driver or a device this is an error, whose reason `obstacle()` has.
    if opened.nvb_cuda_get_device_count(ctypes.byref(count)) != 0:
        count.value = 0
    for ordinal in range(count.value):
        info = _described(opened, lambda to: opened.nvb_cuda_get_device_info(ctypes.c_int32(ordinal), to), DeviceInfo())
        found.append(Device(f"cuda:{ordinal}", info.name.decode(), info.total_memory, info.obstacle.decode()))
    cpu = _described(opened, opened.nvb_hardware_get_cpu_profile, CpuProfile())
    return found + [Device("cpu", cpu.name.decode() or cpu.architecture.decode(), cpu.total_memory, "")]


def obstacle():
    """Why there is no GPU among the devices; empty if there is one."""
    opened = load()
    count = ctypes.c_int32(0)
    return "" if opened.nvb_cuda_get_device_count(ctypes.byref(count)) == 0 and count.value > 0 else _last_error(opened)
