#!/usr/bin/env python3
"""Writes what the tests of crates/kernels/src/quant compare with.

    pip install numpy gguf==0.19.0
    python scripts/quant_goldens.py [--ggml path/to/libggml-base.so]

Writes, in crates/kernels/src/quant:
  grids/tables.rs      the tables of the IQ1, IQ2 and IQ3 formats, as PyPI's `gguf` has them
  testdata/decode.txt  of random blocks: seed, count, a hash of the decoded values' bits, the first of them
  testdata/errors.txt  hashes of weights, and root mean square errors of encoding them: of `gguf`
                       where it encodes, else of ggml (its library comes with PyPI's llama-cpp-python;
                       needed for those lines)
"""

import argparse
import ctypes
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

QUANT = Path(__file__).resolve().parent.parent / "crates/kernels/src/quant"
TABLES = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]
# Where the f16 scales of a block are.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0],
    "IQ3_XXS": [0], "IQ3_S": [0], "IQ1_S": [0], "IQ1_M": [], "TQ1_0": [52], "TQ2_0": [64], "MXFP4": [],
}
ENCODED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
ROWS, WIDTH = 64, 1024


def random(seed, count):
    """`count` numbers of splitmix64, as `testing::Rng` gives them."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def hash_of(values):
    """h = h * K + bits for each value in turn, modulo 2^64."""
    bits = values.astype(np.float32).ravel().view(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        powers = np.full(bits.size, 0x100000001B3, np.uint64)
        powers[0] = 1
        return int((bits * np.cumprod(powers, dtype=np.uint64)[::-1]).sum(dtype=np.uint64))


def random_blocks(name):
    """Random bytes with finite scales; for Q8_0 every finite scale, else 2000 blocks."""
    kind = GGMLQuantizationType[name]
    finite = np.array([b for b in range(1 << 16) if b & 0x7C00 != 0x7C00], np.uint16)
    count, size = (finite.size if name == "Q8_0" else 2000), GGML_QUANT_SIZES[kind][1]
    raw = random(kind.value, -(-count * size // 8)).view(np.uint8)[: count * size]
    blocks = raw.reshape(count, size).copy()
    for at in SCALES[name]:
        scale = blocks[:, at : at + 2].copy().view(np.uint16)
        scale[scale & 0x7C00 == 0x7C00] &= 0xBFFF
        blocks[:, at : at + 2] = scale.view(np.uint8)
    if name == "Q8_0":
        blocks[:, :2] = finite.reshape(-1, 1).view(np.uint8)
    if name == "IQ1_M":
        blocks[:, 55] &= 0xBF
    return blocks


def weights(kind):
    """`ROWS * WIDTH` weights of a distribution; only operations that every language rounds alike."""
    n = ROWS * WIDTH
    u = (random(1000, 48 * n) >> np.uint64(40)).astype(np.float64).reshape(4, n, 12)
    a, b, c, d = u.sum(axis=2) / (1 << 24) - 6.0  # nearly normal, of variance 1
    i = np.arange(n)
    return (0.02 * {
        "normal": lambda: a,
        "laplace": lambda: a * b + c * d,
        "student": lambda: a / np.sqrt((b * b + c * c + d * d) / 3.0),
        "outliers": lambda: np.where(i % 251 == 0, 20.0 * a, a),
        "shifted": lambda: a + 2.5,
        "uniform": lambda: u[0, :, 0] / (1 << 24) - 0.5,
    }[kind]()).astype(np.float32).reshape(ROWS, WIDTH)


KINDS = ["normal", "laplace", "student", "outliers", "shifted", "uniform"]


def ggml_encode(library, x, kind):
    length, size = GGML_QUANT_SIZES[kind]
    out = np.zeros(x.size // length * size, np.uint8)
    library.ggml_quantize_chunk(kind.value, x.ctypes.data, out.ctypes.data, 0, *x.shape, None)
    return out.reshape(x.shape[0], -1)


def tables():
    lines = [
        "//! Tables of the IQ formats. Source: PyPI's `gguf` 0.19.0, `gguf.quants`, read by",
        "//! `scripts/quant_goldens.py`; there after ggml's `ggml-common.h`.",
        "//!",
        "//! An entry of 8 values has two bits for each, an entry of 4 values four, the first lowest: the",
        "//! number of a level.",
        "",
    ]
    for name in TABLES:
        cls = getattr(quants, name)
        cls.init_grid()
        width = cls.grid.shape[-1]
        levels = {float(level): i for i, level in enumerate(cls.grid_map)}
        entries = [
            sum(levels[float(v)] << (16 // width * k) for k, v in enumerate(row))
            for row in cls.grid.reshape(-1, width)
        ]
        lines.append(f"/// {width} values for each index of {name}.")
        lines.append(f"pub(crate) static {name}: [u16; {len(entries)}] = [")
        for i in range(0, len(entries), 12):
            lines.append("    " + " ".join(f"{e:#06x}," for e in entries[i : i + 12]))
        lines += ["];", ""]
    return "\n".join(lines[:-1]) + "\n"


def decoded():
    for name in SCALES:
        blocks = random_blocks(name)
        values = quants.dequantize(blocks, GGMLQuantizationType[name])
        assert not np.isnan(values).any(), name
        first = " ".join(f"{b:08x}" for b in values[0, :8].view(np.uint32))
        yield f"{name.lower()} {GGMLQuantizationType[name].value} {len(blocks)} {hash_of(values):016x} {first}\n"


def errors(library):
    for kind in KINDS:
        yield f"weights {kind} {hash_of(weights(kind)):016x}\n"
    for name in ENCODED:
        kind = GGMLQuantizationType[name]
        for weighted in KINDS:
            x = weights(weighted)
            try:
                source, blocks = "gguf", quants.quantize(x, kind)
            except NotImplementedError:
                if library is None:
                    continue
                source, blocks = "ggml", ggml_encode(library, x, kind)
            difference = quants.dequantize(blocks, kind).astype(np.float64) - x
            yield f"{name.lower()} {weighted} {source} {np.sqrt(np.mean(difference**2)):.9e}\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ggml", help="path of libggml-base")
    library = parser.parse_args().ggml
    if library:
        library = ctypes.CDLL(library)
        library.ggml_quantize_chunk.restype = ctypes.c_size_t
        library.ggml_quantize_chunk.argtypes = (
            [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
        )
    (QUANT / "grids").mkdir(exist_ok=True)
    (QUANT / "testdata").mkdir(exist_ok=True)
    (QUANT / "grids/tables.rs").write_text(tables())
    (QUANT / "testdata/decode.txt").write_text("".join(decoded()))
    (QUANT / "testdata/errors.txt").write_text("".join(errors(library)))


if __name__ == "__main__":
    main()
