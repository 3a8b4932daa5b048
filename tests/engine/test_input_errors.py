"""An error of torch about the inputs of a forward names the module, the user's line and what it got."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unishard.engine.loop.forward_errors import explain_input


def told(model: nn.Module, given: Tensor) -> str:
    with pytest.raises((RuntimeError, IndexError)) as caught:
        model(given)
    return str(explain_input(caught.value, model))


class Words(nn.Module):
    """Looks up ids, and adds what it looks up at their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, 4), nn.Embedding(3, 4)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return found


@pytest.mark.parametrize(
    ("ids", "start"),
    [
        (
            [[1, 10]],
            "the forward of words (Embedding, test_input_errors.py:{} in forward) got the id 10, and has the ids from "
            "0 to 9; if",
        ),
        (
            [[1, -1]],
            "the forward of words (Embedding, test_input_errors.py:{} in forward) got the id -1, and has the ids from "
            "0 to 9; a",
        ),
        (
            [[1] * 5],
            "the forward of places (Embedding, test_input_errors.py:{} in forward) got the id 3, and has the ids from "
            "0 to 2; if",
        ),
    ],
)
def test_an_id_out_of_range(ids: list[list[int]], start: str) -> None:
    assert told(Words(), torch.tensor(ids)).startswith(start.format(Words.forward.__code__.co_firstlineno + 1))


def test_an_engine_that_was_imported_from_elsewhere_is_not_the_users_line() -> None:
    engine: dict[str, Any] = {"__name__": "unishard_other.adapter"}
    exec(compile("def forward(model, given):\n    return model(given)", "/elsewhere/adapter.py", "exec"), engine)
    with pytest.raises(RuntimeError) as caught:
        engine["forward"](nn.Linear(4, 4), torch.ones(4, 4, dtype=torch.float64))
    message = str(explain_input(caught.value, caught.traceback[-1].frame.f_locals["self"]))
    assert "test_input_errors.py" in message


@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 4), lambda: nn.Conv1d(4, 4, 1), lambda: nn.LayerNorm(4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_inputs_that_parameters_do_not_go_with(build: type[nn.Module], dtype: torch.dtype) -> None:
    message = told(nn.Sequential(build()), torch.ones(4, 4, dtype=dtype))
    assert message.startswith("the forward of 0 (")
    assert "test_input_errors.py" in message
    assert "cast such inputs to torch.float32" in message


def test_other_errors_stay_as_they_are() -> None:
    assert told(nn.Linear(4, 4), torch.ones(4, 5)) == "None"


def test_an_index_error_of_the_model_s_own() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[9]

    assert told(Own(), torch.ones(4)) == "None"
