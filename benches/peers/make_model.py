#!/usr/bin/env python3
"""Writes a model of mamba2-130m's sizes with made-up weights.

    make_model.py DIR

DIR/f32 and DIR/bf16 are folders as transformers writes them (config.json, model.safetensors, tokenizer.json);
DIR/f32.gguf is the same in GGUF by the `gguf` package, for llama.cpp's quantizer.

The weights are random from a fixed seed, at the scales of a fresh Mamba-2, so that logits are finite. The
tokenizer is a byte-level BPE that is there for its size only: one special token, the 256 bytes, then pairs
of bytes up to the vocabulary.
"""

import argparse
import json
import struct
from pathlib import Path

import gguf
import numpy as np

LAYERS, WIDTH, STATE, HEADDIM, CONV, VOCAB = 24, 768, 128, 64, 4, 50288
INNER = 2 * WIDTH
HEADS = INNER // HEADDIM
CONV_DIM = INNER + 2 * STATE
IN_PROJ = INNER + CONV_DIM + HEADS
EPS = 1e-5
SEED = 130


def weights() -> dict[str, np.ndarray]:
    """Tensors by their names in transformers, float32."""
    random = np.random.Generator(np.random.PCG64(SEED))

    def normal(scale: float, *shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def uniform(low: float, high: float, *shape: int) -> np.ndarray:
        return random.uniform(low, high, shape).astype(np.float32)

    tensors = {"backbone.embeddings.weight": normal(0.02, VOCAB, WIDTH)}
    for layer in range(LAYERS):
        step = np.exp(uniform(np.log(1e-3), np.log(1e-1), HEADS))  # dt at rest, log-uniform
        tensors |= {
            f"backbone.layers.{layer}.{name}": tensor
            for name, tensor in {
                "norm.weight": np.ones(WIDTH, np.float32),
                "mixer.in_proj.weight": normal(WIDTH**-0.5, IN_PROJ, WIDTH),
                "mixer.conv1d.weight": uniform(-0.5, 0.5, CONV_DIM, 1, CONV),
                "mixer.conv1d.bias": uniform(-0.5, 0.5, CONV_DIM),
                "mixer.dt_bias": np.log(np.expm1(step)),
                "mixer.A_log": np.log(uniform(1, 16, HEADS)),
                "mixer.D": np.ones(HEADS, np.float32),
                "mixer.norm.weight": np.ones(INNER, np.float32),
                "mixer.out_proj.weight": normal((INNER * 2 * LAYERS) ** -0.5, WIDTH, INNER),
            }.items()
        }
    tensors["backbone.norm_f.weight"] = np.ones(WIDTH, np.float32)
    return tensors


def bf16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 (ties to even) of finite float32 values, as its 16 bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: printable ones for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens in the order of their ids, and the merges that make those of two bytes."""
    characters = byte_characters()
    pairs = [(a, b) for a in characters for b in characters][: VOCAB - 257]
    return ["<|endoftext|>", *characters, *(a + b for a, b in pairs)], pairs


def write_folder(folder: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "torch_dtype": {"F32": "float32", "BF16": "bfloat16"}[dtype],
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "state_size": STATE,
        "head_dim": HEADDIM,
        "num_heads": HEADS,
        "n_groups": 1,
        "expand": 2,
        "conv_kernel": CONV,
        "chunk_size": 256,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "rms_norm": True,
        "layer_norm_epsilon": EPS,
        "residual_in_fp32": True,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    tokens, merges = vocabulary()
    special = {"id": 0, "content": tokens[0], "single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [f"{a} {b}" for a, b in merges],
        },
    }
    tokenizer_config = {
        "tokenizer_class": "GPTNeoXTokenizerFast",
        "bos_token": tokens[0],
        "eos_token": tokens[0],
        "pad_token": tokens[0],
    }
    for name, value in {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (folder / name).write_text(json.dumps(value, indent=1), encoding="utf-8")
    if dtype == "BF16":
        tensors = {name: bf16(tensor) for name, tensor in tensors.items()}
    write_safetensors(folder / "model.safetensors", tensors, dtype)


def write_gguf(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Keys, names and shapes are those that llama.cpp's conversion/mamba.py writes."""
    writer = gguf.GGUFWriter(path, "mamba2")
    writer.add_name("mamba2-130m with made-up weights")
    writer.add_context_length(2**20)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(LAYERS)
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(HEADS)
    writer.add_ssm_group_count(1)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (VOCAB - 1))
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)

    names = {
        "norm.weight": "attn_norm.weight",
        "mixer.in_proj.weight": "ssm_in.weight",
        "mixer.conv1d.weight": "ssm_conv1d.weight",
        "mixer.conv1d.bias": "ssm_conv1d.bias",
        "mixer.dt_bias": "ssm_dt.bias",
        "mixer.A_log": "ssm_a",
        "mixer.D": "ssm_d",
        "mixer.norm.weight": "ssm_norm.weight",
        "mixer.out_proj.weight": "ssm_out.weight",
    }
    writer.add_tensor("token_embd.weight", tensors["backbone.embeddings.weight"])
    for layer in range(LAYERS):
        for theirs, name in names.items():
            tensor = tensors[f"backbone.layers.{layer}.{theirs}"]
            if theirs == "mixer.A_log":
                tensor = -np.exp(tensor).reshape(HEADS, 1)
            elif theirs == "mixer.D":
                tensor = tensor.reshape(HEADS, 1)
            elif theirs == "mixer.conv1d.weight":
                tensor = tensor.reshape(CONV_DIM, CONV)
            elif theirs == "mixer.norm.weight":
                tensor = tensor.reshape(1, INNER)
            writer.add_tensor(f"blk.{layer}.{name}", tensor)
    writer.add_tensor("output_norm.weight", tensors["backbone.norm_f.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("dir", type=Path)
    args = parser.parse_args()
    tensors = weights()
    write_folder(args.dir / "f32", tensors, "F32")
    write_folder(args.dir / "bf16", tensors, "BF16")
    write_gguf(args.dir / "f32.gguf", tensors)


if __name__ == "__main__":
    main()
