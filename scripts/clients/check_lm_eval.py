"""lm-eval's `local-completions` on a task made of the corpus: the numbers of `boostr eval`."""

import json
import lzma
import os
import random
import subprocess
from importlib.metadata import version
from pathlib import Path

from checks import MODEL, URL, check, run

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ["WORK"])
TASK = """\
task: corpus_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list:
  - metric: acc
"""


def questions(count):
    """Contexts of the corpus, each with the words that follow it and two that do not."""
    words = lzma.open(ROOT / "data/corpus/valid.txt.xz", "rt").read(60_000).split()
    rng = random.Random(1)
    ends = [rng.randrange(40, len(words) - 10) for _ in range(3 * count)]
    ends = [ends[i : i + 3] for i in range(0, len(ends), 3)]
    for right, *wrong in ends:
        choices = [" ".join(words[end : end + 4]) for end in (right, *wrong)]
        yield {"context": " ".join(words[right - 30 : right]), "choices": choices}


def of_boostr(pairs):
    """What `boostr eval` says of pairs of one context: the first is the right one."""
    path = WORK / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    command = [os.environ["BOOSTR"], "eval", "--data", str(path), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@check("log-likelihoods within 1e-3 of `boostr eval`, and the same accuracy")
def _():
    import lm_eval
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    asked = list(questions(12))
    data = WORK / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in asked))
    (WORK / "tasks").mkdir()
    (WORK / "tasks/corpus_choice.yaml").write_text(TASK.format(data=data))
    folder = ROOT / "models/default"
    args = f"model={MODEL},base_url={URL}/v1/completions,tokenizer={folder},num_concurrent=1,max_retries=1"
    found = lm_eval.simple_evaluate(
        model="local-completions", model_args=args, tasks=["corpus_choice"], log_samples=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(WORK / "tasks")),
    )
    samples = sorted(found["samples"]["corpus_choice"], key=lambda sample: sample["doc_id"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs, worst = [], 0.0
    for question, sample in zip(asked, samples, strict=True):
        for choice, reply in zip(question["choices"], sample["resps"], strict=True):
            pair = {"context": question["context"], "continuation": f" {choice}"}
            pairs.append(pair)
            tokens = len(tokenizer.encode(pair["continuation"]))
            nats = of_boostr([pair])["nats_per_token"] * tokens
            given = float(reply[0][0] if isinstance(reply[0], (list, tuple)) else reply[0])
            worst = max(worst, abs(nats + given))
    assert worst < 1e-3, f"they differ by {worst}"
    accuracy = found["results"]["corpus_choice"]["acc,none"]
    expected = of_boostr(pairs)["choice_accuracy"]
    assert abs(accuracy - expected) < 1e-9, (accuracy, expected)


run(f"lm-eval {version('lm-eval')}")
