"""Translates every config in a folder to every format and both engines: `python tests/formats/corpus_check.py DIR`.

Each file is read or gets one `ConfigError`; nothing else may be raised, no key may be missing from the report, and what is refused must
be refused for one of the causes below. Prints the refusals by cause, and the time.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from accounting import FORMATS, faults_of

from unishard.errors import ConfigError
from unishard.formats import Item, Outcome, translate
from unishard.formats.source import Source
from unishard.meanings import Verdict

ENGINES = ("fsdp", "deepspeed")
MOST_SECONDS = 10.0
LEAST_SHARE = 0.97
COUNTED = ("deepspeed", "accelerate")
"""Formats whose files must translate to both engines."""

CAUSES: Mapping[str, str] = {
    "the file's own tool refuses it too: a key that it does not know": r"does not know this key",
    "the file's own tool refuses it too: keys that exclude each other or are missing": (
        r"Accelerate 1\.15\.0 (refuses|needs)|^deepspeed_config: must be"
    ),
    "has left DeepSpeed 0.19.8": r"has left DeepSpeed",
    "an optimizer that no other engine has (LAMB, 1-bit Adam)": r"optimizer\.type: (must be an optimizer that the config has|Lamb )",
    "a schedule that the config has no shape for (OneCycle, LRRangeTest)": r"scheduler\.type: .*got '(OneCycle|LRRangeTest)'",
    "training in files (NVMe)": r"offload to files|through files",
    "parameters on the host without the optimizer": r"offload_param\S*: FSDP2's sharded parameters are the fp32 masters",
    "other parallelism than over data": r"parallelism|tensor_parallel|pipeline|sequence_parallel|Megatron|MEGATRON",
    "data efficiency, curricula, random-LTD": r"^data_efficiency",
    "ZenFlow": r"zenflow",
    "fp8": r"fp8",
    "XLA": r"XLA",
    "another launcher than the local machine's": r"^compute_environment: ",
}
"""What truly has no counterpart on an engine, and the key or the reason by which its refusal is known."""


@dataclass
class Tally:
    """What was found."""

    files: int = 0
    unreadable: list[str] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    translations: int = 0
    tracebacks: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    others: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    whole: Counter[str] = field(default_factory=Counter)
    plain_seconds: float = 0.0
    all_seconds: float = 0.0

    def share(self) -> float:
        """Of the files that are counted, those that translate to both engines but for the declared causes."""
        counted = sum(self.formats[name] for name in COUNTED)
        return sum(self.whole[name] for name in COUNTED) / counted if counted else 1.0


def files_in(folder: Path) -> Iterator[Path]:
    """The configs of a folder, and of the folders in it."""
    yield from sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".csv", ".md", ".txt"))


def check(folder: Path) -> Tally:
    """Translate everything."""
    tally = Tally()
    for path in files_in(folder):
        tally.files += 1
        start = time.process_time()
        try:
            outcome = translate(path, "unishard")
        except ConfigError as error:
            tally.unreadable.append(str(error).partition("\n")[0])
        except Exception:
            tally.tracebacks.append(f"{path}\n{traceback.format_exc(limit=-4)}")
        else:
            tally.plain_seconds += time.process_time() - start
            tally.formats[outcome.reading.format] += 1
            _judge_everywhere(path, outcome.reading.source, outcome.reading.format, tally)
            continue
        tally.plain_seconds += time.process_time() - start
    return tally


def _judge_everywhere(path: Path, source: Source, name: str, tally: Tally) -> None:
    start = time.process_time()
    refused = [_refusals(path, source, name, "unishard", (f"backend={engine}",), tally) for engine in ENGINES]
    tally.whole[name] += not any(refused)
    for target in FORMATS:
        _refusals(path, source, name, target, (), tally)
    tally.all_seconds += time.process_time() - start


def _refusals(path: Path, source: Source, name: str, target: str, overrides: tuple[str, ...], tally: Tally) -> int:
    """How many keys are refused for no declared cause; notes everything else that is wrong."""
    tally.translations += 1
    what = f"{path.name} to {target} {' '.join(overrides)}"
    try:
        outcome = translate(source, target, from_=name, overrides=overrides)
    except Exception as error:  # the file was read before, so that not even a ConfigError has a reason
        tally.tracebacks.append(f"{what}: {error}\n{traceback.format_exc(limit=-4)}")
        return 1
    tally.faults += [f"{what}: {fault}" for fault in faults_of(outcome)]
    return sum(_cause(item.key, item.note, what, tally, counted=bool(overrides)) is None for item in _refused(outcome))


def _refused(outcome: Outcome) -> list[Item]:
    return outcome.of(Verdict.REFUSED)


def _cause(key: str, note: str, what: str, tally: Tally, *, counted: bool) -> str | None:
    cause = next((cause for cause, pattern in CAUSES.items() if re.search(pattern, f"{key}: {note}")), None)
    if counted and cause:
        tally.causes[cause] += 1
    elif counted:
        tally.others[f"{key}: {note}"].append(what)
    return cause


def report(tally: Tally) -> str:
    """All of it in words."""
    lines = [
        f"{tally.files} files, {sum(tally.formats.values())} read ({', '.join(f'{n} {name}' for name, n in tally.formats.most_common())})",
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
        f"{tally.share():.1%} of the {' and '.join(COUNTED)} files translate to both engines but for those causes",
        f"{tally.plain_seconds:.2f} s of CPU to translate each file once, {tally.all_seconds:.2f} s for everything",
    ]
    return "\n".join(lines)


def verdict(tally: Tally) -> list[str]:
    """What must hold and does not."""
    wrong = []
    if not tally.files:
        wrong.append("the folder holds no files")
    if tally.tracebacks:
        wrong.append(f"{len(tally.tracebacks)} exceptions")
    if tally.faults:
        wrong.append(f"{len(tally.faults)} keys or lines are not accounted for")
    if tally.share() < LEAST_SHARE:
        wrong.append(f"only {tally.share():.1%} translate to both engines, and {LEAST_SHARE:.0%} must")
    if tally.plain_seconds > MOST_SECONDS:
        wrong.append(f"{tally.plain_seconds:.1f} s, and {MOST_SECONDS:.0f} s are allowed")
    return wrong


def main() -> int:
    """Exit status 0 if all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    tally = check(parser.parse_args().folder)
    wrong = verdict(tally)
    sys.stdout.write(report(tally) + "\n" + ("FAILED: " + "; ".join(wrong) if wrong else "passed") + "\n")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
