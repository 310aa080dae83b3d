"""A small ctypes binding of libnvbackend's C ABI for the benchmarks.

Tensors are torch tensors, handed over by address, shape and strides; a failing call raises `Error` with the library's
text. Every operation method checks and packs its arguments once and returns a function of no arguments that queues the
work, so that a timed loop holds one foreign call and nothing else. The structs mirror include/nvbackend.h.
"""
import ctypes
import os
import pathlib
import sys
import weakref
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Where prepare.py puts PyTorch when this Python has none.
sys.path.append(str(ROOT / "build/peers/python"))

import torch

ACTIVATIONS = {"none": 0, "gelu_tanh": 1, "gelu_erf": 2, "silu": 3}
DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.int32: 4, torch.float8_e4m3fn: 5}
# Of caches, whose rows have scales of their own.
ROW_DTYPES = {"int8": 7, "q8_0": 8, "q4_0": 9}
FORMATS = {None: 0, "bf16": 1, "f16": 2, "fp8_e4m3": 3, "fp8_e5m2": 4, "int8": 5, "int4": 6}
STACKED, GATED = 0, 1
SOURCE_DEVICE = 1


class Error(RuntimeError):
    """A call returned a status other than NVB_OK; the text is the library's."""


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("dtype", c_uint32), ("rank", c_uint32), ("shape", c_int64 * 4), ("strides", c_int64 * 4)]


class QuantizedRows(Structure):
    _fields_ = [("data", c_void_p), ("scales", c_void_p), ("rows", c_int64), ("columns", c_int64), ("row_stride", c_int64),
                ("format", c_uint32), ("given_scales", c_uint32)]


class Options(Structure):
    """Base of the structs that start with `struct_size`: sets it, and turns torch tensors into `Tensor`s."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(self))
        for name, value in fields.items():
            setattr(self, name, tensor(value) if isinstance(value, torch.Tensor) else value)


def options(name, *fields):
    return type(name, (Options,), {"_fields_": [("struct_size", c_size_t), *fields]})


def fields(kind, names):
    return [(name, kind) for name in names.split()]


BuildInfo = options("BuildInfo", *fields(c_uint32, "cuda cuda_toolkit_version"), ("architectures", c_char * 96))
DeviceInfo = options(
    "DeviceInfo", ("kind", c_uint32), *fields(c_int32, "ordinal compute_capability multiprocessors"),
    *fields(c_uint64, "total_memory l2_bytes"), *fields(c_int32, "driver_version reserved"), ("name", c_char * 128))
BackendOptions = options("BackendOptions", ("configuration", c_void_p))
WeightDesc = options(
    "WeightDesc", ("parts", POINTER(Tensor)), ("part_count", c_size_t), *fields(c_uint32, "arrangement source"),
    *fields(c_uint32, "format granularity group_size zero_points clipping source_format"), ("blocks", c_void_p))
LinearCase = options(
    "LinearCase", ("weight", c_void_p), *fields(c_uint64, "rows columns depth"),
    *fields(c_uint32, "input_dtype output_dtype activation bias format granularity group_size zero_points arrangement residual"))
KvCacheOptions = options("KvCacheOptions", *fields(
    c_uint32, "layers sequences kv_heads head_dim value_dim values_in_keys capacity dtype value_dtype page_tokens pages window max_append"),
    ("memory", c_void_p), ("memory_count", c_size_t), *fields(Tensor, "key_scales value_scales"))
AttentionOptions = options(
    "AttentionOptions", *fields(c_uint32, "query_heads kv_heads head_dim value_dim window"), *fields(c_float, "scale soft_cap"),
    *fields(c_uint32, "bidirectional chunk sink_tokens"))
AttentionPrefillArgs = options(
    "AttentionPrefillArgs", *fields(Tensor, "query output lse"), ("query_starts", POINTER(c_int32)), ("sequence_count", c_size_t),
    ("cache", c_void_p), *fields(POINTER(c_int32), "sequences kv_lengths"), *fields(Tensor, "key value"),
    ("key_starts", POINTER(c_int32)), *fields(c_uint32, "layer reserved"), *fields(Tensor, "page_table mask query_scale key_scale value_scale"),
    *fields(Tensor, "device_query_starts device_key_starts device_kv_lengths device_sequences"), *fields(c_uint32, "max_query_rows max_kv_length"),
    *fields(Tensor, "sinks alibi_slopes"), ("prefix_lengths", POINTER(c_int32)), *fields(Tensor, "tree_parents dropout_device_offset"),
    *fields(c_uint64, "dropout_seed dropout_offset"), ("dropout", c_float), ("reserved_dropout", c_uint32))
AttentionDecodeArgs = options(
    "AttentionDecodeArgs", *fields(Tensor, "query output lse"), ("cache", c_void_p), *fields(Tensor, "positions sequences"),
    *fields(c_uint32, "layer max_kv_length rows_per_sequence reserved"), *fields(Tensor, "page_table key value query_norm key_norm"),
    ("rotary_dim", c_uint32), *fields(c_float, "base position_scale query_scale epsilon weight_offset"), *fields(Tensor, "sinks alibi_slopes"))
EmbeddingArgs = options(
    "EmbeddingArgs", ("tokens", Tensor), ("table", c_void_p), ("output", Tensor), ("scale", c_float), ("reserved", c_uint32))
RmsNormArgs = options(
    "RmsNormArgs", *fields(Tensor, "input post_weight residual residual_output weight output"),
    *fields(c_float, "epsilon weight_offset"))
LinearArgs = options(
    "LinearArgs", ("input", Tensor), ("weight", c_void_p), *fields(Tensor, "bias output"), *fields(c_uint32, "activation reserved"),
    ("quantized_input", QuantizedRows), ("residual", Tensor), ("quantized_output", QuantizedRows))
GroupedLinearArgs = options(
    "GroupedLinearArgs", *fields(Tensor, "input expert_offsets"), ("weight", c_void_p), *fields(Tensor, "bias output"),
    *fields(c_uint32, "activation experts"))
GatedActivationArgs = options("GatedActivationArgs", *fields(Tensor, "gate up output"), *fields(c_uint32, "activation reserved"))
RopeArgs = options(
    "RopeArgs", *fields(Tensor, "query query_output query_norm key key_output key_norm value positions sequences"),
    ("cache", c_void_p), *fields(c_uint32, "layer rotary_dim"),
    *fields(c_float, "base position_scale query_scale epsilon weight_offset"), ("reserved", c_uint32))
KvCacheAppendArgs = options(
    "KvCacheAppendArgs", *fields(Tensor, "key value positions sequences"), ("cache", c_void_p), *fields(c_uint32, "layer reserved"))
SoftmaxArgs = options("SoftmaxArgs", *fields(Tensor, "input output"), ("scale", c_float), ("reserved", c_uint32))
ElementwiseArgs = options("ElementwiseArgs", *fields(Tensor, "input second output"), ("factor", c_float), ("activation", c_uint32))
ArgmaxArgs = options("ArgmaxArgs", *fields(Tensor, "logits tokens"))
SampleArgs = options(
    "SampleArgs", *fields(Tensor, "logits sequences positions tokens probabilities"), ("seed", c_uint64),
    *fields(c_float, "temperature top_p"), *fields(c_uint32, "top_k reserved"))

OPERATIONS = {
    "embedding": EmbeddingArgs, "rms_norm": RmsNormArgs, "linear": LinearArgs, "grouped_linear": GroupedLinearArgs,
    "gated_activation": GatedActivationArgs, "rope": RopeArgs, "kv_cache_append": KvCacheAppendArgs, "softmax": SoftmaxArgs,
    "add": ElementwiseArgs, "argmax": ArgmaxArgs, "sample": SampleArgs,
}


def tensor(source):
    """The nvb_tensor of a torch tensor, which must outlive it."""
    result = Tensor(data=source.data_ptr(), dtype=DTYPES[source.dtype], rank=source.dim())
    result.shape[: source.dim()] = source.shape
    if not source.is_contiguous():
        result.strides[: source.dim()] = source.stride()
    return result


def quantized_rows(codes, scales, format):
    """The nvb_quantized_rows of torch tensors, codes [rows, columns] and f32 scales of as many rows, which must outlive it."""
    rows, columns = codes.shape
    return QuantizedRows(codes.data_ptr(), scales.data_ptr(), rows, columns, codes.stride(0), FORMATS[format], 0)


def int32_array(values):
    return (c_int32 * len(values))(*values)


def find_library(device):
    """The library named by NVB_LIBRARY, or the newest one for `device` that Cargo or CMake left in this checkout or a
    bundle of it.
    """
    if named := os.environ.get("NVB_LIBRARY"):
        return pathlib.Path(named)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    folders = [target / "release", ROOT / "build/lib", ROOT / "build", ROOT / "lib"]
    if device == "cpu":
        folders.append(target / "cpu-only/release")
    found = [path for folder in folders for path in folder.glob("libnvbackend.so*")]
    if not found:
        raise FileNotFoundError("libnvbackend.so not found: build it (`cargo build --release`) or name it in NVB_LIBRARY")
    return max(found, key=lambda path: path.stat().st_mtime)


class Handle:
    """Owns an opaque pointer and destroys it with the object. `keep` are Python objects that it points into."""

    def __init__(self, pointer, destroy, keep=()):
        self.pointer, self.keep = pointer, keep
        weakref.finalize(self, destroy, pointer)


class Backend(Handle):
    """A backend of `device` ("cpu", "cuda:0"). Operations run on `torch_stream`, on the CPU at once. `configuration`: further
    fields of an nvb_configuration, by name.
    """

    def __init__(self, device, threads=0, library=None, torch_stream=None, **configuration):
        self.like_this = {"device": device, "threads": threads, "library": library or find_library(device), "torch_stream": torch_stream}
        self.library = ctypes.CDLL(str(self.like_this["library"]))
        self.library.nvb_version_string.restype = c_char_p
        self.library.nvb_last_error_message.restype = c_size_t
        self.tuned = set()
        settings = self.configuration({"device": device, "threads": threads, **configuration})
        # The fields beyond the configuration are those of the C struct, which a shorter one leaves at 0.
        pointer = self.create("nvb_backend_create", byref(BackendOptions(configuration=settings.pointer)))
        super().__init__(pointer, self.library.nvb_backend_destroy)
        native = c_void_p(torch_stream.cuda_stream if torch_stream else None)
        self.stream = self.child("nvb_stream", "wrap", native)

    def another(self, **configuration):
        """A second backend of the same device and stream, with these fields of its configuration."""
        return Backend(**self.like_this, **configuration)

    def configuration(self, values):
        result = Handle(self.create("nvb_configuration_create", c_uint32(0)), self.library.nvb_configuration_destroy)
        for field, value in values.items():
            self.check(self.library.nvb_configuration_set(result.pointer, field.encode(), str(value).encode()))
        return result

    def check(self, status):
        if status != 0:
            text = ctypes.create_string_buffer(2048)
            self.library.nvb_last_error_message(text, c_size_t(len(text)))
            raise Error(f"status {status}: {text.value.decode()}")

    def create(self, function, *arguments):
        pointer = c_void_p()
        self.check(getattr(self.library, function)(*arguments, byref(pointer)))
        return pointer

    def child(self, kind, verb, *arguments, keep=()):
        pointer = self.create(f"{kind}_{verb}", self.pointer, *arguments)
        return Handle(pointer, getattr(self.library, f"{kind}_destroy"), (self, *keep))

    def version(self):
        return self.library.nvb_version_string().decode()

    def build_info(self):
        info = BuildInfo()
        self.check(self.library.nvb_get_build_info(byref(info)))
        return info

    def device_info(self):
        info = DeviceInfo()
        self.check(self.library.nvb_backend_get_device_info(self.pointer, byref(info)))
        return info

    def memory_manager(self):
        pointer = self.create("nvb_backend_get_memory_manager", self.pointer, c_uint32(0))
        return Handle(pointer, self.library.nvb_memory_manager_destroy, (self,))

    def weight(self, *parts, gated=False, format=None, group_size=0, zero_points=False):
        """A weight of [N, K] tensors, copied or quantised to `format`; `gated`: (gate, up)."""
        views = (Tensor * len(parts))(*map(tensor, parts))
        desc = WeightDesc(parts=views, part_count=len(parts), arrangement=GATED if gated else STACKED, source=SOURCE_DEVICE,
                          format=FORMATS[format], group_size=group_size, zero_points=zero_points)
        return self.child("nvb_weight", "create", byref(desc), self.stream.pointer)

    def dequantize(self, weight, output):
        """Writes a weight's values into an [N, K] tensor."""
        self.check(self.library.nvb_weight_dequantize(weight.pointer, byref(tensor(output)), self.stream.pointer))
        self.synchronize()

    def tune_linear(self, dtype, format, **product):
        """Lets products like this one, of fields of nvb_linear_case, run the fastest kernel from now on; each is tuned once."""
        case = LinearCase(input_dtype=DTYPES[dtype], format=FORMATS[format], **product)
        if bytes(case) not in self.tuned:
            self.synchronize()
            self.check(self.library.nvb_tune_linear(self.pointer, byref(case), c_size_t(1), None, None, None, None))
            self.tuned.add(bytes(case))

    def kv_cache(self, dtype, **shape):
        """`dtype` of torch, or a name of ROW_DTYPES."""
        number = ROW_DTYPES[dtype] if dtype in ROW_DTYPES else DTYPES[dtype]
        return self.child("nvb_kv_cache", "create", byref(KvCacheOptions(dtype=number, **shape)))

    def reserve(self, cache, sequence, tokens):
        """Gives a sequence of `cache` room for `tokens` tokens."""
        self.check(self.library.nvb_kv_cache_reserve(cache.pointer, c_uint32(sequence), c_uint32(tokens), self.stream.pointer))

    def attention(self, **settings):
        return self.child("nvb_attention", "create", byref(AttentionOptions(**settings)))

    def prepare(self, function, owner, arguments, keep):
        """A function of no arguments that queues one call; it keeps alive what the arguments point to."""
        call, handle, reference, stream = getattr(self.library, function), owner.pointer, byref(arguments), self.stream.pointer

        def run(keep=(arguments, owner, keep)):
            status = call(handle, reference, stream)
            if status != 0:
                self.check(status)
        return run

    def operation(self, name, **arguments):
        """Prepares `nvb_<name>`; handles and torch tensors are given as they are."""
        pointers = {key: value.pointer if isinstance(value, Handle) else value for key, value in arguments.items()}
        return self.prepare(f"nvb_{name}", self, OPERATIONS[name](**pointers), arguments)

    def attention_prefill(self, attention, query_starts, key_starts, prefix_lengths=None, **others):
        """Prepares a prefill against key and value tensors [T, kv_heads, head_dim]. `others` are further fields of its arguments."""
        starts, keys = int32_array(query_starts), int32_array(key_starts)
        if prefix_lengths is not None:
            others["prefix_lengths"] = int32_array(prefix_lengths)
        arguments = AttentionPrefillArgs(query_starts=starts, sequence_count=len(query_starts) - 1, key_starts=keys, **others)
        return self.prepare("nvb_attention_prefill", attention, arguments, (starts, keys, others))

    def attention_chunk(self, attention, cache, query_starts, sequences, kv_lengths, layer=0, **tensors):
        """Prepares a prefill of query rows that are the last of their sequences in `cache`."""
        arrays = [int32_array(values) for values in (query_starts, sequences, kv_lengths)]
        arguments = AttentionPrefillArgs(
            query_starts=arrays[0], sequence_count=len(sequences), cache=cache.pointer, sequences=arrays[1], kv_lengths=arrays[2], layer=layer,
            **tensors)
        return self.prepare("nvb_attention_prefill", attention, arguments, (cache, arrays, tensors))

    def attention_decode(self, attention, cache, **arguments):
        """Prepares a decode step of the sequences of `cache`."""
        return self.prepare("nvb_attention_decode", attention, AttentionDecodeArgs(cache=cache.pointer, **arguments), (cache, arguments))

    def record(self, queue):
        """Records what `queue` queues as a graph of the library, and gives a function that launches it."""
        pointer = self.create("nvb_graph_create", self.pointer)
        graph = Handle(pointer, self.library.nvb_graph_destroy, (self,))
        self.check(self.library.nvb_graph_begin(pointer, self.stream.pointer))
        try:
            queue()
        finally:
            self.check(self.library.nvb_graph_end(pointer, self.stream.pointer))

        def launch():
            self.check(self.library.nvb_graph_launch(graph.pointer, self.stream.pointer))
        return launch

    def synchronize(self):
        self.check(self.library.nvb_stream_synchronize(self.stream.pointer))
