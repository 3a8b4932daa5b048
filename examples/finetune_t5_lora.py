"""Fine-tunes a T5 with LoRA adapters to name the sentiment of a sentence, sequence to sequence, on the engine that the
config names.

    torchrun --nproc-per-node 2 examples/finetune_t5_lora.py
    torchrun --nproc-per-node 2 examples/finetune_t5_lora.py --set backend=deepspeed
    python examples/finetune_t5_lora.py --model path/to/t5-small --data reviews.csv

Without --data it writes its own sentences, and without --model it builds a tiny T5 with random weights whose vocabulary
is the words of the training data. Adapters on a random base learn little, so its embeddings are trained too; of a model
that is given, only the adapters are. The generated sentences are easy (the adjective decides): their accuracy shows
that training works, and no more.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

import unishard

CONFIG = Path(__file__).parent.parent / "configs" / "t5_lora.yaml"
PREFIX = "sentiment: "
PAD, END, UNKNOWN = 0, 1, 2
"""As in T5's own vocabulary."""

Encode = Callable[[str], list[int]]


class Example(NamedTuple):
    """A sentence and the answer to it."""

    text: str
    label: str


def main() -> None:
    args = arguments()
    cfg = unishard.load(args.config, overrides=args.set)
    rank = unishard.Topology.from_environment().rank
    train, test = split(examples_of(args), args.test_part, seed=cfg.training.seed)

    torch.manual_seed(cfg.training.seed)
    model, encode = pretrained(args.model) if args.model else tiny([f"{PREFIX}{text} {label}" for text, label in train])
    lora = LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"], r=8, lora_alpha=32, lora_dropout=0.05)
    with warnings.catch_warnings():  # peft 0.21 asks transformers 5 by an old name
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(model, lora)
    if not args.model:
        model.get_input_embeddings().requires_grad_(True)

    lengths = {"length": args.max_length, "label_length": 1 + max(len(encode(label)) for _, label in (*train, *test))}
    steps = 0
    losses = []
    with unishard.prepare(model, cfg) as engine:
        loader = unishard.dataloader(tensors(train, encode, **lengths), cfg)
        window: list[torch.Tensor] = []
        while steps < args.steps:
            for batch in engine.batches(loader):
                loss = engine(**batch).loss
                engine.backward(loss)
                window.append(loss.detach())
                if engine.step().updated:
                    losses.append(engine.mean(torch.stack(window).mean()))
                    window, steps = [], steps + 1
                    if rank == 0 and steps % 20 == 0:
                        print(f"update {steps}: loss {losses[-1]:.4f}")
                    if steps == args.steps:
                        break
        accuracy = evaluate(engine, unishard.dataloader(tensors(test, encode, **lengths), cfg, shuffle=False))

    if rank == 0:
        share = max(sum(label == each for _, label in test) for each in {label for _, label in test}) / len(test)
        print(
            f"{cfg.backend}: loss {losses[0]:.4f} -> {losses[-1]:.4f} after {steps} updates; accuracy {accuracy:.1%} "
            f"on {len(test)} held-out sentences (always the most frequent answer: {share:.1%})"
        )
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(
                json.dumps({"losses": losses, "accuracy": accuracy, "chance": share}, indent=1), encoding="utf-8"
            )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune T5 with LoRA to name the sentiment of a sentence.")
    launched = "UNISHARD_CONFIG" in os.environ  # by `unishard launch`, whose config unishard.load() reads
    parser.add_argument("--config", type=Path, default=None if launched else CONFIG, help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field, such as backend=deepspeed"
    )
    parser.add_argument(
        "--model", help="folder (or name) of a pretrained T5 with its tokenizer; left out, a tiny one is built"
    )
    parser.add_argument(
        "--data", help=".csv or .jsonl file, folder that datasets saved, or name of a dataset; left out, generated"
    )
    parser.add_argument("--text", default="text", help="column of the sentences")
    parser.add_argument("--label", default="label", help="column of the answers")
    parser.add_argument(
        "--test-part", type=float, default=0.2, help="part of the data that is held out for the accuracy"
    )
    parser.add_argument("--max-length", type=int, default=64, help="longest sentence in tokens; the rest is cut off")
    parser.add_argument("--steps", type=int, default=100, help="number of updates")
    parser.add_argument("--out", type=Path, help="JSON file for losses and accuracy")
    args = parser.parse_args()
    if args.steps < 1 or not 0 < args.test_part < 1:
        parser.error("--steps must be at least 1, and --test-part between 0 and 1")
    return args


# -- data ------------------------------------------------------------------------------------------


def examples_of(args: argparse.Namespace) -> list[Example]:
    """What the user has, or what is generated; ends with a message that says what is wrong with it."""
    if args.data is None:
        return generated()
    path = Path(args.data)
    if path.suffix in (".csv", ".jsonl", ".json"):
        try:
            rows = read(path)
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise SystemExit(f"{path}: {error}") from None
    else:
        rows = from_datasets(args.data)
    if not rows:
        raise SystemExit(
            f"{args.data} holds no examples; it needs rows with the columns {args.text!r} and {args.label!r}"
        )
    for column, option in ((args.text, "--text"), (args.label, "--label")):
        for number, row in enumerate(rows, 1):
            if row.get(column) in (None, ""):
                raise SystemExit(
                    f"{args.data}: example {number} has nothing in column {column!r}; its columns are "
                    f"{', '.join(map(str, row))}; name another one with {option}"
                )
    return [Example(str(row[args.text]), str(row[args.label])) for row in rows]


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a CSV file with a header, or the objects of a file with one in each line."""
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            return list(csv.DictReader(file))
        rows = []
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number} is not JSON ({error.msg}); each line must be one object") from None
                if not isinstance(row, dict):
                    raise ValueError(
                        f"line {number} is no object but a {type(row).__name__}; each line must be one object"
                    )
                rows.append(row)
        return rows


def from_datasets(name: str) -> list[dict[str, Any]]:
    """The training part of a dataset of the `datasets` library, with the names of its classes."""
    try:
        import datasets
    except ImportError:
        raise SystemExit(
            f"{name} is no .csv or .jsonl file, and other data needs a package: pip install datasets"
        ) from None
    try:
        data = datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name, split="train")
    except (FileNotFoundError, ValueError, OSError) as error:
        raise SystemExit(f"{name} cannot be loaded by datasets: {error}") from None
    if isinstance(data, dict):
        data = data["train"]
    classes = {column: feature.names for column, feature in data.features.items() if hasattr(feature, "names")}
    return [
        {column: classes[column][value] if column in classes else value for column, value in row.items()}
        for row in data
    ]


SUBJECTS = (
    "the film",
    "the book",
    "this song",
    "her speech",
    "the meal",
    "our trip",
    "the new phone",
    "that lecture",
    "the hotel",
    "his idea",
)
VERBS = ("was", "seemed", "felt", "turned out", "is", "looked")
ADVERBS = ("", "really ", "quite ", "so ", "rather ")
ADJECTIVES = {
    "positive": ("good", "great", "lovely", "excellent", "brilliant", "pleasant", "charming", "superb"),
    "negative": ("bad", "awful", "boring", "terrible", "dreadful", "poor", "dull", "horrible"),
}


def generated(count: int = 1500) -> list[Example]:
    """Sentences with an adjective that decides, half of them positive; no sentence occurs twice."""
    every = [
        Example(f"{subject} {verb} {adverb}{adjective}", label)
        for label, adjectives in ADJECTIVES.items()
        for subject, verb, adverb, adjective in product(SUBJECTS, VERBS, ADVERBS, adjectives)
    ]
    return random.Random(0).sample(every, count)


def split(examples: list[Example], part: float, *, seed: int) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples."""
    held_out = max(1, round(part * len(examples)))
    if len(examples) - held_out < 1:
        raise SystemExit(f"{len(examples)} example is too few to train on some and hold out others; give at least 2")
    shuffled = random.Random(seed).sample(examples, len(examples))
    return shuffled[held_out:], shuffled[:held_out]


def tensors(examples: list[Example], encode: Encode, *, length: int, label_length: int) -> list[dict[str, Any]]:
    """Samples of one length: `input_ids`, `attention_mask` and `labels` (-100 where there is none)."""
    samples = []
    for text, label in examples:
        ids = [*encode(PREFIX + text)[: length - 1], END]
        answer = [*encode(label), END]
        samples.append(
            {
                "input_ids": torch.tensor(ids + [PAD] * (length - len(ids))),
                "attention_mask": torch.tensor([1] * len(ids) + [0] * (length - len(ids))),
                "labels": torch.tensor(answer + [-100] * (label_length - len(answer))),
            }
        )
    return samples


# -- model -----------------------------------------------------------------------------------------


def pretrained(name: str) -> tuple[T5ForConditionalGeneration, Encode]:
    """A T5 and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    return T5ForConditionalGeneration.from_pretrained(name), lambda text: tokenizer.encode(
        text, add_special_tokens=False
    )


def tiny(texts: list[str]) -> tuple[T5ForConditionalGeneration, Encode]:
    """A T5 of 0.2 million parameters, and the words of some texts as its vocabulary."""
    words = {
        word: number
        for number, word in enumerate(sorted({word for text in texts for word in text.split()}), UNKNOWN + 1)
    }
    config = T5Config(
        vocab_size=UNKNOWN + 1 + len(words),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=PAD,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config), lambda text: [words.get(word, UNKNOWN) for word in text.split()]


# -- evaluation ------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(engine: unishard.Engine, loader: Any) -> float:
    """Part of the examples that the model answers word for word.

    One forward with the right answer as the decoder's input is enough: where each token is the likeliest one after
    those before it, greedy generation would give this answer, and else another one.
    """
    right: list[torch.Tensor] = []
    engine.eval()
    for batch in engine.batches(loader):
        guessed, wanted = engine(**batch).logits.argmax(-1), batch["labels"]
        right.append(engine.gather_for_metrics(((guessed == wanted) | (wanted == -100)).all(-1)))
    engine.train()
    return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    main()
