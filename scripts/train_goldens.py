#!/usr/bin/env python3
"""Losses, gradients and three steps of AdamW by PyTorch, which the tests of training compare with.

    pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 numpy
    python scripts/train_goldens.py --models fixtures/models --out fixtures/train mamba2-tiny nemotron-h-moe-tiny

Writes OUT/NAME.safetensors for each NAME, a folder of MODELS; fixtures/README.md says what is in it. Everything is
computed in float64: the same model, with its casts to float32 made casts to float64. Where the original limits the
steps of the state-space layers without being told to (Nemotron-H, Zamba2), the limit is taken away, as in `noclamp.*`
of the models' goldens. Before anything is written, the logits are compared with those goldens, and the gradient of
every parameter with central differences along random directions.
"""
import argparse
import json
import math
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

# Lengths of the rows of each step's batch; the first is also that of the gradients.
BATCHES = [(12, 12, 7), (40, 5), (2, 9, 19)]
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
WEIGHT_DECAY = 0.1
# Tensors of more values than this are kept as every n-th row, n the least odd number that makes the file fit.
WHOLE = 2048
LARGEST_FILE = 400_000


class Double(TorchFunctionMode):
    """Casts to float32 become casts to float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


def load(folder, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    config = json.loads((folder / "config.json").read_text())
    for module in model.modules():
        if hasattr(module, "time_step_limit") and "time_step_limit" not in config:
            module.time_step_limit = (0.0, math.inf)
    return model.to(dtype).eval()  # some parameters are loaded as float32 whatever one asks for


def logits(model, row):
    with Double() if model.dtype == torch.float64 else nullcontext():
        return model(row[None], use_cache=False).logits[0]


def mean_loss(model, batch):
    """Over the tokens of all rows but the first of each; rows one by one, so without padding."""
    total = sum(F.cross_entropy(logits(model, row)[:-1], row[1:], reduction="sum") for row in batch)
    return total / sum(len(row) - 1 for row in batch)


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = mean_loss(model, batch)
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]


def batches(vocab_size):
    """Half of the ids are below 64, so that some repeat."""
    rng = np.random.default_rng(5)

    def row(n):
        return torch.from_numpy(np.where(rng.random(n) < 0.5, rng.integers(0, 64, n), rng.integers(0, vocab_size, n)))

    return [[row(n) for n in lengths] for lengths in BATCHES]


def decays(name, parameter):
    """Matrices, also of experts, and embeddings; not the convolution, norms, biases, A_log, D and dt_bias."""
    return parameter.dim() >= 2 and "conv1d" not in name


def by_checkpoint_name(model, values):
    """`values` of the parameters, named as in the checkpoint: transformers' saving undoes what its loading did."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)
    # Buffers, such as the bias of a router's choice, are saved too, but not trained.
    buffers = {name.rsplit(".", 1)[-1] for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in tensors.items() if name.rsplit(".", 1)[-1] not in buffers}


def train(model):
    """The losses of the steps, the gradients of the first, the weights after the last."""
    groups = [[], []]
    for name, parameter in model.named_parameters():
        groups[decays(name, parameter)].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1], "weight_decay": WEIGHT_DECAY}], **ADAMW
    )
    losses, grads = [], None
    for batch in batches(model.config.vocab_size):
        loss, new = loss_and_gradients(model, batch)
        losses.append(loss)
        grads = grads or by_checkpoint_name(model, new)
        optimizer.step()
    return losses, grads, by_checkpoint_name(model, model.parameters())


def check_logits(model, folder):
    """The goldens of the model were computed without this script."""
    golden = load_file(folder / "golden.safetensors")
    want = golden.get("noclamp.logits_f64", golden.get("logits_f64"))[0]
    off = (logits(model, golden["input_ids"][0]) - want).abs().max().item()
    assert want.dtype == torch.float64 and off < 1e-9, off


def check_gradients(model):
    """Every gradient against central differences of the loss; the greatest relative difference."""
    batch = batches(model.config.vocab_size)[0]
    _, grads = loss_and_gradients(model, batch)
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    with torch.no_grad():
        for (name, parameter), grad in zip(model.named_parameters(), grads, strict=True):
            direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            at = parameter.clone()
            ends = []
            for step in (1e-5, -1e-5):
                parameter.copy_(at + step * direction)
                ends.append(mean_loss(model, batch).item())
            parameter.copy_(at)
            got, want = (grad * direction).sum().item(), (ends[0] - ends[1]) / 2e-5
            off = abs(got - want) / abs(want)
            assert want != 0.0 and off < 1e-4, (name, got, want)
            worst = max(worst, off)
    return worst


def contents(losses, grads, after, every):
    tensors = {"losses": torch.tensor(losses, dtype=torch.float64), "every": torch.tensor([every])}
    for kind, values in (("grad", grads), ("after", after)):
        for name, value in values.items():
            if value.numel() > WHOLE:
                value = value.flatten(0, -2)
                tensors[f"{kind}_sum.{name}"] = value.sum(0).float()
                value = value[::every]
            tensors[f"{kind}.{name}"] = value.float().contiguous()
    return tensors


def furthest(one, other):
    """The greatest difference, and the greatest root mean square of the differences of one tensor."""
    off = [one[name].double() - other[name].double() for name in one]
    return [max(x.abs().max().item() for x in off), max(x.square().mean().sqrt().item() for x in off)]


def write(folder, out):
    model = load(folder, torch.float64)
    check_logits(model, folder)
    worst = check_gradients(model)
    losses, grads, after = train(model)
    losses_f32, grads_f32, after_f32 = train(load(folder, torch.float32))
    largest = max(grad.abs().max().item() for grad in grads.values())
    assert all(grad.abs().max() > 0 for grad in grads.values())
    made = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "adamw": ADAMW | {"weight_decay": WEIGHT_DECAY},
        "undecayed": sorted(name for name, value in after.items() if not decays(name, value)),
        # How far PyTorch's own float32 is from its float64.
        "f32_losses": max(abs(a - b) for a, b in zip(losses, losses_f32, strict=True)),
        "f32_grads": furthest(grads, grads_f32),
        "f32_after": furthest(after, after_f32),
        "largest_grad": largest,
        "differences": worst,
    }
    for every in range(1, 100, 2):
        tensors = contents(losses, grads, after, every)
        for step, batch in enumerate(batches(model.config.vocab_size)):
            tensors |= {f"ids.{step}.{row}": ids for row, ids in enumerate(batch)}
        path = out / f"{folder.name}.safetensors"
        save_file(tensors, path, {"made": json.dumps(made)})  # one key, as several come in any order
        if path.stat().st_size <= LARGEST_FILE:
            break
    print(path, path.stat().st_size, losses, every, made)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("names", nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        write(args.models / name, args.out)


if __name__ == "__main__":
    main()
