"""Blocks: memory for parameters, laid out as they are."""

from __future__ import annotations

import torch
from torch import nn

from penstock.optim.blocks import Layout, copy, point, take


def inside(flat, *cuts):
    """Return parameters that are parts of one storage."""
    return [nn.Parameter(flat.data[first:last]) for first, last in cuts]


def test_parameters_that_fill_one_storage_make_one_block():
    """cuDNN requires the weights of a recurrent layer to be contiguous."""
    parameters = [*inside(torch.arange(10.0), (0, 4), (4, 10)), nn.Parameter(torch.zeros(3))]
    layout = Layout(parameters)
    assert layout.groups == [[0, 1], [2]]
    (block, other) = [layout.new_block(group) for group in range(2)]
    assert [tensor.storage_offset() for tensor in block.tensors] == [0, 4]
    assert block.flat.shape == (10,)
    copy([block.flat, other.flat], [present.flat for present in layout.current_blocks()])
    assert all(map(torch.equal, layout.tensors([block, other]), parameters))


def test_parameters_far_apart_in_one_storage_make_blocks_of_their_own():
    """The memory between them contains no weights and should not be copied."""
    layout = Layout(inside(torch.arange(100.0), (0, 4), (90, 100)))
    assert layout.groups == [[0], [1]]
    assert [layout.new_block(group).flat.numel() for group in range(2)] == [4, 10]


def test_parameters_of_different_types_in_one_storage_make_blocks_of_their_own():
    """Elements of a block have one size."""
    memory = torch.zeros(16, dtype=torch.uint8)
    single = nn.Parameter(memory[:8].view(torch.float32))
    half = nn.Parameter(memory[8:].view(torch.float16))
    layout = Layout([single, half])
    assert layout.groups == [[0], [1]]
    blocks = [layout.new_block(group) for group in range(2)]
    assert [block.flat.dtype for block in blocks] == [torch.float32, torch.float16]
    assert [value.numel() for value in layout.tensors(blocks)] == [2, 4]


def test_parameters_that_are_one_memory_stay_so():
    """Two parameters tied by hand: an update of one changes the other, as in plain PyTorch."""
    parameters = inside(torch.zeros(4), (0, 4), (0, 4))
    layout = Layout(parameters)
    assert layout.groups == [[0, 1]]
    block = layout.new_block(0)
    point(parameters, layout.tensors([block]))
    with torch.no_grad():
        parameters[0].fill_(3)
    assert parameters[1].tolist() == [3] * 4


def test_strides_and_empty_tensors_are_kept():
    """Transposed, channels last, and without elements."""
    tensors = [
        torch.randn(3, 5).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.empty(0, 3),
        torch.empty(3, 0),
        torch.tensor(2.0),
    ]
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    layout = Layout(parameters)
    blocks = [layout.new_block(group) for group in range(len(layout.groups))]
    copy([block.flat for block in blocks], [block.flat for block in layout.current_blocks()])
    for value, parameter in zip(layout.tensors(blocks), parameters, strict=True):
        assert value.stride() == parameter.stride()
        assert torch.equal(value, parameter)


def test_pointing_is_not_a_change_to_autograd_but_graphs_that_saved_a_parameter_whole_see_it():
    """The property on which versions.py depends: views in a graph keep the old memory, the
    parameter itself has the new memory.
    """
    weight = nn.Parameter(torch.full((2, 2), 2.0))
    inputs = torch.ones(2, 2, requires_grad=True)
    version = weight._version
    whole, view = inputs * weight, inputs @ weight.t()
    point([weight], [torch.full((2, 2), 5.0)])
    assert weight._version == version
    whole.sum().backward()
    assert inputs.grad.tolist() == [[5, 5], [5, 5]]
    inputs.grad = None
    view.sum().backward()
    assert inputs.grad.tolist() == [[4, 4], [4, 4]]


def test_a_parameter_can_be_pointed_to_another_part_of_its_memory():
    """Versions may lie side by side."""
    memory = torch.arange(4.0)
    weight = nn.Parameter(memory[:2])
    point([weight], [memory[2:]])
    assert weight.tolist() == [2, 3]


def test_a_step_that_set_data_anew_is_taken_back_into_the_old_memory():
    """Some optimizers assign a new tensor to `.data`."""
    weight = nn.Parameter(torch.zeros(3))
    place = torch.zeros(3)
    weight.data = place
    weight.data = weight.data + 1
    take([weight], [place])
    assert place.tolist() == [1, 1, 1]
    assert weight.data_ptr() == place.data_ptr()


def test_a_new_block_is_where_its_parameters_are():
    """A stage is on one device, or on several."""
    layout = Layout([nn.Parameter(torch.empty(2, device="meta")), nn.Parameter(torch.ones(2))])
    devices = [layout.new_block(group).flat.device.type for group in range(2)]
    assert devices == ["meta", "cpu"]


def test_parameters_without_memory_are_blocks_of_their_own():
    """They have a common address, 0, and no common memory."""
    layout = Layout([nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 3))])
    assert layout.groups == [[0], [1]]


def test_blocks_are_found_in_any_order_of_their_parameters():
    """Of two storages in turn, and from the end of a storage to its beginning."""
    (tail, head), (other,) = (
        inside(torch.arange(10.0), (4, 10), (0, 4)),
        inside(torch.ones(3), (0, 3)),
    )
    layout = Layout([tail, other, head])
    assert layout.groups == [[0, 2], [1]]
    blocks = [layout.new_block(group) for group in range(2)]
    assert blocks[0].flat.shape == (10,)
    copy([block.flat for block in blocks], [block.flat for block in layout.current_blocks()])
    assert blocks[0].flat.tolist() == list(range(10))
    assert all(map(torch.equal, layout.tensors(blocks), [tail, other, head]))


def test_a_parameter_with_gaps_has_a_block_with_gaps():
    """Such as some columns of a matrix; the block ends at its last element."""
    parameter = nn.Parameter(torch.arange(24.0).reshape(4, 6)[:, 1:3])
    layout = Layout([parameter])
    (block,) = layout.current_blocks()
    assert (block.flat.numel(), block.flat[0].item(), block.flat[-1].item()) == (20, 1.0, 20.0)
    new = layout.new_block(0)
    copy([new.flat], [block.flat])
    (values,) = layout.tensors([new])
    assert torch.equal(values, parameter)
    assert values.stride() == parameter.stride()


def test_types_of_unlike_sizes_that_seem_contiguous_are_not_one_block():
    """Offsets are counted in elements: 2 to 4 of float32 lie behind 0 to 2 of float16."""
    memory = torch.zeros(16, dtype=torch.uint8)
    half = nn.Parameter(memory[:4].view(torch.float16))
    single = nn.Parameter(memory[8:].view(torch.float32))
    layout = Layout([half, single])
    assert layout.groups == [[0], [1]]
    assert [layout.new_block(group).flat.dtype for group in range(2)] == [
        torch.float16,
        torch.float32,
    ]
