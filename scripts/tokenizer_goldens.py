#!/usr/bin/env python3
"""Makes fixtures/tokenizers: each family's tokenizer, cut to what a few texts need, with the ids of Python.

    pip install tokenizers==0.23.3 transformers==5.24.0 sentencepiece==0.2.3 gguf jinja2==3.1.6
    python scripts/tokenizer_goldens.py SOURCES [OUT]

SOURCES is a folder with the vocabularies that fixtures/tokenizers/README.md names; a family whose vocabulary is not
there is left as it is. OUT is fixtures/tokenizers by default. With --whole the tokenizers are not cut: what
BOOSTR_TOKENIZERS may name for crates/boostr/tests/it/family_tokenizers.rs.

Ids are those of the whole tokenizer, and the cut one is checked to give them: a merge that no step of encoding these
texts chooses can go without changing any step, because each step takes the best-ranked pair that is present.
"""

import argparse
import base64
import json
import re
from pathlib import Path

import sentencepiece
import tokenizers
import transformers
from gguf import GGUFReader
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [
    "",
    " ",
    "  ",
    "\n\n",
    "Hello world",
    " Hello",
    "Hello  world \n\n\t!",
    "It's I'LL don't",
    "3.14159 and 1234567",
    "x = [1, 2];\n\tif a > b:\n        return",
    "naïve Ångström Größe",
    "Привет, мир!",
    "你好，世界。こんにちは 안녕하세요",
    "नमस्ते",
    "🦙🚀 👩\u200d👧",
    "½ ² ㍻ … “q”",
    "a\u0301 e\u0301\u0327",
    "\u00a0x\u2003y\u3000z",
    "camelCase HTTPServer",
    "https://example.com/a_b?c=d#e",
    "<|im_end|></s> <s>[INST]",
    "\r\n \t\x00\x7f",
    "a                        b",
]

# Llama 3 and GPT-4 (tiktoken's cl100k_base); Qwen has one digit in place of three.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")

CHATML_WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama 2's, without its system message.
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def added(id, content, special=True, normalized=False):
    return {
        "id": id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": normalized,
        "special": special,
    }


def byte_characters():
    """The character that stands for each byte in byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def byte_level(**options):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False} | options


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def starts_with(token, id):
    """The post-processor that puts a token before a text."""

    def entry(name, type_id):
        return {name: {"id": token if name == "SpecialToken" else "AB"[type_id], "type_id": type_id}}

    start, a, b = entry("SpecialToken", 0), entry("Sequence", 0), entry("Sequence", 1)
    return {
        "type": "TemplateProcessing",
        "single": [start, a],
        "pair": [start, a, entry("SpecialToken", 1), b],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }


def file(model, added_tokens, **parts):
    parts = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None} | parts
    start = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens}
    return start | parts | {"model": {"type": "BPE"} | model}


def byte_bpe(vocab, merges, added_tokens, ignore_merges=False, **parts):
    parts.setdefault("decoder", byte_level(add_prefix_space=True, use_regex=True))
    model = {"ignore_merges": ignore_merges, "vocab": vocab, "merges": merges}
    return file(model, added_tokens, **parts)


def spaced_bpe(vocab, merges, added_tokens, is_legacy):
    """SentencePiece as Llama's converters write it: with a normalizer (is_legacy), or the newer Metaspace."""

    def replace(old, new):
        return {"type": "Replace", "pattern": {"String": old}, "content": new}

    prepend = [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    return file(
        {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab, "merges": merges},
        added_tokens,
        normalizer={"type": "Sequence", "normalizers": prepend} if is_legacy else None,
        pre_tokenizer=None if is_legacy else metaspace,
        post_processor=starts_with("<s>", 1),
        decoder={"type": "Sequence", "decoders": decoders},
    )


# Readers of vocabularies


def from_gguf(path):
    fields = GGUFReader(path).fields

    def read(name):
        return fields[f"tokenizer.ggml.{name}"].contents() if f"tokenizer.ggml.{name}" in fields else None

    tokens, types, scores, merges = (read(name) for name in ("tokens", "token_type", "scores", "merges"))
    vocab = {token: id for id, token in enumerate(tokens) if token != f"[PAD{id}]"}
    if scores is not None:
        pieces = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == 1}
        merges = [list(pair) for pair in generate_merges(vocab, pieces)]
    else:
        merges = [merge.split(" ") for merge in merges]
    special = [added(id, token) for token, id in vocab.items() if types[id] in (2, 3)]
    return vocab, merges, special


def from_sentencepiece(path):
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(model.get_piece_size())
    vocab = {model.id_to_piece(id): id for id in ids}
    is_control = [model.is_control(id) or model.is_unknown(id) for id in ids]
    pieces = {t: model.get_score(id) for t, id in vocab.items() if not (is_control[id] or model.is_byte(id))}
    merges = [list(pair) for pair in generate_merges(vocab, pieces)]
    return vocab, merges, [added(id, token) for token, id in vocab.items() if is_control[id]]


def from_ranks(ranks, first_id):
    """A vocabulary of tiktoken, bytes with a rank each: each way to cut a token in two is a merge of its rank."""
    characters = byte_characters()
    spelled = {token: "".join(characters[b] for b in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        ways = [(token[:at], token[at:]) for at in range(1, len(token))]
        ways = [way for way in ways if way[0] in ranks and way[1] in ranks]
        ways.sort(key=lambda way: (ranks[way[0]], ranks[way[1]]))
        merges += [[spelled[left], spelled[right]] for left, right in ways]
    return {spelled[token]: first_id + rank for token, rank in ranks.items()}, merges


# Families: name, vocabulary, and what makes a tokenizer of it


def gpt_neox(path):
    data = json.loads(path.read_text("utf-8"))
    data["model"]["merges"] = [m.split(" ") if isinstance(m, str) else m for m in data["model"]["merges"]]
    return data, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, None


def llama_2(path):
    vocab, merges, special = from_gguf(path)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return spaced_bpe(vocab, merges, special, True), config, INST


def mistral_v1(path):
    """With the control tokens of Zamba2-instruct after the vocabulary."""
    vocab, merges, special = from_sentencepiece(path)
    special += [added(32000, "<|im_start|>"), added(32001, "<|im_end|>")]
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "add_bos_token": True}
    return spaced_bpe(vocab, merges, special, True), config, CHATML_WITH_BOS


def mistral_v3(path):
    vocab, merges, special = from_sentencepiece(path)
    special = [token for token in special if not token["content"].startswith("[control_")]
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return spaced_bpe(vocab, merges, special, False), config, "mistralai-Mistral-Nemo-Instruct-2407"


def llama_3(path):
    vocab, merges, special = from_gguf(path)
    start = starts_with("<|begin_of_text|>", 128000)
    post = {"type": "Sequence", "processors": [byte_level(add_prefix_space=True), start]}
    words = sequence(split(LLAMA3), byte_level())
    data = byte_bpe(vocab, merges, special, True, pre_tokenizer=words, post_processor=post)
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return data, config, "meta-llama-Llama-3.1-8B-Instruct"


def qwen2(path):
    vocab, merges, special = from_gguf(path)
    words = sequence(split(QWEN2), byte_level())
    names = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    tools = [added(151657 + n, name, special=False) for n, name in enumerate(names)]
    kept = ["object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end"]
    kept += ["vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]
    special += [added(151646 + n, f"<|{name}|>") for n, name in enumerate(kept)] + tools
    parts = {"normalizer": {"type": "NFC"}, "pre_tokenizer": words, "post_processor": byte_level()}
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False}
    return byte_bpe(vocab, merges, special, **parts), config, "Qwen-Qwen2.5-7B-Instruct"


def granite_4(path):
    lines = (line.split() for line in path.read_text("utf-8").splitlines())
    vocab, merges = from_ranks({base64.b64decode(token): int(rank) for token, rank in lines}, 0)
    names = ["pad", "end_of_text", "fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "filename", "reponame"]
    names += ["start_of_role", "end_of_role", "unused_1", "start_of_plugin", "end_of_plugin", "unk"]
    special = [added(100256 + n, f"<|{name}|>") for n, name in enumerate(names)]
    words = sequence(split(LLAMA3), byte_level())
    end = "<|end_of_text|>"
    config = {"bos_token": end, "eos_token": end, "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
    config["add_bos_token"] = False
    data = byte_bpe(vocab, merges, special, pre_tokenizer=words, post_processor=byte_level())
    return data, config, "ibm-granite-granite-4.0"


def nemotron(path):
    """Mistral's tekken with other control tokens. A text starts with <s>, though the config does not say so."""
    data = json.loads(path.read_text("utf-8"))
    config = data["config"]
    count = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in data["vocab"][:count]}
    vocab, merges = from_ranks(ranks, config["default_num_special_tokens"])
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"] + [f"<SPECIAL_{id}>" for id in range(5, 1000)]
    words = sequence(split(config["pattern"]), byte_level())
    parts = {"pre_tokenizer": words, "post_processor": starts_with("<s>", 1)}
    vocab = {name: id for id, name in enumerate(names)} | vocab
    data = byte_bpe(vocab, merges, [added(id, name) for id, name in enumerate(names)], True, **parts)
    config = {"bos_token": "<s>", "eos_token": "<SPECIAL_12>", "unk_token": "<unk>"}
    return data, config, "NVIDIA-Nemotron-Nano-v2"


def smollm2(path):
    vocab, merges, special = from_gguf(path)
    words = sequence({"type": "Digits", "individual_digits": True}, byte_level(use_regex=True))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    data = byte_bpe(vocab, merges, special, pre_tokenizer=words)
    return data, config, "HuggingFaceTB-SmolLM2-135M-Instruct"


def falcon_h1(_):
    """A vocabulary of our own, of the kind that Falcon's have: punctuation and digits are cut off."""
    special = {0: "<|pad|>", 11: "<|end_of_text|>", 17: "<|begin_of_text|>", 227: "<|im_start|>", 228: "<|im_end|>"}
    digits = {"type": "Digits", "individual_digits": True}
    words = sequence({"type": "Punctuation", "behavior": "Contiguous"}, byte_level(use_regex=True), digits)
    parts = {"pre_tokenizer": words, "post_processor": starts_with("<|begin_of_text|>", 17)}
    trained = tokenizers.Tokenizer.from_str(json.dumps(byte_bpe({}, [], [], pre_tokenizer=words)))
    names = [special.get(id, f">>UNUSED_{id}<<") for id in range(229)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=names,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(TEXTS * 9, trainer)
    model = json.loads(trained.to_str())["model"]
    added_tokens = [added(id, name) for id, name in enumerate(names)]
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}
    return byte_bpe(model["vocab"], model["merges"], added_tokens, **parts), config, CHATML_WITH_BOS


FAMILIES = {
    "gpt-neox": ("gpt-neox-20b.json", gpt_neox),
    "llama-2": ("ggml-vocab-llama-spm.gguf", llama_2),
    "llama-3": ("ggml-vocab-llama-bpe.gguf", llama_3),
    "mistral-v1": ("tokenizer.model.v1", mistral_v1),
    "mistral-v3": ("mistral_instruct_tokenizer_240323.model.v3", mistral_v3),
    "nemotron": ("tekken_240718.json", nemotron),
    "qwen2": ("ggml-vocab-qwen2.gguf", qwen2),
    "granite-4": ("cl100k_base.tiktoken", granite_4),
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", smollm2),
    "falcon-h1": (".", falcon_h1),
}


# Texts in which a program writes control tokens, and conversations


def control_texts(config, data):
    bos, eos = config.get("bos_token", config["eos_token"]), config["eos_token"]
    others = [token["content"] for token in data["added_tokens"] if not token["special"]][:3]
    return [
        bos + "Hello world" + eos + "\n",
        f"{eos}{eos} {bos} a{eos}b",
        f"x = 3{bos}",
        *(f"a {token}b" for token in others),
    ]


def conversations(config):
    bos, eos = config.get("bos_token", ""), config["eos_token"]
    user = [{"role": "user", "content": "What is 2+2?"}]
    return [
        [*user, {"role": "assistant", "content": "4."}, {"role": "user", "content": "Grüße 🦙!"}],
        # A user who writes control tokens.
        [{"role": "user", "content": f"Say {eos} and{bos}then stop{eos}."}],
    ]


# Cutting


def words_of(tokenizer, data, text):
    """What the model may see of a text, with and without control tokens in it, at its start and after one."""
    for tokens in (data["added_tokens"], [t for t in data["added_tokens"] if not t["special"]]):
        names = sorted((t["content"] for t in tokens), key=len, reverse=True)
        for piece in re.split("|".join(map(re.escape, names)) or "(?!)", text):
            if tokenizer.normalizer:
                piece = tokenizer.normalizer.normalize_str(piece)
            words = [piece]
            if tokenizer.pre_tokenizer:
                words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(piece)]
            for word in words:
                yield word
                yield word.removeprefix("▁")


def used_in(word, vocab, rank, ignore_merges):
    """The tokens that encoding a word goes through."""
    if ignore_merges and word in vocab:
        return {word}
    symbols = [c if c in vocab else "" for c in word]
    tokens = set(symbols) - {""}
    while True:
        pairs = [pair for pair in zip(symbols, symbols[1:], strict=False) if pair in rank]
        if not pairs:
            return tokens
        # The first of the best pairs alone: what it makes may be part of a better one.
        best = min(pairs, key=rank.get)
        tokens |= {*best, "".join(best)}
        at = next(n for n in range(len(symbols)) if tuple(symbols[n : n + 2]) == best)
        symbols[at : at + 2] = ["".join(best)]


def cut(data, texts):
    """The same tokenizer with no more tokens and merges than these texts need."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    model = data["model"]
    vocab, ignore_merges = model["vocab"], model.get("ignore_merges", False)
    rank = {tuple(pair): n for n, pair in reversed(list(enumerate(model["merges"])))}
    is_spaced = model.get("byte_fallback", False)
    always = {f"<0x{b:02X}>" for b in range(256)} if is_spaced else set(byte_characters().values())
    kept = always & vocab.keys()
    for word in {word for text in texts for word in words_of(tokenizer, data, text)}:
        kept |= used_in(word, vocab, rank, ignore_merges)
    # Of hundreds of control tokens without a use a few are enough.
    names = [t for t in data["added_tokens"] if any(t["content"] in text for text in texts)]
    spare = [t for t in data["added_tokens"] if t not in names]
    names = sorted(names + spare[:12] + spare[-1:], key=lambda token: token["id"])
    names = [token for n, token in enumerate(names) if token not in names[:n]]
    ids = {token: vocab[token] for token in kept}
    # In the vocabulary too, so that they keep their ids above the gaps.
    ids |= {token["content"]: token["id"] for token in names}
    ids = dict(sorted(ids.items(), key=lambda item: item[1]))
    merges = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= kept]
    return data | {"added_tokens": names, "model": model | {"vocab": ids, "merges": merges}}


# Ids


def goldens(data, config, template):
    """Ids of the texts, of control texts and of conversations, and the texts that ids have if they are not the same."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))

    def ids(text, as_text, add_special_tokens=False):
        tokenizer.encode_special_tokens = as_text
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    plain = [ids(text, True) for text in TEXTS]
    start = ids("", True, True)
    assert all(ids(text, True, True) == start + bare for text, bare in zip(TEXTS, plain, strict=True))
    decoded = [tokenizer.decode(one, skip_special_tokens=False) for one in plain]
    golden = {
        "start": start,
        "ids": plain,
        "decoded": {str(n): d for n, (text, d) in enumerate(zip(TEXTS, decoded, strict=True)) if d != text},
        "control": [{"text": text, "ids": ids(text, False)} for text in control_texts(config, data)],
    }
    if template is None:
        return golden, TEXTS + [one["text"] for one in golden["control"]]
    is_text = "{" in template
    golden["template"] = {"text": template} if is_text else {"file": f"{template}.jinja"}
    source = template if is_text else (ROOT / f"fixtures/templates/{template}.jinja").read_bytes().decode("utf-8")
    named = {name: token for name, token in config.items() if name.endswith("_token") and isinstance(token, str)}
    tokenizer.encode_special_tokens = False
    chat = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    chat.chat_template = source
    golden["chat"], rendered = [], []
    for messages in conversations(config):
        options = {"add_generation_prompt": True, "return_dict": False}
        one = chat.apply_chat_template(messages, tokenize=True, sanitize_control_tokens=True, **options)
        golden["chat"].append({"messages": messages, "ids": one})
        rendered.append(chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return golden, TEXTS + rendered + ["\n"] + [one["text"] for one in golden["control"]]


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("sources", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "fixtures/tokenizers")
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "texts.json", TEXTS)
    print(f"tokenizers {tokenizers.__version__}, transformers {transformers.__version__}")
    for name, (source, family) in FAMILIES.items():
        if not (args.sources / source).exists():
            print(f"{name}: no {source}")
            continue
        data, config, template = family(args.sources / source)
        golden, texts = goldens(data, config, template)
        if not args.whole:
            data = cut(data, texts)
            assert goldens(data, config, template)[0] == golden, f"{name}: the cut tokenizer gives other ids"
        folder = args.out / name
        folder.mkdir(exist_ok=True)
        write(folder / "tokenizer.json", data)
        write(folder / "tokenizer_config.json", config)
        write(folder / "golden.json", golden)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name}: {len(data['model']['vocab'])} tokens, {len(data['model']['merges'])} merges, {size} bytes")


if __name__ == "__main__":
    main()
