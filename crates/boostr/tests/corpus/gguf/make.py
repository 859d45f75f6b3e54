"""Writes the small GGUF files of this folder with the PyPI package gguf: `python make.py`.

Names, keys and types are those of real files; the numbers mean nothing.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter, TokenType

rng = np.random.default_rng(3)


def floats(*shape):
    return rng.standard_normal(shape, dtype=np.float32)


def blocks(quant, rows, row_bytes, halves):
    """Blocks of random codes whose f16 scales, at the byte offsets `halves`, are finite."""
    size = {T.Q4_K: 144, T.Q6_K: 210}[quant]
    data = rng.integers(0, 256, (rows * row_bytes // size, size), dtype=np.uint8)
    for at in halves:
        scale = rng.uniform(-0.01, 0.01, len(data)).astype(np.float16)
        data[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, row_bytes)


def save(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mamba2_keys(writer, d_model, layers, heads, head_dim, d_state):
    writer.add_name("tiny")
    writer.add_context_length(2**20)
    writer.add_embedding_length(d_model)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(layers)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_state_size(d_state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(1)
    writer.add_layer_norm_rms_eps(1e-5)


def gpt2_vocab(writer, size):
    letters = [chr(c) for c in range(0x21, 0x7F)] + ["Ġ", "Ċ", "é"]
    tokens = (letters + [a + b for a in letters for b in letters])[: size - 1] + ["<|endoftext|>"]
    types = [TokenType.NORMAL] * (size - 1) + [TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("olmo")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{t[0]} {t[1]}" for t in tokens if len(t) == 2])
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)
    writer.add_pad_token_id(size - 1)


def mamba2(path, matrix, layers=2, d_model=16, heads=4, head_dim=8, d_state=8, vocab=32, **split):
    writer = GGUFWriter(path, "mamba2", **split)
    mamba2_keys(writer, d_model, layers, heads, head_dim, d_state)
    d_inner = heads * head_dim
    channels = d_inner + 2 * d_state
    gpt2_vocab(writer, vocab)

    def add(name, rows, cols, wide=False):
        data, quant = matrix(rows, cols, wide)
        writer.add_tensor(name, data, raw_dtype=quant)

    add("token_embd.weight", vocab, d_model, wide=True)
    writer.add_tensor("output_norm.weight", floats(d_model))
    for i in range(layers):
        blk = f"blk.{i}."
        writer.add_tensor(blk + "attn_norm.weight", floats(d_model))
        add(blk + "ssm_in.weight", 2 * d_inner + 2 * d_state + heads, d_model)
        writer.add_tensor(blk + "ssm_conv1d.weight", floats(channels, 4))
        writer.add_tensor(blk + "ssm_conv1d.bias", floats(channels))
        writer.add_tensor(blk + "ssm_dt.bias", floats(heads))
        writer.add_tensor(blk + "ssm_a", -np.exp(floats(heads, 1)))
        writer.add_tensor(blk + "ssm_d", floats(heads, 1))
        writer.add_tensor(blk + "ssm_norm.weight", floats(1, d_inner))
        add(blk + "ssm_out.weight", d_model, d_inner)
    save(writer)


def q4_k_m(rows, cols, wide):
    if wide:
        return blocks(T.Q6_K, rows, cols // 256 * 210, [208]), T.Q6_K
    return blocks(T.Q4_K, rows, cols // 256 * 144, [0, 2]), T.Q4_K


def llama(path, vocab):
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(2048)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    vocab(writer)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    writer.add_tensor("token_embd.weight", floats(48, 32).astype(np.float16))
    writer.add_tensor("output_norm.weight", floats(32))
    save(writer)


def spm_vocab(writer):
    tokens = [b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % b for b in range(16)]
    tokens += ["▁t", "er", "in", "▁a", "▁the"] + [chr(c) for c in range(0x61, 0x7B)]
    types = [TokenType.UNKNOWN] + [TokenType.CONTROL] * 2 + [TokenType.BYTE] * 16
    types += [TokenType.NORMAL] * (len(tokens) - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 19 + [-float(i) for i in range(len(tokens) - 19)])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)


mamba2("mamba2-f32.gguf", lambda rows, cols, wide: (floats(rows, cols), T.F32))
mamba2("mamba2-q4_k_m.gguf", q4_k_m, layers=1, d_model=256, heads=4, head_dim=64, vocab=16)
mamba2(
    "mamba2-split.gguf",
    lambda rows, cols, wide: (floats(rows, cols).astype(np.float16), T.F16),
    layers=1,
    split_max_tensors=5,
)
llama("llama-gpt2.gguf", lambda writer: gpt2_vocab(writer, 48))
llama("llama-spm.gguf", spm_vocab)
