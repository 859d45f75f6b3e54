#!/usr/bin/env python3
"""Speed and memory of training a small Mamba-2 by PyTorch on the CPU: what boostr's trainer is compared with.

    pip install torch==2.15.0
    python scripts/train_speed.py [--threads 2] [--steps 10] [--batch 8] [--seq 512] [--d-model 256] [--layers 4] ...

The chunked algorithm of the paper "Transformers are SSMs" (section 6), written in PyTorch's own operations: float32,
AdamW in its fused form, a head tied to the embedding, random tokens. One step is a forward, a backward and an update.
Prints one JSON object; memory in MiB: resident before the first step (PyTorch itself, weights), and at its peak. On a
machine that others use, cpu_seconds_per_step (of all threads) says more than the clock.
"""
import argparse
import json
import resource
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

HEADDIM = 64
D_CONV = 4
EXPAND = 2


def ssd(x, dt, a, b, c, chunk):
    """y[t] = c[t] S[t] with S[t] = exp(dt[t] a) S[t-1] + dt[t] x[t] b[t]^T.

    x: [B, L, H, P], dt: [B, L, H], a: [H], b and c: [B, L, N] -> [B, L, H, P]; chunk (Q) divides L.
    """
    batch, seqlen, nheads, headdim = x.shape
    x = (x * dt[..., None]).view(batch, -1, chunk, nheads, headdim)  # [B, K, Q, H, P]
    da = (dt * a).view(batch, -1, chunk, nheads).cumsum(2)  # [B, K, Q, H]
    b, c = (m.reshape(batch, -1, chunk, m.shape[-1]) for m in (b, c))  # [B, K, Q, N]
    # Inside a chunk, as attention with a decay: from s to t, exp(da[t] - da[s]).
    of_head = da.transpose(2, 3)  # [B, K, H, Q]
    past = torch.full((chunk, chunk), -torch.inf, dtype=x.dtype).triu(1)
    decay = (of_head[..., :, None] - of_head[..., None, :] + past).exp()  # [B, K, H, Q, Q]
    y = ((c @ b.mT)[:, :, None] * decay @ x.transpose(2, 3)).transpose(2, 3)  # [B, K, Q, H, P]
    # From chunk to chunk, by the state at the start of each; one product for all heads.
    added = b.mT @ (x * (da[:, :, -1:] - da).exp()[..., None]).flatten(3)  # [B, K, N, H P]
    kept = da[:, :, -1].exp().repeat_interleave(headdim, -1)[:, :, None]  # [B, K, 1, H P]
    state, starts = torch.zeros_like(added[:, 0]), []
    for kept_k, added_k in zip(kept.unbind(1), added.unbind(1), strict=True):
        starts.append(state)
        state = kept_k * state + added_k
    y = y + da.exp()[..., None] * (c @ torch.stack(starts, 1)).unflatten(-1, (nheads, headdim))
    return y.reshape(batch, seqlen, nheads, headdim)


def check_ssd():
    """The chunks against the recurrence."""
    torch.manual_seed(0)
    x, b, c = (torch.randn(2, 24, *shape, dtype=torch.float64) for shape in ((3, 4), (5,), (5,)))
    dt, a = torch.rand(2, 24, 3, dtype=torch.float64), -torch.rand(3, dtype=torch.float64)
    state, want = torch.zeros(2, 3, 4, 5, dtype=torch.float64), []
    for t in range(24):
        step = dt[:, t, :, None, None]
        state = (step * a[:, None, None]).exp() * state + step * x[:, t, :, :, None] * b[:, t, None, None, :]
        want.append((state * c[:, t, None, None, :]).sum(-1))
    torch.testing.assert_close(ssd(x, dt, a, b, c, 8), torch.stack(want, 1))


class Mixer(nn.Module):
    def __init__(self, d_model, d_state, chunk):
        super().__init__()
        d_inner = EXPAND * d_model
        nheads, conv_dim = d_inner // HEADDIM, d_inner + 2 * d_state
        self.sizes, self.chunk = (d_inner, d_state, nheads), chunk
        self.in_proj = nn.Linear(d_model, d_inner + conv_dim + nheads, bias=False)
        # Two dimensions, of one row: for channels that lie together only these have a fast path in PyTorch.
        self.conv1d = nn.Conv2d(conv_dim, conv_dim, (1, D_CONV), groups=conv_dim)
        dt = torch.logspace(-3, -1, nheads)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus gives dt
        self.A_log = nn.Parameter(torch.arange(1.0, nheads + 1).log())
        self.D = nn.Parameter(torch.ones(nheads))
        self.norm = nn.RMSNorm(d_inner, eps=1e-5)
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)

    def forward(self, hidden):
        d_inner, d_state, nheads = self.sizes
        batch, seqlen, _ = hidden.shape
        z, xbc, dt = self.in_proj(hidden).split([d_inner, d_inner + 2 * d_state, nheads], -1)
        xbc = F.pad(xbc, (0, 0, D_CONV - 1, 0)).mT[:, :, None]  # [B, channels, 1, L + 3]
        xbc = F.silu(self.conv1d(xbc)[:, :, 0].mT)
        x, b, c = xbc.split([d_inner, d_state, d_state], -1)
        x = x.reshape(batch, seqlen, nheads, HEADDIM)
        dt = F.softplus(dt + self.dt_bias)
        y = ssd(x, dt, -self.A_log.exp(), b, c, self.chunk) + self.D[:, None] * x
        return self.out_proj(self.norm(y.flatten(2) * F.silu(z)))


class Model(nn.Module):
    def __init__(self, vocab, d_model, layers, d_state, chunk):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, d_model)
        nn.init.normal_(self.embeddings.weight, std=0.02)
        self.norms = nn.ModuleList(nn.RMSNorm(d_model, eps=1e-5) for _ in range(layers))
        self.mixers = nn.ModuleList(Mixer(d_model, d_state, chunk) for _ in range(layers))
        self.norm_f = nn.RMSNorm(d_model, eps=1e-5)

    def forward(self, ids):
        hidden = self.embeddings(ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            hidden = hidden + mixer(norm(hidden))
        return self.norm_f(hidden) @ self.embeddings.weight.mT


def adamw(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options = {"steps": 10, "warmup": 2, "threads": 2, "batch": 8, "seq": 512}
    options |= {"d-model": 256, "layers": 4, "vocab": 1024, "d-state": 64, "chunk": 64}
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.seq % args.chunk != 0 or EXPAND * args.d_model % HEADDIM != 0:
        parser.error(f"--seq must be a multiple of --chunk, --d-model of {HEADDIM // EXPAND}")
    torch.set_num_threads(args.threads)
    check_ssd()
    torch.manual_seed(1)
    model = Model(args.vocab, args.d_model, args.layers, args.d_state, args.chunk)
    optimizer = adamw(model)
    before = resident()
    seconds, cpu_seconds, losses = [], [], []
    for _ in range(args.warmup + args.steps):
        ids = torch.randint(args.vocab, (args.batch, args.seq + 1))
        start, cpu_start = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        losses.append(loss.item())
    step = statistics.median(seconds[args.warmup :])
    print(json.dumps({
        "tokens_per_second": round(args.batch * args.seq / step, 1),
        "seconds_per_step": round(step, 4),
        "fastest_step": round(min(seconds[args.warmup :]), 4),
        "cpu_seconds_per_step": round(statistics.median(cpu_seconds[args.warmup :]), 4),
        "rss_before_mib": round(before, 1),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "loss_first": round(losses[0], 4),
        "loss_last": round(losses[-1], 4),
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        **vars(args),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
