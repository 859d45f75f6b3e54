#!/usr/bin/env python3
"""Writes three models with made-up weights, their tokenizer and their chat template.

    make_models.py DIR

DIR/pure (Mamba-2), DIR/hybrid (Bamba: Mamba-2 and attention) and DIR/attention (Llama) have 13 to 18 million
parameters in bf16. The weights are random from a fixed seed: which tokens are computed does not depend on
them. The tokenizer is that of the embedded model with control tokens for turns, thoughts and calls. The
template drops the thoughts of earlier turns, as those of published models do.
"""

import argparse
import json
import math
import random
import statistics
import struct
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTROL = ["<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = """\
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
{{ '<|im_start|>system\\n' + system }}
{%- if tools -%}
{{ '\\n\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
  {%- elif message.role != 'system' -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def mamba(prefix: str, d: int, heads: int, head: int, state: int, layers: int) -> dict:
    """Tensors of a mixer: the shape, and how wide its values are spread or which function makes them."""
    inner = heads * head
    conv = inner + 2 * state
    return {
        f"{prefix}.in_proj.weight": ((inner + conv + heads, d), d**-0.5),
        f"{prefix}.conv1d.weight": ((conv, 1, 4), 0.3),
        f"{prefix}.conv1d.bias": ((conv,), 0.1),
        f"{prefix}.dt_bias": ((heads,), lambda x: math.log(math.expm1(math.exp(-4.6 + 1.1 * x)))),
        f"{prefix}.A_log": ((heads,), lambda x: 1.4 + 0.6 * x),
        f"{prefix}.D": ((heads,), 1),
        f"{prefix}.norm.weight": ((inner,), lambda _: 1.0),
        f"{prefix}.out_proj.weight": ((d, inner), (inner * 2 * layers) ** -0.5),
    }


def attention(prefix: str, d: int, heads: int, kv: int, head: int, layers: int) -> dict:
    return {
        f"{prefix}.q_proj.weight": ((heads * head, d), d**-0.5),
        f"{prefix}.k_proj.weight": ((kv * head, d), d**-0.5),
        f"{prefix}.v_proj.weight": ((kv * head, d), d**-0.5),
        f"{prefix}.o_proj.weight": ((d, heads * head), (heads * head * 2 * layers) ** -0.5),
    }


def mlp(prefix: str, d: int, wide: int, layers: int) -> dict:
    return {
        f"{prefix}.gate_proj.weight": ((wide, d), d**-0.5),
        f"{prefix}.up_proj.weight": ((wide, d), d**-0.5),
        f"{prefix}.down_proj.weight": ((d, wide), (wide * 2 * layers) ** -0.5),
    }


def ones(name: str, width: int) -> dict:
    return {f"{name}.weight": ((width,), lambda _: 1.0)}


def pure(vocab: int) -> tuple[dict, dict]:
    d, heads, head, state, layers = 512, 16, 64, 64, 10
    config = {
        "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "hidden_size": d, "expand": 2,
        "num_hidden_layers": layers, "num_heads": heads, "head_dim": head, "state_size": state, "n_groups": 1,
        "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "rms_norm": True,
        "vocab_size": vocab, "tie_word_embeddings": True,
    }  # fmt: skip
    tensors = {"backbone.embeddings.weight": ((vocab, d), 0.02)}
    for i in range(layers):
        tensors |= ones(f"backbone.layers.{i}.norm", d)
        tensors |= mamba(f"backbone.layers.{i}.mixer", d, heads, head, state, layers)
    return config, tensors | ones("backbone.norm_f", d)


def hybrid(vocab: int) -> tuple[dict, dict]:
    d, heads, head, state, layers, wide, with_attention = 384, 12, 64, 64, 8, 1024, [3, 7]
    config = {
        "model_type": "bamba", "architectures": ["BambaForCausalLM"], "hidden_size": d, "intermediate_size": wide,
        "num_hidden_layers": layers, "attn_layer_indices": with_attention, "num_attention_heads": 6,
        "num_key_value_heads": 2, "mamba_n_heads": heads, "mamba_d_head": head, "mamba_d_state": state,
        "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5, "max_position_embeddings": 65536, "vocab_size": vocab,
        "tie_word_embeddings": True,
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": ((vocab, d), 0.02)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        if i in with_attention:
            tensors |= attention(f"{layer}.self_attn", d, 6, 2, 64, layers)
        else:
            tensors |= mamba(f"{layer}.mamba", d, heads, head, state, layers)
        tensors |= mlp(f"{layer}.feed_forward", d, wide, layers)
        tensors |= ones(f"{layer}.input_layernorm", d) | ones(f"{layer}.pre_ff_layernorm", d)
    return config, tensors | ones("model.final_layernorm", d)


def plain(vocab: int) -> tuple[dict, dict]:
    d, heads, kv, head, layers, wide = 384, 6, 2, 64, 8, 1024
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": d, "intermediate_size": wide,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 65536,
        "attention_bias": False, "mlp_bias": False, "vocab_size": vocab, "tie_word_embeddings": True,
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": ((vocab, d), 0.02)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        tensors |= attention(f"{layer}.self_attn", d, heads, kv, head, layers)
        tensors |= mlp(f"{layer}.mlp", d, wide, layers)
        tensors |= ones(f"{layer}.input_layernorm", d) | ones(f"{layer}.post_attention_layernorm", d)
    return config, tensors | ones("model.norm", d)


def bf16(values: list[float]) -> tuple[bytes, bytes]:
    """The low and the high bytes of 256 values."""
    bits = [struct.unpack("<I", struct.pack("<f", x))[0] >> 16 for x in values]
    return bytes(b & 255 for b in bits), bytes(b >> 8 for b in bits)


def write_weights(path: Path, tensors: dict, seed: int) -> int:
    """Each value is one of 256 quantiles of the normal distribution, picked by a byte. Returns how many there are."""
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((i + 0.5) / 256) for i in range(256)]
    source = random.Random(seed)
    header, offset, count = {}, 0, 0
    for name, (shape, _) in tensors.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape, spread in tensors.values():
            make = spread if callable(spread) else lambda x, spread=spread: x * spread
            low, high = bf16([make(x) for x in quantiles])
            picks = source.randbytes(math.prod(shape))
            both = bytearray(2 * len(picks))
            both[0::2], both[1::2] = picks.translate(low), picks.translate(high)
            file.write(both)
            count += len(picks)
    return count


def tokenizer() -> tuple[dict, int]:
    """The embedded model's with the control tokens, and how many ids there are."""
    own = json.loads((ROOT / "models/default/tokenizer.json").read_text())
    first = 1 + max(max(own["model"]["vocab"].values()), *(it["id"] for it in own["added_tokens"]))
    for i, content in enumerate(CONTROL + MARKERS):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        own["added_tokens"].append({"id": first + i, "content": content, **flags, "special": content in CONTROL})
    return own, first + len(CONTROL + MARKERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    tokens, vocab = tokenizer()
    for seed, (name, model) in enumerate({"pure": pure, "hybrid": hybrid, "attention": plain}.items()):
        config, tensors = model(vocab)
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        eos = vocab - len(CONTROL + MARKERS) + 1
        (target / "config.json").write_text(json.dumps(config | {"eos_token_id": eos, "torch_dtype": "bfloat16"}, indent=1))
        (target / "tokenizer.json").write_text(json.dumps(tokens))
        (target / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": CONTROL[1], "add_bos_token": False, "chat_template": TEMPLATE}, indent=1)
        )
        count = write_weights(target / "model.safetensors", tensors, seed)
        print(f"{target}: {count / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
