#!/usr/bin/env python3
"""What boostr trains, read by transformers and PEFT; what PEFT saves, read by boostr.

    pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 safetensors==0.8.0
    python scripts/train_interop.py [--boostr target/release/boostr]

A Mamba-2 model is trained from text and compared with transformers: ids, logits, the loss of each next token, and what
`boostr eval` says. Then adapters, of that model and of every family in fixtures/models: those of `boostr tune` as PEFT
loads them, beside the model and merged into it, and those that PEFT saves as boostr loads them. Nothing may be missing
or left over. Prints a line for each comparison, and ends with 1 when one of them fails.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
# Of the largest logit: rounding of float32, in another order of sums.
MOST = 1e-4
# Targets of `boostr tune`, empty for those by default.
TARGETS = ["", "in_proj.x,in_proj.dt"]
# Originals that take the least initial step for a limit, in prompts alone.
UNLIMITED = {"nemotron_h", "zamba2"}
# Layers that PEFT adapts, in the families that have them.
PEFT_TARGETS = ["in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Checks:
    """Comparisons, printed as they are made."""

    def __init__(self):
        self.failed = 0

    def say(self, what, ok, found):
        self.failed += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {what}: {found}", flush=True)

    def close(self, what, got, want):
        error = (got - want).abs().max().item() / (1.0 + want.abs().max().item())
        self.say(what, math.isfinite(error) and error < MOST, f"at most {error:.1e} of the largest apart")


class Boostr:
    def __init__(self, program):
        self.program = program

    def __call__(self, *words):
        line = [str(self.program), *map(str, words)]
        done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
        if done.returncode:
            raise SystemExit(f"{' '.join(line)}: exit {done.returncode}\n{done.stderr}")
        return done.stdout

    def logits(self, model, ids, folder, *more):
        out = Path(folder) / "logits.safetensors"
        self("logits", model, "--tokens", ",".join(map(str, ids)), "--out", out, *more)
        return load_file(out)["logits"]


def load(folder):
    """The model in float32, and with the limits of steps that its file says: some originals have others."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    for module in model.modules():
        if hasattr(module, "time_step_limit") and model.config.model_type in UNLIMITED:
            module.time_step_limit = (0.0, math.inf)
    return model.float().eval()


@torch.no_grad()
def logits(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def losses(logits, ids):
    return F.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]), reduction="none")


def load_adapters(model, folder):
    """PEFT's model, and the tensors that it misses or has no place for."""
    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = True
    model = PeftModel(model, config)
    found = set_peft_model_state_dict(model, load_peft_weights(folder))
    missing = [name for name in found.missing_keys if "lora_" in name]
    return model.eval(), missing + list(found.unexpected_keys)


def whole_model(boostr, checks, folder, data, valid):
    """Trains a model, and compares it with transformers' reading of it."""
    run = folder / "run"
    boostr("train", "--data", data, "--out", run, "--preset", "tiny", "--steps", 40, "--lr", 3e-3, "--seed", 1)
    model, info = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32, output_loading_info=True)
    left = {key: sorted(value) for key, value in info.items() if value}
    checks.say("trained: every tensor is transformers' own", not left, left or "none missing, none left over")
    tokenizer = AutoTokenizer.from_pretrained(run)
    text = valid.read_text()
    ids = tokenizer(text)["input_ids"]
    own = [int(x) for x in boostr("tokenizer", "encode", run, "-f", valid).replace(",", " ").split()]
    checks.say("trained: ids", ids == own, f"{len(own)} ids, {len(ids)} by transformers")
    ids = ids[:512]
    want = logits(model.eval(), ids)
    got = boostr.logits(run, ids, folder)
    checks.close("trained: logits", got, want)
    checks.close("trained: losses", losses(got, ids), losses(want, ids))
    short = folder / "short.txt"
    short.write_text(tokenizer.decode(ids))
    told = json.loads(boostr("eval", run, "--data", short, "--json"))["nats_per_token"]
    ids = tokenizer(short.read_text())["input_ids"]
    mean = losses(logits(model, ids), ids).mean().item()
    checks.say("trained: boostr eval", abs(told - mean) < 1e-4, f"{told:.6f} nats, {mean:.6f} by transformers")
    return run


def adapters_of_boostr(boostr, checks, base, data, folder, targets):
    """Adapters of `boostr tune`, beside the model and merged, by boostr and PEFT."""
    what = f"{base.name}, boostr tune {'--targets ' + targets if targets else 'by default'}"
    tuned = folder / f"tuned-{base.name}-{targets.replace(',', '-')}"
    more = ["--targets", targets] if targets else []
    line = ["tune", base, "--data", data, "--out", tuned, "--lora", 4, "--steps", 8, "--lr", 1e-2, "--seed", 1]
    boostr(*line, "--batch-size", 2, "--seq-len", 64, *more)
    ids = list(range(3, 400, 7))
    plain = boostr.logits(base, ids, folder)
    beside = boostr.logits(base, ids, folder, "--adapter", tuned)
    checks.say(f"{what}: they change the model", (plain - beside).abs().max() > 1e-3, "yes")
    alone = boostr.logits(tuned, ids, folder)
    checks.say(f"{what}: their folder alone", torch.equal(alone, beside), "equal to the bit")
    merged = folder / f"merged-{tuned.name}"
    boostr("tune", base, "--merge", tuned, "--out", merged)
    checks.close(f"{what}: merged by boostr", boostr.logits(merged, ids, folder), beside)
    model, said = load_adapters(load(base), tuned)
    checks.say(f"{what}: PEFT finds all", not said, said or "none missing, none left over")
    want = logits(model, ids)
    checks.close(f"{what}: beside, by PEFT", beside, want)
    checks.close(f"{what}: losses by PEFT", losses(beside, ids), losses(want, ids))
    checks.close(f"{what}: merged by boostr, read by transformers", logits(load(merged), ids), want)


def adapters_of_peft(boostr, checks, base, folder):
    """Adapters that PEFT makes and saves, read by boostr."""
    torch.manual_seed(1)
    model = load(base)
    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    # Of a block that layers share PEFT has adapters for each layer, which may differ; boostr has one.
    is_shared = model.config.model_type == "zamba2"
    targets = ["in_proj"] if is_shared else sorted(names & set(PEFT_TARGETS))
    targets += ["shared_mlp.input_linear"] if "input_linear" in names else []
    for rslora in [False, True]:
        config = LoraConfig(r=3, lora_alpha=5, target_modules=targets, use_rslora=rslora, task_type="CAUSAL_LM")
        tuned = get_peft_model(load(base), config).eval()
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        saved = folder / f"peft-{base.name}-{rslora}"
        tuned.save_pretrained(saved)
        ids = list(range(3, 400, 7))
        what = f"{base.name}, PEFT's {'rank-stabilised ' if rslora else ''}adapters of {', '.join(targets)}"
        checks.close(what, boostr.logits(base, ids, folder, "--adapter", saved), logits(tuned, ids))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--boostr", type=Path, default=ROOT / "target/release/boostr")
    parser.add_argument("names", nargs="*", help="of fixtures/models; all by default")
    args = parser.parse_args()
    boostr, checks = Boostr(args.boostr.resolve()), Checks()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        data, valid = folder / "train.txt", folder / "valid.txt"
        data.write_text("".join((ROOT / name).read_text() for name in ["ARCHITECTURE.md", "README.md"]))
        valid.write_text((ROOT / "CONTRIBUTING.md").read_text().strip())
        run = whole_model(boostr, checks, folder, data, valid)
        for targets in TARGETS:
            adapters_of_boostr(boostr, checks, run, data, folder, targets)
        adapters_of_peft(boostr, checks, run, folder)
        names = args.names or sorted(path.name for path in (ROOT / "fixtures/models").iterdir())
        for base in (ROOT / "fixtures/models" / name for name in names):
            adapters_of_boostr(boostr, checks, base, data, folder, "")
            adapters_of_peft(boostr, checks, base, folder)
    print(f"{checks.failed} failed" if checks.failed else "all equal")
    sys.exit(checks.failed > 0)


if __name__ == "__main__":
    main()
