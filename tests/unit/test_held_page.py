"""Bytes of a parameter beside the plan's: the page made from what was counted."""

from benchmarks.held import page


def test_every_planned_figure_is_within_the_bound():
    far = {page.line_of(cell) for cell in page.MEASURED.kept()["cells"] if page.distance(cell) > page.BOUND}
    assert far == set()


def test_a_figure_says_what_is_on_the_device_and_what_in_host_memory():
    place = {"engine": "fsdp", "strategy": "full_shard", "offload": "optimizer", "precision": "fp32"}
    cell = place | {"held": 8.4, "device": 2.0, "host": 6.0}
    assert page.line_of(cell) == "fsdp full_shard optimizer fp32: 8.40 (2.00 + 6.00)"
    assert abs(page.distance(cell) - 0.4 / 8.4) < 1e-12
