"""Translates every config in a folder to every format and both engines: `python tests/formats/corpus_check.py DIR`.

Each file is read or gets one `ConfigError`; nothing else may be raised, no key may be missing from the report. A file of
TrainingArguments that leaves its engine to a launcher must be refused, and is then checked as plain data parallelism.
A file in its own format is itself, and what it leaves to its tool has the same fit where it says so. What is refused must
be refused for one of the causes below. Without the keys that are not supported, every file that can be
read translates to every format, and the installed tools read in each translation what it says. Prints the refusals by
cause, and the time.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from accounting import WRITTEN, changed_fits, faults_of, spelled_out, unlike_itself

from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats import Item, Outcome, catalog, read, translate
from unishard.formats.advice.remedies import remedy
from unishard.formats.beside.engine_choice import PLAIN, RECIPES, needs_engine
from unishard.formats.files.source import Source
from unishard.formats.verify import verify

ENGINES = ("fsdp", "deepspeed")
LEAST_SHARE = 0.97
COUNTED = ("deepspeed", "accelerate")
"""Formats whose files must translate to both engines."""


class Cause(NamedTuple):
    """A feature that neither engine has, or that the file's own tool refuses."""

    pattern: str
    """Of the key and the reason of its refusal."""
    source: str
    """Where one can look that up."""


CAUSES: Mapping[str, Cause] = {
    "the file's own tool refuses it too: a key that it does not know": Cause(
        r"^\S+: (DeepSpeed 0\.19\.8|Accelerate 1\.15\.0|Lightning 2\.6\.6) does not know this key"
        r"( beside class_path)?; (remove it$|did you mean '\S+'\?$|write it below init_args$)",
        "DeepSpeed 0.19.8, runtime/config_utils.py (extra fields are forbidden); Accelerate 1.15.0, "
        "commands/config/config_args.py; Lightning 2.6.6, pytorch/cli.py (jsonargparse)",
    ),
    "the file's own tool refuses it too: keys that exclude each other or are missing": Cause(
        r"^(deepspeed_config\.\S+|mixed_precision): Accelerate 1\.15\.0 refuses this beside deepspeed_config_file"
        r"|^\S+: Accelerate 1\.15\.0 refuses a file with(out)? "
        r"|^distributed_type: is missing, and Accelerate 1\.15\.0 needs it"
        r"|^parallelism_config\.\S+: makes \d+ ranks of the \d+ that there are"
        r"|^deepspeed_config: must be a mapping of keys to values, got '",
        "Accelerate 1.15.0, utils/dataclasses.py and commands/config/config_args.py",
    ),
    "the file's own tool refuses it too: a class that it cannot find": Cause(
        r"optimizer\.type: must be Adam, .*, got '[A-Za-z_]+(\.[A-Za-z_]+)+';",
        "DeepSpeed 0.19.8, runtime/engine.py: getattr(torch.optim, name)",
    ),
    "was removed in DeepSpeed 0.19.8": Cause(
        r"^\S+: (\w+ sends compressed gradients, and )?was removed in DeepSpeed 0\.19\.8[ ;]",
        "DeepSpeed 0.19.8, runtime/config.py: _REMOVED_TOP_LEVEL_CONFIG_KEYS; DeepSpeed issue 8489",
    ),
    "the file's own tool refuses it too: an argument or a strategy of Lightning 1": Cause(
        r"^\S+: (must be a strategy that is supported: )?Lightning 2 (has removed|has renamed|no longer takes)",
        "Lightning 2.6.6, pytorch/trainer/trainer.py and pytorch/strategies",
    ),
    "a class that Hydra builds, or files that it adds": Cause(
        r"^\S+: (_target_ of Hydra is not read|Hydra adds what other files say)",
        "LightningCLI reads class_path and init_args, never _target_ and defaults (Lightning 2.6.6, pytorch/cli.py)",
    ),
    "an optimizer that shards do not see whole (LAMB)": Cause(
        r"optimizer\.type: \S+ needs the norm of each whole tensor, which is sharded",
        "You et al. 2019 (LAMB), section 3: a norm for each layer; FSDP2 and ZeRO update shards",
    ),
    "an optimizer of torch that the config has no name for": Cause(
        r"optimizer\.type: must be Adam, .*, got "
        r"'(RMSprop|Adadelta|Adamax|NAdam|RAdam|ASGD|Rprop|Adafactor|SparseAdam|LBFGS)';",
        "torch 2.13, torch.optim; unishard.prepare(optimizer=...) takes any",
    ),
    "training in files (NVMe)": Cause(
        r"(device|nvme_path): (PyTorch has no offload to files|DeepSpeed 0\.19\.8 makes other updates with torch's "
        r"optimizers in files)",
        "torch 2.13, distributed/fsdp: CPUOffloadPolicy is the only one; DeepSpeed 0.19.8, runtime/zero/stage3.py",
    ),
    "parameters on the host without the optimizer": Cause(
        r"offload_param\S*: FSDP2's sharded parameters are the fp32 masters",
        "torch 2.13, distributed/fsdp: the sharded parameters are the fp32 masters",
    ),
    "an offloaded optimizer without fp32 master weights": Cause(
        r"^pure_bf16: needs DeepSpeedCPUAdam",
        "DeepSpeed 0.19.8, runtime/engine.py: bf16_master_weights_and_grads with offload_optimizer needs "
        "DeepSpeedCPUAdam",
    ),
    "gradients that add up in another format than the parameters'": Cause(
        r"grad_accum_dtype: FSDP2 keeps a gradient in the dtype of its parameter",
        "torch 2.13, distributed/fsdp/_fully_shard: a gradient has its parameter's dtype",
    ),
    "other parallelism than over data": Cause(
        r"^\S+: (splits ranks in other ways than data parallelism|only data parallelism is supported, not \w+ "
        r"parallelism)"
        r"|^distributed_type: Megatron-LM's tensor and pipeline parallelism"
        r"|^\S+: (\w+ )?parallelism( within a model)? is not supported",
        "sharding over data is the scope of both engines here (docs/sharding.md)",
    ),
    "data efficiency, curricula, random-LTD": Cause(
        r"^(\S+\.)?data_efficiency: drops tokens and samples", "DeepSpeed 0.19.8, runtime/data_pipeline"
    ),
    "ZenFlow": Cause(r"zero_optimization\.zenflow: ZenFlow delays", "DeepSpeed 0.19.8, runtime/zenflow"),
    "DeepSpeed's engine for generation": Cause(
        r"^(\S+\.)?hybrid_engine: replaces the engine by one for generation",
        "DeepSpeed 0.19.8, runtime/hybrid_engine.py",
    ),
    "fp8": Cause(
        r"^\S*fp8\S*: fp8 is not supported",
        "torch 2.13 and DeepSpeed 0.19.8 leave fp8 to Transformer Engine and torchao",
    ),
    "XLA": Cause(
        r"^\S+: (only PyTorch's own devices are supported, not XLA|training on TPUs is not supported)",
        "torch_xla, which neither engine runs on",
    ),
    "another launcher than the local machine's": Cause(
        r"^compute_environment: (must be LOCAL_MACHINE, got 'SLURM'|SageMaker jobs)",
        "Accelerate 1.15.0, utils/dataclasses.py: ComputeEnvironment",
    ),
}
"""What truly has no counterpart on an engine, and the key or the reason by which its refusal is known."""


@dataclass
class Tally:
    """What was found."""

    files: int = 0
    other_tools: Counter[str] = field(default_factory=Counter)
    """Files of tools that are not read, by tool."""
    helpless: list[str] = field(default_factory=list)
    """Those whose error does not say what to do."""
    unreadable: list[str] = field(default_factory=list)
    engine_open: int = 0
    """Files that are refused until something says their engine."""
    formats: Counter[str] = field(default_factory=Counter)
    translations: int = 0
    tracebacks: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    others: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    lost: list[str] = field(default_factory=list)
    """Translations that are refused even without the keys that are not supported."""
    verified: Counter[str] = field(default_factory=Counter)
    unreported: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    whole: Counter[str] = field(default_factory=Counter)
    plain_seconds: float = 0.0
    all_seconds: float = 0.0
    verify_seconds: float = 0.0

    def share(self) -> float:
        """Of the files that are counted, those that translate to both engines but for the declared causes."""
        counted = sum(self.formats[name] for name in COUNTED)
        return sum(self.whole[name] for name in COUNTED) / counted if counted else 1.0


def files_in(folder: Path) -> Iterator[Path]:
    """The configs of a folder, and of the folders in it."""
    yield from sorted(
        path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".csv", ".md", ".txt")
    )


def check(folder: Path) -> Tally:
    """Translate everything."""
    tally = Tally()
    for path in files_in(folder):
        tally.files += 1
        start = time.process_time()
        try:
            chosen = _engine_of(path, tally)
            outcome = translate(path, "unishard", overrides=chosen)
        except ConfigError as error:
            _note_refusal(str(error).partition("\n")[0], tally)
        except Exception:
            tally.tracebacks.append(f"{path}\n{traceback.format_exc(limit=-4)}")
        else:
            tally.plain_seconds += time.process_time() - start
            tally.formats[outcome.reading.format] += 1
            _judge_everywhere(path, outcome.reading.source, outcome.reading.format, chosen, tally)
            continue
        tally.plain_seconds += time.process_time() - start
    return tally


_OTHER_TOOL = re.compile(r": is a config of ([^(]+) \(.+\), which unishard does not read; (.*)")
_WHAT_TO_DO = re.compile(r"`unishard (init|translate --from \w+)`")


def _note_refusal(error: str, tally: Tally) -> None:
    """A file of a tool that is not read must say what to do with it."""
    named = _OTHER_TOOL.search(error)
    if named is None:
        tally.unreadable.append(error)
        return
    tally.other_tools[named[1]] += 1
    tally.helpless += [] if _WHAT_TO_DO.search(named[2]) else [error]


def _engine_of(path: Path, tally: Tally) -> tuple[str, ...]:
    """The overrides that decide the engine of a file which leaves it to a launcher; without them it must be refused."""
    if not needs_engine(read(path)):
        return ()
    tally.engine_open += 1
    try:
        translate(path, "unishard")
    except ConfigError as error:
        if "--with" in str(error):
            return (PLAIN,)
    tally.faults.append(f"{path.name} is translated or refused without a word about its engine")
    return (PLAIN,)


def _judge_everywhere(path: Path, source: Source, name: str, chosen: tuple[str, ...], tally: Tally) -> None:
    start = time.process_time()
    refused = [_refusals(path, source, name, "unishard", (*chosen, f"backend={engine}"), tally) for engine in ENGINES]
    tally.whole[name] += not any(refused)
    for target in WRITTEN:
        _refusals(path, source, name, target, () if target in RECIPES else chosen, tally)
    tally.all_seconds += time.process_time() - start


def _refusals(path: Path, source: Source, name: str, target: str, overrides: tuple[str, ...], tally: Tally) -> int:
    """How many keys are refused for no declared cause; notes everything else that is wrong."""
    tally.translations += 1
    on_engine = any(text.startswith("backend=") for text in overrides)
    what = f"{path.name} to {target} {' '.join(overrides)}"
    try:
        outcome = translate(source, target, from_=name, overrides=overrides)
    except Exception as error:  # the file was read before, so that not even a ConfigError has a reason
        tally.tracebacks.append(f"{what}: {error}\n{traceback.format_exc(limit=-4)}")
        return 1
    tally.faults += [f"{what}: {fault}" for fault in (*faults_of(outcome), *_faults_of_laws(outcome))]
    if outcome.of(Fit.UNSUPPORTED):
        dropped = remedy(source, target, from_=name, overrides=overrides, only_drop=True)
        tally.lost += [] if dropped else [what]
    elif not on_engine:
        _verify(outcome, what, tally)
    return sum(_cause(item.key, item.note, what, tally, counted=on_engine) is None for item in _refused(outcome))


def _faults_of_laws(outcome: Outcome) -> Iterator[str]:
    """What is wrong where a file is written for its own tool again, and where it says what its tool assumes."""
    reading, name = outcome.reading, outcome.reading.format
    refused = bool(outcome.of(Fit.UNSUPPORTED))
    if outcome.to == name and not refused and catalog.get(name).stays_in_place(reading.source):
        yield from (f"{key} is not as it was" for key in unlike_itself(outcome))
    try:
        spelled = translate(spelled_out(reading), outcome.to, from_=name, overrides=outcome.overrides)
    except ConfigError:
        return  # together they are not what the tool assumes
    yield from changed_fits(outcome, spelled)


def _verify(outcome: Outcome, what: str, tally: Tally) -> None:
    """Ask the tool that reads the translation what it makes of it."""
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = verify(outcome)
    tally.verify_seconds += time.process_time() - start
    tally.verified[outcome.to] += not (found.effective.missing or found.effective.refused)
    if found.effective.refused and not found.clean:
        tally.unreported[f"{found.effective.consumer} refuses it: {found.effective.refused}"].append(what)
    for row in found.unreported:
        tally.unreported[
            f"{row.field} is {row.source} in {outcome.reading.format} and {row.effective} in {outcome.to}"
        ].append(what)


def _refused(outcome: Outcome) -> list[Item]:
    return outcome.of(Fit.UNSUPPORTED)


def _cause(key: str, note: str, what: str, tally: Tally, *, counted: bool) -> str | None:
    cause = next((name for name, cause in CAUSES.items() if re.search(cause.pattern, f"{key}: {note}")), None)
    if counted and cause:
        tally.causes[cause] += 1
    elif counted:
        tally.others[f"{key}: {note}"].append(what)
    return cause


def report(tally: Tally) -> str:
    """All of it in words."""
    lines = [
        f"{tally.files} files, {sum(tally.formats.values())} read "
        f"({', '.join(f'{n} {name}' for name, n in tally.formats.most_common())})",
        f"{tally.other_tools.total()} of tools that are not read "
        f"({', '.join(f'{n} {name}' for name, n in tally.other_tools.most_common())})",
        f"{tally.engine_open} leave their engine to a launcher",
        f"{len(tally.unreadable)} refused whole:",
        *(f"  {what[-220:]}" for what in tally.unreadable),
        f"{tally.translations} translations, {len(tally.tracebacks)} exceptions, {len(tally.faults)} faults of reports",
        *(f"  {what}" for what in tally.tracebacks[:10]),
        *(f"  {what}" for what in tally.faults[:40]),
        "Refused because no counterpart exists, by cause (once for each engine):",
        *(f"  {count:5} {cause}" for cause, count in tally.causes.most_common()),
        "Refused for other reasons:",
        *(
            f"  {len(where):5} {what[:300]}   e.g. {where[0]}"
            for what, where in sorted(tally.others.items(), key=lambda x: -len(x[1]))[:60]
        ),
        f"{len(tally.lost)} are refused without the keys that are not supported:",
        *(f"  {what}" for what in tally.lost[:40]),
        f"Verified with their tools: {', '.join(f'{n} {name}' for name, n in tally.verified.most_common())}; "
        "differences unreported:",
        *(f"  {len(where):5} {what[:300]}   e.g. {where[0]}" for what, where in tally.unreported.items()),
        f"{tally.share():.1%} of the {' and '.join(COUNTED)} files translate to both engines but for those causes",
        f"{tally.plain_seconds:.2f} s of CPU to translate each file once, {tally.all_seconds:.2f} s for everything, "
        f"{tally.verify_seconds:.2f} s of it to verify",
    ]
    return "\n".join(lines)


def fit(tally: Tally) -> list[str]:
    """What must hold and does not."""
    wrong = []
    if not tally.files:
        wrong.append("the folder holds no files")
    if tally.helpless:
        wrong.append(f"{len(tally.helpless)} errors about files of tools that are not read do not say what to do")
    if tally.tracebacks:
        wrong.append(f"{len(tally.tracebacks)} exceptions")
    if tally.faults:
        wrong.append(f"{len(tally.faults)} keys or lines are not accounted for")
    if tally.lost:
        wrong.append(f"{len(tally.lost)} are refused even without the keys that are not supported")
    if tally.others:
        wrong.append(f"{len(tally.others)} refusals have no declared cause")
    if tally.unreported:
        wrong.append(f"{len(tally.unreported)} kinds of differences are not reported")
    if tally.share() < LEAST_SHARE:
        wrong.append(f"only {tally.share():.1%} translate to both engines, and {LEAST_SHARE:.0%} must")
    return wrong


def main() -> int:
    """Exit status 0 if all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    tally = check(parser.parse_args().folder)
    wrong = fit(tally)
    sys.stdout.write(report(tally) + "\n" + ("FAILED: " + "; ".join(wrong) if wrong else "passed") + "\n")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
