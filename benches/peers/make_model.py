#!/usr/bin/env python3
"""Writes a model of a published shape with made-up weights.

    make_model.py DIR [--shape mamba2-130m] [--type bf16]

DIR becomes a folder as transformers writes it: config.json, model.safetensors, tokenizer.json. Shapes:

    mamba2-130m     24 layers, width 768, state 128, 24 heads of 64, 50,288 tokens, tied head
    llama           12 layers, width 1024, MLP 2816, 16 query and 4 key heads of 64, 32,000 tokens, tied head
    qwen3.5-0.8b    24 layers, width 1024, MLP 3584; three of four are delta-rule layers with 16 key and 16 value
                    heads of 128, the fourth attention with 8 query and 2 key heads of 256; 248,320 tokens, tied

The weights are random from a fixed seed, at the scales of a fresh model, so that logits are finite. The
tokenizer is a byte-level BPE that is there for its size only: one special token, the 256 bytes, then pairs
and triples of bytes up to the vocabulary.
"""

import argparse
import dataclasses
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

SEED = 130
Random = np.random.Generator


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A shape, and what makes values of it."""

    shape: tuple[int, ...]
    make: Callable[[Random, tuple[int, ...]], np.ndarray]


def normal(scale: float, *shape: int) -> Tensor:
    return Tensor(shape, lambda random, shape: random.standard_normal(shape, np.float32) * np.float32(scale))


def uniform(low: float, high: float, *shape: int) -> Tensor:
    return Tensor(shape, lambda random, shape: random.uniform(low, high, shape).astype(np.float32))


def constant(value: float, *shape: int) -> Tensor:
    return Tensor(shape, lambda _, shape: np.full(shape, value, np.float32))


def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
    """A projection that keeps the size of what it is given, times `scale`."""
    return normal(scale * columns**-0.5, rows, columns)


def log_uniform(low: float, high: float, n: int) -> Tensor:
    """Logarithms of uniform numbers: `A_log`."""
    return Tensor((n,), lambda random, shape: np.log(random.uniform(low, high, shape)).astype(np.float32))


def step_bias(n: int) -> Tensor:
    """Softplus of these is log-uniform between 0.001 and 0.1: steps at rest."""

    def make(random: Random, shape: tuple[int, ...]) -> np.ndarray:
        return np.log(np.expm1(np.exp(random.uniform(np.log(1e-3), np.log(1e-1), shape)))).astype(np.float32)

    return Tensor((n,), make)


Shape = tuple[dict, dict[str, Tensor]]


def mamba2_130m() -> Shape:
    layers, width, state, head, conv, vocab = 24, 768, 128, 64, 4, 50288
    inner = 2 * width
    heads, channels = inner // head, inner + 2 * state
    tensors = {"backbone.embeddings.weight": normal(0.02, vocab, width)}
    for layer in range(layers):
        tensors |= under(
            f"backbone.layers.{layer}",
            {
                "norm.weight": constant(1, width),
                "mixer.in_proj.weight": matrix(inner + channels + heads, width),
                "mixer.conv1d.weight": uniform(-0.5, 0.5, channels, 1, conv),
                "mixer.conv1d.bias": uniform(-0.5, 0.5, channels),
                "mixer.dt_bias": step_bias(heads),
                "mixer.A_log": log_uniform(1, 16, heads),
                "mixer.D": constant(1, heads),
                "mixer.norm.weight": constant(1, inner),
                "mixer.out_proj.weight": matrix(width, inner, (2 * layers) ** -0.5),
            },
        )
    tensors["backbone.norm_f.weight"] = constant(1, width)
    config = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "state_size": state,
        "head_dim": head,
        "num_heads": heads,
        "n_groups": 1,
        "expand": 2,
        "conv_kernel": conv,
        "chunk_size": 256,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "rms_norm": True,
        "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": True,
        "tie_word_embeddings": True,
    }
    return config, tensors


def llama() -> Shape:
    layers, width, inner, heads, kv_heads, head, vocab = 12, 1024, 2816, 16, 4, 64, 32000
    out = (2 * layers) ** -0.5
    tensors = {"model.embed_tokens.weight": normal(0.02, vocab, width)}
    for layer in range(layers):
        tensors |= under(
            f"model.layers.{layer}",
            {
                "input_layernorm.weight": constant(1, width),
                "self_attn.q_proj.weight": matrix(heads * head, width),
                "self_attn.k_proj.weight": matrix(kv_heads * head, width),
                "self_attn.v_proj.weight": matrix(kv_heads * head, width),
                "self_attn.o_proj.weight": matrix(width, heads * head, out),
                "post_attention_layernorm.weight": constant(1, width),
                **mlp(width, inner, out),
            },
        )
    tensors["model.norm.weight"] = constant(1, width)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }
    return config, tensors


def qwen3_5_0_8b() -> Shape:
    layers, width, inner, vocab = 24, 1024, 3584, 248320
    key_heads, value_heads, delta_head, conv = 16, 16, 128, 4
    keys, values = key_heads * delta_head, value_heads * delta_head
    channels = 2 * keys + values
    heads, kv_heads, head = 8, 2, 256
    out = (2 * layers) ** -0.5
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
    tensors = {"model.embed_tokens.weight": normal(0.02, vocab, width)}
    for layer, kind in enumerate(kinds):
        if kind == "full_attention":
            mixer = {
                "self_attn.q_proj.weight": matrix(2 * heads * head, width),  # queries and gates
                "self_attn.k_proj.weight": matrix(kv_heads * head, width),
                "self_attn.v_proj.weight": matrix(kv_heads * head, width),
                "self_attn.q_norm.weight": constant(0, head),  # zero-centred
                "self_attn.k_norm.weight": constant(0, head),
                "self_attn.o_proj.weight": matrix(width, heads * head, out),
            }
        else:
            mixer = {
                "linear_attn.in_proj_qkv.weight": matrix(channels, width),
                "linear_attn.in_proj_z.weight": matrix(values, width),
                "linear_attn.in_proj_b.weight": matrix(value_heads, width),
                "linear_attn.in_proj_a.weight": matrix(value_heads, width),
                "linear_attn.conv1d.weight": uniform(-0.5, 0.5, channels, 1, conv),
                "linear_attn.dt_bias": step_bias(value_heads),
                "linear_attn.A_log": log_uniform(1, 16, value_heads),
                "linear_attn.norm.weight": constant(1, delta_head),
                "linear_attn.out_proj.weight": matrix(width, values, out),
            }
        tensors |= under(
            f"model.layers.{layer}",
            {
                "input_layernorm.weight": constant(0, width),
                **mixer,
                "post_attention_layernorm.weight": constant(0, width),
                **mlp(width, inner, out),
            },
        )
    tensors["model.norm.weight"] = constant(0, width)
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attn_output_gate": True,
        "layer_types": kinds,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": conv,
        "linear_key_head_dim": delta_head,
        "linear_value_head_dim": delta_head,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "tie_word_embeddings": True,
    }
    return config, tensors


def mlp(width: int, inner: int, scale: float) -> dict[str, Tensor]:
    return {
        "mlp.gate_proj.weight": matrix(inner, width),
        "mlp.up_proj.weight": matrix(inner, width),
        "mlp.down_proj.weight": matrix(width, inner, scale),
    }


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


SHAPES = {"mamba2-130m": mamba2_130m, "llama": llama, "qwen3.5-0.8b": qwen3_5_0_8b}


# Files.


def bf16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 (ties to even) of finite float32 values, as its 16 bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: dict[str, Tensor], kind: str) -> None:
    """Writes tensor by tensor, so that one of them at a time is in memory."""
    dtype, size = {"f32": ("F32", 4), "bf16": ("BF16", 2)}[kind]
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        end = offset + size * int(np.prod(tensor.shape))
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.Generator(np.random.PCG64(SEED))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            values = tensor.make(random, tensor.shape)
            file.write((bf16(values) if kind == "bf16" else values).data)


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: printable ones for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens in the order of their ids, and the merges that make those of more than one byte."""
    characters = byte_characters()
    pairs = [(a, b) for a in characters for b in characters]
    triples = ((a + b, c) for a, b in pairs for c in characters)
    merges = list(itertools.islice(itertools.chain(pairs, triples), size - 257))
    return ["<|endoftext|>", *characters, *(a + b for a, b in merges)], merges


def write_folder(folder: Path, shape: Shape, kind: str) -> None:
    config, tensors = shape
    folder.mkdir(parents=True, exist_ok=True)
    tokens, merges = vocabulary(config["vocab_size"])
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
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config |= ends | {"torch_dtype": {"f32": "float32", "bf16": "bfloat16"}[kind]}
    for name, value in {
        "config.json": config,
        "generation_config.json": ends,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (folder / name).write_text(json.dumps(value, indent=1), encoding="utf-8")
    part = folder / "model.part"
    write_safetensors(part, tensors, kind)
    part.rename(folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="mamba2-130m")
    parser.add_argument("--type", choices=["f32", "bf16"], default="bf16")
    args = parser.parse_args()
    write_folder(args.dir, SHAPES[args.shape](), args.type)


if __name__ == "__main__":
    main()
