"""`offload.activations` around plain modules: what leaves the device, what comes back, and when host memory is free
again."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unishard.config import Sharding
from unishard.contract.units import Unit
from unishard.engine.model import activation_checkpointing
from unishard.engine.model.activation_offload import store, units
from unishard.engine.model.units import find_blocks

CPU = torch.device("cpu")
WIDTH, ROWS = 64, 512
"""Activations of 128 KiB, which are large, between weights of 16."""


class Block(nn.Module):
    """Saves views of one storage, a mask that all blocks share, and small statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.both = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.rand(ROWS, WIDTH))

    def forward(self, x, mask=None):
        one, two = self.both(self.norm(x)).chunk(2, -1)
        change = self.out(one * functional.silu(two)) * self.table
        return x + (change if mask is None else change * mask)


class Stack(nn.Module):
    """Blocks, called as a subclass says."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask=mask)
        return x.square().mean()


class Watch:
    """What was copied: each storage, and the copy of it."""

    def __init__(self, monkeypatch):
        self.storages, self.copies, self.sizes = [], [], []
        real = store.ActivationStore.take

        def take(store, tensor):
            found = real(store, tensor)
            if not any(each() is found for each in self.copies):
                self.storages.append(weakref.ref(tensor.untyped_storage()))
                self.copies.append(weakref.ref(found))
                self.sizes.append(tensor.untyped_storage().nbytes())
            return found

        monkeypatch.setattr(store.ActivationStore, "take", take)

    @property
    def on_host(self):
        """Bytes of copies that are alive."""
        return sum(size for copy, size in zip(self.copies, self.sizes, strict=True) if copy() is not None)

    @property
    def back(self):
        """Bytes of copies that are on the device again."""
        alive = [(copy(), size) for copy, size in zip(self.copies, self.sizes, strict=True)]
        return sum(size for copy, size in alive if copy is not None and copy.device is not None)

    @property
    def left(self):
        """Bytes of what was copied and is on the device all the same."""
        return sum(size for each, size in zip(self.storages, self.sizes, strict=True) if each() is not None)


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def built(kind=Stack, *, recomputed="none", offloaded=True):
    torch.manual_seed(0)
    model = kind()
    found = activation_checkpointing.find(model, recomputed, Sharding())
    activation_checkpointing.apply(found, selective=False)
    if offloaded:
        units.apply(units.find(model, "cpu", Sharding(), found), CPU, pin_memory=True)
    return model


def inputs(requires_grad=False):
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH, requires_grad=requires_grad)


def gradients(model, *arguments, **named):
    model(*arguments, **named).backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_equal_bits(found, wanted):
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_have_the_bits_of_those_without(recomputed, masked):
    mask = torch.rand(ROWS, WIDTH).round() if masked else None
    wanted = gradients(built(recomputed=recomputed, offloaded=False), inputs(), mask=mask)
    assert_equal_bits(gradients(built(recomputed=recomputed), inputs(), mask=mask), wanted)


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_activations_lie_on_the_host_between_forward_and_backward(watch, recomputed):
    model = built(recomputed=recomputed)
    loss = model(inputs())
    each = watch.on_host // len(model.blocks)
    assert each >= (4 if recomputed == "none" else 1) * 4 * ROWS * WIDTH  # the input, and 3 more
    assert watch.left <= 2 * each
    assert watch.back == 0
    loss.backward()
    assert (watch.on_host, watch.back) == (0, 0)


def test_two_units_are_on_the_device_in_backward(watch):
    model = built()
    seen = []
    for block in model.blocks:
        block.out.weight.register_post_accumulate_grad_hook(lambda _: seen.append(watch.back))
    loss = model(inputs())
    whole = watch.on_host
    loss.backward()
    assert len(seen) == len(model.blocks)
    assert max(seen) <= whole // 2 < whole * 3 // 4
    assert max(seen[:-1]) > whole // 4  # the one before is on its way


def test_weights_and_buffers_never_leave(watch):
    model = built()
    loss = model(inputs())
    kept = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    assert watch.sizes
    assert not kept & {each().data_ptr() for each in watch.storages if each() is not None}
    assert len(watch.sizes) == 5 * len(model.blocks)  # the input, the norm's and those of the products, once each
    loss.backward()


class Passing(Stack):
    """A parameter of the model is passed to each block."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(ROWS, WIDTH))

    def forward(self, x):
        return super().forward(x, mask=self.scale.view(ROWS, WIDTH))


def test_a_weight_that_is_passed_stays(watch):
    wanted = gradients(built(Passing, offloaded=False), inputs())
    model = built(Passing)
    model(inputs())
    assert model.scale.untyped_storage().data_ptr() not in {each().data_ptr() for each in watch.storages if each()}
    assert_equal_bits(gradients(model, inputs()), wanted)


def test_what_blocks_share_is_copied_once(watch):
    model = built()
    loss = model(inputs(), mask=torch.rand(ROWS, WIDTH))
    assert len(watch.sizes) == 5 * len(model.blocks) + 1
    loss.backward()


def test_what_is_small_stays(watch):
    loss = built()(inputs()[:1].expand(ROWS, WIDTH))
    assert min(watch.sizes) > units.SMALL
    loss.backward()


class Slicing(Stack):
    """The first block takes a row of a data set."""

    def __init__(self):
        super().__init__(1)
        self.blocks.append(Block())

    def forward(self, x):
        hidden = self.blocks[0](x[1])
        return self.blocks[1](hidden).square().mean()


def test_a_sample_does_not_move_its_data_set(watch):
    data = torch.randn(64, ROWS, WIDTH)
    loss = built(Slicing)(data)
    assert max(watch.sizes) < data.nbytes
    loss.backward()


def test_evaluation_copies_nothing(watch):
    with torch.no_grad():
        built()(inputs())
    assert watch.sizes == []


def test_an_abandoned_graph_leaves_no_host_memory(watch):
    model = built()
    loss = model(inputs())
    assert watch.on_host
    del loss
    gc.collect()
    assert watch.on_host == 0


def test_a_graph_may_run_twice(watch):
    plain, model = built(offloaded=False), built()
    for each in (plain, model):
        loss = each(inputs())
        loss.backward(retain_graph=True)
        assert each is plain or watch.back <= watch.on_host // 2
        loss.backward()
    assert_equal_bits([each.grad for each in model.parameters()], [each.grad for each in plain.parameters()])
    del loss
    assert watch.on_host == 0


def test_a_gradient_has_a_gradient():
    found = []
    for offloaded in (False, True):
        x = inputs(requires_grad=True)
        (first,) = torch.autograd.grad(built(offloaded=offloaded)(x), x, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), x)])
    assert_equal_bits(*found)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (None, None)])
def test_several_forwards_before_a_backward(watch, order):
    """In the order of their forwards, in the opposite one, and of their sum."""
    plain, model = built(offloaded=False), built()
    for each in (plain, model):
        losses = [each(inputs()), each(2 * inputs())]
        for which in order if None not in order else ():
            losses[which].backward()
        if None in order:
            sum(losses).backward()
    assert_equal_bits([each.grad for each in model.parameters()], [each.grad for each in plain.parameters()])
    del losses
    assert watch.on_host == 0


def test_a_buffer_that_is_filled_anew_has_another_copy():
    found = []
    for offloaded in (False, True):
        model, x = built(offloaded=offloaded), inputs()
        kept = model(x)
        with torch.no_grad():
            x.mul_(3)
        found.append(gradients(model, x))
        assert kept.item() > 0
    assert_equal_bits(*found)


class Writing(Stack):
    """Writes to what a block has saved, right behind it."""

    def forward(self, x):
        hidden = self.blocks[0](x)
        hidden = 2 * self.blocks[1](hidden)
        saved = self.blocks[2](hidden)
        hidden.add_(1)  # the input of the block before
        return self.blocks[3](saved).square().mean()


def test_what_is_written_while_it_is_copied_is_an_error_as_in_torch():
    for offloaded in (False, True):
        loss = built(Writing, offloaded=offloaded)(inputs())
        with pytest.raises(RuntimeError, match="needed for gradient computation has been modified by an inplace op"):
            loss.backward()


def test_a_weight_that_is_written_before_backward_is_an_error_as_in_torch():
    for offloaded in (False, True):
        model = built(offloaded=offloaded)
        loss = model(inputs())
        with torch.no_grad():
            model.blocks[1].out.weight.add_(1)
        with pytest.raises(RuntimeError, match="needed for gradient computation has been modified by an inplace op"):
            loss.backward()


def test_an_input_that_is_passed_by_name_leaves_too(watch):
    class Named(Stack):
        def forward(self, x):
            for block in self.blocks:
                x = block(x=x)
            return x.square().mean()

    loss = built(Named, recomputed="full")(inputs())
    assert len(watch.sizes) == 4
    loss.backward()


def test_modules_that_recompute_around_blocks_are_taken_whole():
    model = nn.ModuleList(Stack() for _ in range(2))
    found = [Unit(name, module) for name, module in model.named_children()]
    assert {unit.name for unit in units.find(model, "cpu", Sharding(units=["Block"]), found)} == {"0", "1"}
    assert len(units.find(model, "cpu", Sharding(units=["Block"]), [])) == 8


def test_a_block_that_recomputes_a_part_of_itself():
    class Part(Block):
        def forward(self, x, mask=None):
            return checkpoint(super().forward, x, mask, use_reentrant=False)

    class Parts(Stack):
        def __init__(self):
            super().__init__(0)
            self.blocks = nn.ModuleList(Part() for _ in range(3))

    assert_equal_bits(gradients(built(Parts), inputs()), gradients(built(Parts, offloaded=False), inputs()))


def test_a_copy_of_the_model_has_its_own_host_memory(watch):
    model = built()
    clone = copy.deepcopy(model)
    assert_equal_bits(gradients(clone, inputs()), gradients(model, inputs()))
    stores = {id(each.blocks[0].forward.args[2].copies) for each in (model, clone)}
    assert len(stores) == 2
    assert len({id(block.forward.args[2]) for block in clone.blocks}) == 1


def test_blocks_are_those_of_recomputation_and_compilation():
    model = Stack()
    found = units.find(model, "cpu", Sharding(), [])
    assert [unit.name for unit in found] == [unit.name for unit in find_blocks(model, Sharding(), "")]
    assert units.find(model, "none", Sharding(), []) == []
