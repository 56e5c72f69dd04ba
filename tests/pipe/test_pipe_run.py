"""`Pipe` in somebody's autograd graph: gradients as the plain model has them, whatever is asked of
the graph.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.pipe.layers import Holder
from torch import nn

from penstock.modules.side_loss import side_loss
from penstock.pipe.pipe import Pipe

MODES = ("never", "except_last", "always")


class Split(nn.Module):
    """Two outputs of one input, one of them integers."""

    def forward(self, x):
        """Return them."""
        return x.sin(), x.argmax(1)


class Merge(nn.Module):
    """Uses what is a float of its input."""

    def forward(self, pair):
        """Return two outputs, of which one has no gradient."""
        return pair[0] * 2, (pair[0] + pair[1][:, None].float(), pair[1])


def make_model() -> nn.Sequential:
    """With a boundary of several tensors, and one layer whose activation works in place on what it
    is given.
    """
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), Split(), Merge())


def make_pipe(mode: str, threads: bool | None = None, balance=(1, 2, 2)) -> Pipe:
    """Three partitions, three micro-batches; with threads, without, or as it likes."""
    pipe = Pipe(make_model(), balance, devices=3, chunks=3, checkpoint=mode)
    with torch.no_grad():
        pipe(torch.randn(7, 4))
    for choice in pipe._engine.choices.values():
        choice.forced = threads
    return pipe


def loss_of(output) -> torch.Tensor:
    """One number from all that has a gradient."""
    doubled, (sums, _) = output
    return doubled.square().mean() + sums.exp().mean()


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_outputs_and_gradients_are_those_of_the_plain_model_and_add_up(mode, threads):
    """Two batches before a step give the sum that one device gives."""
    plain, pipe = make_model(), make_pipe(mode, threads)
    for samples in (7, 3):
        x = torch.randn(samples, 4)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, output = plain(a), pipe(b)
        torch.testing.assert_close(output, expected)
        assert not output[1][1].requires_grad
        loss_of(expected).backward()
        loss_of(output).backward()
        torch.testing.assert_close(b.grad, a.grad)
    torch.testing.assert_close(
        [p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()]
    )


@pytest.mark.parametrize("mode", MODES)
def test_an_output_that_nobody_uses_costs_no_gradient(mode):
    """Autograd hands on nothing for it."""
    plain, pipe, x = make_model(), make_pipe(mode), torch.randn(7, 4)
    plain(x)[1][0].sum().backward()
    pipe(x)[1][0].sum().backward()
    torch.testing.assert_close(
        [p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()]
    )


@pytest.mark.parametrize("threads", [False, True])
def test_two_forwards_before_their_backwards_keep_apart(threads):
    """A siamese network calls its body twice, and one backward runs both nodes."""
    plain, pipe = make_model(), make_pipe("except_last", threads)
    x, y = torch.randn(7, 4), torch.randn(5, 4)
    for model in (plain, pipe):
        one, other = model(x), model(y)
        (loss_of(one) * loss_of(other)).backward()
    torch.testing.assert_close(
        [p.grad for p in pipe.parameters()],
        [p.grad for p in plain.parameters()],
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("mode", MODES)
def test_autograd_grad_gives_gradients_of_weights_and_leaves_grad_alone(mode):
    """The weights are inputs of the node, as they are of the plain model's graph."""
    plain, pipe, x = make_model(), make_pipe(mode), torch.randn(7, 4)
    expected = torch.autograd.grad(loss_of(plain(x)), list(plain.parameters()))
    grads = torch.autograd.grad(loss_of(pipe(x)), list(pipe.parameters()))
    torch.testing.assert_close(grads, expected)
    assert all(p.grad is None for p in pipe.parameters())


def test_backward_with_inputs_touches_no_other_weight():
    """`backward(inputs=…)` fine-tunes a part."""
    pipe = make_pipe("never")
    loss_of(pipe(torch.randn(7, 4))).backward(inputs=[pipe[0].weight])
    assert pipe[0].weight.grad is not None
    assert pipe[2].weight.grad is None


@pytest.mark.parametrize("mode", MODES)
def test_hooks_on_weights_see_the_gradient_of_the_whole_batch_once(mode):
    """One that scales would scale a sum of micro-batches' otherwise twice, or m times."""
    plain, pipe, x = make_model(), make_pipe(mode), torch.randn(7, 4)
    calls: list[str] = []
    for model in (plain, pipe):
        model[0].weight.register_hook(lambda grad: calls.append("before") or grad * 3)
        model[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
        loss_of(model(x)).backward()
    assert calls == ["before", "after"] * 2
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)
    assert len(pipe[0].weight._backward_hooks) == 1


def test_a_second_backward_through_the_same_forward_is_refused():
    """What it kept is gone, and silence would mean gradients of nothing."""
    loss = loss_of(make_pipe("never")(torch.randn(7, 4)))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward through a Pipe a second time"):
        loss.backward()


def test_a_gradient_of_a_gradient_is_refused():
    """A gradient without a graph would let a penalty on it train nothing, as WGAN-GP's did; so for
    linear losses, too.
    """
    pipe = make_pipe("never")
    for loss in (loss_of, lambda output: output[0].sum()):
        with pytest.raises(RuntimeError, match="create_graph=True asks for gradients of gradients"):
            torch.autograd.grad(loss(pipe(torch.randn(7, 4))), [pipe[0].weight], create_graph=True)


def test_a_gradient_penalty_through_a_pipe_is_refused():
    """The gradient of WGAN-GP's critic by its input."""
    pipe = make_pipe("except_last")
    x = torch.randn(7, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="such as a gradient penalty, would train nothing"):
        torch.autograd.grad(pipe(x)[0].sum(), x, create_graph=True)


@pytest.mark.parametrize("mode", MODES)
def test_no_grad_and_frozen_models_keep_nothing(mode):
    """Evaluation must cost no memory."""
    pipe = make_pipe(mode)
    with torch.no_grad():
        assert not pipe(torch.randn(7, 4))[0].requires_grad
    with torch.inference_mode():
        assert pipe(torch.randn(7, 4))[0].is_inference()
    assert not pipe.requires_grad_(requires_grad=False)(torch.randn(7, 4))[0].requires_grad


@pytest.mark.parametrize("frozen", [[0], [2], [0, 2]])
@pytest.mark.parametrize("mode", MODES)
def test_frozen_layers_get_no_gradient_and_hand_it_on(mode, frozen):
    """A frozen partition may be first, in the middle, or all there is."""
    plain, pipe = make_model(), make_pipe(mode)
    x = torch.randn(7, 4)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    for model, inputs in ((plain, a), (pipe, b)):
        for place in frozen:
            model[place].requires_grad_(requires_grad=False)
        loss_of(model(inputs)).backward()
    torch.testing.assert_close(b.grad, a.grad)
    torch.testing.assert_close(
        [p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()]
    )


def test_one_gradient_for_two_weights_is_not_added_into_itself():
    """Autograd may return one tensor for two weights that are added: sums need tensors of their
    own.
    """

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return x.sum(0, keepdim=True) + (self.a + self.b)

    pipe = Pipe(nn.Sequential(Both()), [1], devices=1, chunks=4, checkpoint="never")
    pipe(torch.rand(4, 2)).sum().backward()
    assert pipe[0].a.grad.tolist() == pipe[0].b.grad.tolist() == [4.0, 4.0]


def test_sparse_gradients_add_up():
    """Embeddings of large vocabularies have them."""
    torch.manual_seed(1)
    model, x = (
        nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2)),
        torch.randint(0, 9, (8, 2)),
    )
    expected = torch.autograd.grad(model(x).square().sum(), [model[0].weight])[0]
    pipe = Pipe(model, [1, 1], devices=2, chunks=4)
    pipe(x).square().sum().backward()
    assert model[0].weight.grad.is_sparse
    torch.testing.assert_close(model[0].weight.grad.to_dense(), expected.to_dense())


def test_a_forward_without_backward_and_one_with_leave_nothing_behind():
    """Activations of a batch must go with its loss."""
    references: list[weakref.ref] = []

    class Making(nn.Module):
        def forward(self, x):
            value = x.exp()
            references.append(weakref.ref(value))
            return value.sin()

    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), Making()), [1, 1], devices=2, chunks=2)
    output = pipe(torch.rand(4, 2))
    del output
    pipe(torch.rand(4, 2)).sum().backward()
    gc.collect()
    assert references
    assert not any(ref() is not None for ref in references)


def test_a_tensor_that_is_no_parameter_has_its_gradient_too():
    """A layer may use what it was never given as a parameter; its gradient must not be lost."""
    scale = torch.ones(2, requires_grad=True)

    class Scaling(nn.Module):
        def forward(self, x):
            return x * scale

    Pipe(nn.Sequential(nn.Linear(2, 2), Scaling()), [1, 1], devices=2, chunks=2)(
        torch.rand(4, 2)
    ).sum().backward()
    assert scale.grad is not None


def test_a_backward_that_fails_leaves_grads_and_hooks_as_they_were():
    """Sums of a part of the micro-batches are nothing that an optimizer should find."""
    pipe = make_pipe("never")
    pipe[0].weight.register_hook(lambda grad: grad)
    loss_of(pipe(torch.randn(7, 4))).backward()
    before = pipe[0].weight.grad
    copy = before.clone()
    output = pipe(torch.randn(7, 4))[0]

    def fail(_):
        raise ArithmeticError("told to")

    pipe[2].register_full_backward_hook(lambda *_: fail(_))
    loss = pipe(torch.randn(7, 4))[0].sum() + output.sum()
    with pytest.raises(ArithmeticError, match="told to"):
        loss.backward()
    assert pipe[0].weight.grad is before
    torch.testing.assert_close(before, copy)
    assert len(pipe[0].weight._backward_hooks) == 1


@pytest.mark.parametrize("threads", [False, True])
def test_a_weight_in_two_partitions_on_one_device_has_the_sum_of_both_gradients(threads):
    """Tied weights are one parameter to the caller's graph, whoever uses them."""
    inner = nn.Linear(2, 2)
    plain, x = nn.Sequential(Holder(inner), Holder(inner)), torch.randn(6, 2)
    expected = torch.autograd.grad(plain(x).square().sum(), list(inner.parameters()))
    pipe = Pipe(plain, [1, 1], devices=2, chunks=3)
    pipe(x)
    for choice in pipe._engine.choices.values():
        choice.forced = threads
    pipe(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in inner.parameters()], list(expected))


@pytest.mark.parametrize("unused_by", [0, 1, 2])
def test_a_part_of_an_input_that_one_micro_batch_does_not_use_has_zeros_there(unused_by):
    """In the shape of that part: the tensors of an input differ in all dimensions but the first, and
    the last micro-batch has fewer samples.
    """

    class UsingBoth(nn.Module):
        def forward(self, pair):
            x, bias = pair
            return x * 2 if int(x[0, 0]) // 3 == unused_by else x * bias.sum((1, 2))[:, None]

    x = torch.arange(7.0)[:, None].expand(7, 4)
    pairs = [(x.clone().requires_grad_(), torch.ones(7, 2, 3, requires_grad=True)) for _ in "ab"]
    Pipe(nn.Sequential(UsingBoth()), [1], chunks=3)(pairs[0]).sum().backward()
    for part in zip(*(tensor.chunk(3) for tensor in pairs[1]), strict=True):
        UsingBoth()(part).sum().backward()
    for tensor, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(tensor.grad, expected.grad)
    assert not pairs[0][1].grad.chunk(3)[unused_by].any()


def test_an_input_that_no_micro_batch_uses_has_no_gradient():
    """As in the plain model, where `.grad` stays None."""
    x, unused = torch.ones(4, 2, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    pipe = Pipe(nn.Sequential(First()), [1], chunks=2)
    pipe((x, unused)).sum().backward()
    assert unused.grad is None
    torch.testing.assert_close(x.grad, torch.ones(4, 2))


class First(nn.Module):
    """Returns the first item."""

    def forward(self, items):
        """Return it."""
        return items[0]


def test_all_side_losses_of_a_layer_count_by_the_samples_of_their_micro_batch():
    """A layer may add several, such as two penalties of a router."""

    class Router(nn.Module):
        def forward(self, x):
            side_loss(x.mean() * 2)
            side_loss(x.square().mean())
            return x

    x = torch.randn(5, 3)
    pipe = Pipe(nn.Sequential(Router(), nn.Identity(), Router()), [1, 2], devices=2, chunks=2)
    inputs = x.clone().requires_grad_()
    total = pipe(inputs).sum() * 0 + pipe.side_loss
    plain = x.clone().requires_grad_()
    expected = 2 * (2 * plain.mean() + plain.square().mean())
    torch.testing.assert_close(total, expected)
    total.backward()
    expected.backward()
    torch.testing.assert_close(inputs.grad, plain.grad)


def test_a_draw_that_was_not_intercepted_is_refused_its_recompute_and_the_batch_can_be_repeated():
    """From then on the ops of the partition are intercepted in every forward."""
    rates = [0.0]

    class Hidden(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, rates[0])

    pipe = Pipe(nn.Sequential(Hidden(), nn.Linear(20, 20)), [1, 1], devices=2, checkpoint="always")
    x = torch.ones(4, 20)
    for _ in range(4):
        pipe(x).sum().backward()
    # The fifth forward is not observed; the sixth and the seventh are not, either.
    rates[0] = 0.5
    loss = pipe(x).sum()
    with pytest.raises(RuntimeError, match="The next forward allows for it: repeat the batch"):
        loss.backward()
    for _ in range(2):
        pipe(x).sum().backward()


def test_an_output_may_require_a_gradient_in_some_micro_batches_only():
    """The gradient of the others is zero, as where a plain model joins such parts."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.gain if bool(x[0] > 2) else x

    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    pipe = Pipe(nn.Sequential(Sometimes()), [1], chunks=2)
    output = pipe(x)
    assert output.requires_grad
    output.square().sum().backward()
    assert float(pipe[0].gain.grad) == 2 * (9 + 16)


def test_evaluations_do_not_tell_that_layers_draw_nothing_in_training():
    """The first forward in training is recomputed with the same mask, though it is not observed."""
    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), [1, 1], devices=2, chunks=2)
    pipe.checkpoint = "always"
    x = torch.ones(6, 4, requires_grad=True)
    pipe.eval()
    pipe(x)
    pipe(x)
    output = pipe.train()(x)
    output.sum().backward()
    mask = (output != 0).to(x.dtype)
    torch.testing.assert_close(x.grad, 2 * mask @ pipe[0].weight.detach())
