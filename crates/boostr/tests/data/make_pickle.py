"""Writes the torch files that tests/torch.rs reads, without torch.

The pickles go through Python's own pickler with stand-ins for torch's names, which emits the
instructions that torch.save does. The zip is laid out as torch's writer does it (compared with files of
torch 2): sizes in a descriptor after the data, padding in the extra field so that data starts at a
multiple of 64, a zip64 end record always.

    python3 tests/data/make_pickle.py
"""

import io
import os
import pickle
import struct
import sys
import types
import zlib
from collections import OrderedDict
from pathlib import Path

HERE = Path(__file__).parent

torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
sys.modules.update({"torch": torch, "torch._utils": utils})


def stand_in(module, name):
    if hasattr(module, name):
        return getattr(module, name)

    def function():
        raise NotImplementedError

    function.__module__, function.__name__, function.__qualname__ = module.__name__, name, name
    setattr(module, name, function)
    return function


rebuild_tensor = stand_in(utils, "_rebuild_tensor_v2")
rebuild_parameter = stand_in(utils, "_rebuild_parameter")


class Storage:
    def __init__(self, kind, data, numel):
        self.type, self.data, self.numel = stand_in(torch, kind + "Storage"), data, numel


class Tensor:
    def __init__(self, storage, offset, size, stride):
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride

    def __reduce_ex__(self, protocol):
        view = (self.storage, self.offset, self.size, self.stride, False, OrderedDict())
        return rebuild_tensor, view


class Parameter:
    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        return rebuild_parameter, (self.data, True, OrderedDict())


class Pickler(pickle.Pickler):
    def __init__(self, file, protocol):
        super().__init__(file, protocol)
        self.storages = []

    def persistent_id(self, thing):
        if not isinstance(thing, Storage):
            return None
        if thing not in self.storages:
            self.storages.append(thing)
        return "storage", thing.type, str(self.storages.index(thing)), "cpu", thing.numel


def zip_like_torch(path, entries):
    out, directory = io.BytesIO(), b""
    for name, data in entries:
        start, name = out.tell(), name.encode()
        flags = 0x808 if data else 0x800
        pad = -(start + 30 + len(name) + 4) % 64
        extra = b"FB" + struct.pack("<H", pad) + b"Z" * pad
        local = struct.pack("<HHHHHIII", 0, flags, 0, 0, 0, 0, 0, 0)
        out.write(b"PK\x03\x04" + local + struct.pack("<HH", len(name), len(extra)) + name + extra + data)
        crc = zlib.crc32(data)
        if data:
            out.write(b"PK\x07\x08" + struct.pack("<III", crc, len(data), len(data)))
        fields = struct.pack("<HHHHHHIII", 0, 0, flags, 0, 0, 0, crc, len(data), len(data))
        directory += b"PK\x01\x02" + fields + struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0, start) + name
    at, count = out.tell(), len(entries)
    out.write(directory)
    twin = out.tell()
    out.write(b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 798, 45, 0, 0, count, count, len(directory), at))
    out.write(b"PK\x06\x07" + struct.pack("<IQI", 0, twin, 1))
    out.write(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), at, 0))
    path.write_bytes(out.getvalue())


def save(name, thing, protocol=2, byteorder=b"little"):
    file = io.BytesIO()
    pickler = Pickler(file, protocol)
    pickler.dump(thing)
    stem = name.removesuffix(".bin")
    entries = [(f"{stem}/data.pkl", file.getvalue()), (f"{stem}/byteorder", byteorder)]
    entries += [(f"{stem}/data/{key}", storage.data) for key, storage in enumerate(pickler.storages)]
    entries += [(f"{stem}/version", b"3\n"), (f"{stem}/.data/serialization_id", b"0" * 40)]
    zip_like_torch(HERE / name, entries)


def floats(values):
    return Storage("Float", struct.pack(f"<{len(values)}f", *values), len(values))


# Every type, each holding 1 and 2 (a bool: 1 and 0), a single number, and nothing at all.
one_two = {
    "Double": "<2d", "Float": "<2f", "Half": "<2e", "Long": "<2q", "Int": "<2i", "Short": "<2h",
    "Char": "<2b", "Byte": "<2B",
}
every = {kind: Storage(kind, struct.pack(form, 1, 2), 2) for kind, form in one_two.items()}
every["BFloat16"] = Storage("BFloat16", bytes.fromhex("803f0040"), 2)
every["Bool"] = Storage("Bool", b"\x01\x00", 2)
types_file = {kind: Tensor(storage, 0, (2,), (1,)) for kind, storage in every.items()}
types_file["scalar"] = Tensor(floats([3.5]), 0, (), ())
types_file["empty"] = Tensor(floats([]), 0, (0, 4), (4, 1))
save("types.bin", types_file)

# Views of 0, 1, ..., 11 in one storage; `tied` is `matrix` again, as an lm_head is the embedding.
numbers = floats(range(12))
matrix = Tensor(numbers, 0, (3, 4), (4, 1))
save("views.bin", {
    "matrix": matrix,
    "tied": Tensor(numbers, 0, (3, 4), (4, 1)),
    "row": Tensor(numbers, 4, (4,), (1,)),
    "column": Tensor(numbers, 1, (3,), (4,)),
    "transposed": Tensor(numbers, 0, (4, 3), (1, 4)),
    "cube": Tensor(numbers, 0, (2, 3, 2), (6, 1, 3)),
    "one": Tensor(numbers, 5, (1, 1), (77, 99)),
})

# What module.state_dict() returns: an OrderedDict that carries `_metadata`.
state = OrderedDict([("a.weight", matrix), ("b.weight", Parameter(Tensor(numbers, 8, (2, 2), (2, 1))))])
state._metadata = OrderedDict([("", {"version": 1}), ("a", {"version": 2})])
save("state_dict.bin", state)

training = {
    "epoch": 3, "lr": 0.1, "seed": 2**80, "note": None, "done": True, "betas": [0.9, 0.999],
    "shape": (1, 2, 3, 4), "step": -70_000, "raw": (), "state_dict": state,
}
save("nested.bin", training)
save("protocol4.bin", training | {"raw": b"bytes"}, protocol=4)
save("big_endian.bin", {"a": matrix}, byteorder=b"big")


class Payload:
    def __reduce__(self):
        return os.system, ("touch boostr-executed-a-pickle",)


save("os_system.bin", {"a": matrix, "b": Payload()})
