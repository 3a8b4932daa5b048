from __future__ import annotations

from pathlib import Path

from running import run

import unishard


def test_it_asks_nothing_and_writes_a_config_that_loads(config: Path) -> None:
    result = run("init", "-o", "c.yaml")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "c.yaml: written\nnext: unishard check c.yaml\n", "")
    cfg = unishard.load(config)
    assert (cfg.backend, cfg.sharding.strategy, cfg.precision.compute) == ("fsdp", "full_shard", "bf16")
    for backend in unishard.available():
        unishard.translate(cfg, backend=backend).check(strict=True)


def test_each_field_stands_below_what_it_is_and_what_it_can_be(config: Path) -> None:
    run("init", "-o", "c.yaml")
    lines = config.read_text().splitlines()
    assert "  # Samples in one forward on one rank.\n  micro_batch_size: 1" in config.read_text()
    assert lines[lines.index("  compute: bf16") - 1].endswith(" One of fp32, bf16, fp16.")
    fields = [number for number, line in enumerate(lines) if line and "#" not in line]
    assert all("#" in lines[number - 1] for number in fields)
    assert max(map(len, lines)) <= 120


def test_what_is_set_stands_there_and_what_it_makes_useless_does_not(config: Path) -> None:
    changes = ["scheduler=cosine", "scheduler.total_steps=50", "optimizer.lr=1e-4", "backend=deepspeed", "sharding=ddp"]
    result = run("init", "-o", "c.yaml", *(word for change in changes for word in ("--set", change)))
    assert result.exit_code == 0, result.stderr
    cfg = unishard.load(config)
    assert (cfg.scheduler.name, cfg.scheduler.total_steps, cfg.optimizer.lr) == ("cosine", 50, 1e-4)
    assert (cfg.backend, cfg.sharding.strategy) == ("deepspeed", "no_shard")
    run("init", "-o", "c.yaml", "--force", "--set", "scheduler.name=inverse_sqrt", "--set", "optimizer.name=sgd")
    assert "total_steps" not in config.read_text()


def test_a_file_that_is_there_stays_unless_forced(config: Path) -> None:
    config.write_text("mine")
    result = run("init", "-o", "c.yaml")
    assert (result.exit_code, config.read_text()) == (1, "mine")
    assert result.stderr == "c.yaml: exists; name another file with -o, or overwrite it with --force\n"
    assert run("init", "--force", "-o", "c.yaml").exit_code == 0
    assert unishard.load(config).backend == "fsdp"


def test_what_the_engine_cannot_have_and_what_is_missing_write_nothing(config: Path) -> None:
    for change, said in {
        "precision.accumulate=bf16": "override: precision.accumulate: 'bf16' is not supported by fsdp: ",
        "scheduler=cosine": "override: scheduler.total_steps: is required by a cosine schedule; write the number",
    }.items():
        result = run("init", "-o", "c.yaml", "--set", change)
        assert (result.exit_code, config.exists()) == (1, False)
        assert result.stderr.startswith(said)
