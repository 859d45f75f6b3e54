"""Tells what the PyPI package gguf reads in each file of a folder, one line a file, in the words of
tests/gguf_oracles.rs: `python tell.py FOLDER`."""

import struct
import sys
from pathlib import Path

from gguf import GGUFReader, GGUFValueType as V

KINDS = {
    V.UINT8: "u8", V.INT8: "i8", V.UINT16: "u16", V.INT16: "i16", V.UINT32: "u32", V.INT32: "i32",
    V.FLOAT32: "f32", V.BOOL: "bool", V.STRING: "string", V.ARRAY: "array", V.UINT64: "u64",
    V.INT64: "i64", V.FLOAT64: "f64",
}  # fmt: skip


def hexed(text):
    return text.encode().hex()


def tell(kind, value):
    match kind:
        case V.FLOAT32:
            return "f32 " + struct.pack(">f", value).hex()
        case V.FLOAT64:
            return "f64 " + struct.pack(">d", value).hex()
        case V.STRING:
            return "string " + hexed(value)
        case V.BOOL:
            return "bool " + str(bool(value)).lower()
        case _:
            return f"{KINDS[kind]} {value}"


def tell_field(field):
    if field.types[0] != V.ARRAY:
        return tell(field.types[0], field.contents())
    if len(field.types) == 1:
        return "empty"  # the package forgets the kind of the elements
    if field.types[1] == V.ARRAY:
        return "nested"  # the package flattens arrays in arrays
    elements = (tell(field.types[1], element) for element in field.contents())
    return f"{KINDS[field.types[1]]} [{', '.join(elements)}]"


for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
    reader = GGUFReader(path)
    fields = sorted((f for f in reader.fields.values() if not f.name.startswith("GGUF.")), key=lambda f: f.name)
    for field in fields:
        print(f"key {hexed(field.name)} {tell_field(field)}", end="; ")
    for t in sorted(reader.tensors, key=lambda t: t.name):
        dims = ", ".join(str(d) for d in t.shape)
        print(f"tensor {hexed(t.name)} [{dims}] {t.tensor_type.name} {t.data.tobytes().hex()}", end="; ")
    print()
