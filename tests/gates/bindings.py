#!/usr/bin/env python3
"""Whether the structs of the Python bindings begin with the fields of include/nvbackend.h, in their order and of their types.

    tests/gates/bindings.py

A shorter struct is fine, because the header's structs grow at the end and say their size. So a field that the header gained in the
middle of one, which a benchmark would fill in as its neighbour, is found. What it compares is benches/nvb.py.
"""

import ctypes
import pathlib
import re
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benches"))
sys.dont_write_bytecode = True

NUMBERS = {"size_t": ctypes.c_size_t, "uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "uint64_t": ctypes.c_uint64,
           "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double, "char": ctypes.c_char}
STRUCT = re.compile(r"typedef struct(?: \w+)? \{\n(.*?)\} (nvb_\w+);", re.DOTALL)
FIELD = re.compile(r"(?:const )?(\w+) (\**)(\w+)(?:\[(\d+)\])?$")


def header_structs(text):
    """Of each struct its fields: name, type without const, whether it is a pointer, and the length of an array or None."""
    structs = {}
    for body, name in STRUCT.findall(text):
        lines = [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("//")]
        fields = [FIELD.match(line) for line in " ".join(lines).rstrip(";").split("; ")]
        # What is no plain field, such as a function, no binding has.
        fields = fields[: next((i for i, field in enumerate(fields) if field is None), len(fields))]
        structs[name] = [(field[3], field[1], field[2] != "", field[4] and int(field[4])) for field in fields]
    return structs


def bindings():
    """The structs of benches/nvb.py by their C names. It needs PyTorch's dtypes alone to be imported, which need not be there."""
    torch = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})
    torch.__getattr__ = lambda name: name
    sys.modules["torch"] = torch
    import nvb

    found = {}
    for name, kind in vars(nvb).items():
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and hasattr(kind, "_fields_"):
            found["nvb" + re.sub("([A-Z])", lambda letter: "_" + letter[1].lower(), name)] = kind
    return found


def is_of(kind, wanted, pointer, length, structs):
    if pointer:
        return kind is ctypes.c_void_p or hasattr(kind, "contents") or kind is ctypes.c_char_p
    if length is not None:
        return getattr(kind, "_length_", None) == length and is_of(kind._type_, wanted, False, None, structs)
    return kind is structs.get(wanted) if wanted in structs else kind is NUMBERS.get(wanted)


def problems(text, structs):
    """What differs, a line each."""
    header = header_structs(text)
    for name, kind in structs.items():
        if name not in header:
            yield f"{name} is no struct of the header"
            continue
        for (field, of), (wanted, its_type, pointer, length) in zip(kind._fields_, header[name]):
            if field != wanted:
                yield f"{name}: {field} stands where the header has {wanted}"
                break
            if not is_of(of, its_type, pointer, length, structs):
                yield f"{name}.{field} is {of.__name__}, and in the header {its_type}{' *' if pointer else ''}"
        if len(kind._fields_) > len(header[name]):
            yield f"{name} has more fields than the header's"


def main():
    structs = bindings()
    found = list(problems((ROOT / "include" / "nvbackend.h").read_text(), structs))
    for problem in found:
        print(f"bindings: benches/nvb.py: {problem}")
    if not found:
        print(f"bindings: {len(structs)} structs of benches/nvb.py are those of the header")
    return 1 if found or len(structs) < 20 else 0


if __name__ == "__main__":
    raise SystemExit(main())
