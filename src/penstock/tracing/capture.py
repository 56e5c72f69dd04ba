"""Capture of a model's graph, for as many shapes of its inputs as possible.

torch.export was chosen over torch.fx for its coverage (docs/models.md has the figures). It handles
all Python control flow that does not depend on values of tensors, keeps composite ops whole (a
linear map, attention, dropout), so that autograd treats them as in the model, and records for which
other shapes its graph is valid.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn

from penstock.tracing.draws import Drawn
from penstock.tracing.fake_device_guard import keep_fake_device_guard
from penstock.tracing.faults import Refused, fault
from penstock.tracing.form import Form, call
from penstock.tracing.graph_export import Capture, Request, export_graph
from penstock.tracing.python_state.attribute_reads import carried_message

# torch.export changes global state of the process while it runs.
_EXPORT_LOCK = threading.RLock()


def capture(
    skeleton: nn.Module,
    form: Form,
    *,
    training: bool,
    caches: Mapping[str, Collection[str]] | None = None,
) -> Capture:
    """Capture the graph of a model for inputs of a form, where possible for other shapes too.

    Args:
        skeleton: the model, from `skeleton_of`.
        form: form of the inputs.
        training: keep the training mode of every module; otherwise all are in evaluation mode.
        caches: by the path of a module, attributes that its forward may change, since an earlier
            capture has found that they are caches.

    Raises:
        ChainError: the model cannot be captured; the message has file and line of the reason.
    """
    request = Request(skeleton, form, training, caches or {})
    with _EXPORT_LOCK:
        return _in_thread(lambda: _capture_or_fault(request))


def _capture_or_fault(request: Request) -> Capture:
    """Trace with sizes that may change, else with fixed ones; convert errors to ChainError."""
    try:
        return _capture_checked(request, dynamic=True)
    except Drawn as error:
        raise fault(request.skeleton, _locate_draw(request) or error) from error
    except Refused as error:
        raise fault(request.skeleton, error) from error
    except Exception:  # noqa: BLE001  # torch.export raises exceptions of all kinds
        # With fixed sizes torch.export supports more models.
        try:
            return _capture_checked(request, dynamic=False)
        except Drawn as error:
            raise fault(request.skeleton, _locate_draw(request) or error) from error
        except Exception as error:
            runs = not _fails_without_trace(request, error)
            raise fault(request.skeleton, error, runs=runs) from error


def _fails_without_trace(request: Request, error: Exception) -> bool:
    """Return whether the model, called as it is on the meta device, raises an error like this one.

    A layer that does not fit its inputs does; an op that a trace does not support does not.
    """
    model = copy.deepcopy(request.skeleton)
    form = request.form.on_meta()
    try:
        with torch.no_grad():
            call(model, form.value(form.tensors))
    except Exception as plain:  # noqa: BLE001  # of the model, of any kind
        return type(plain) is type(error) and _first_line(plain) == _first_line(error)
    return False


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def _capture_checked(request: Request, *, dynamic: bool) -> Capture:
    """Capture a graph, and check that attributes that may be caches are caches.

    The check is a second capture in which they are already filled: a cache stays as it is, while a
    counter goes on.

    Raises:
        Refused: the second forward changes an attribute again, or is another one.
    """
    captured = export_graph(request, dynamic=dynamic)
    sizes, tables = captured.reads.sizes, captured.reads.tables
    settled = captured.reads.settled
    if not (sizes or tables or settled):
        return captured
    filled = copy.deepcopy(request.skeleton)
    captured.reads.fill(filled)
    second = export_graph(replace(request, skeleton=filled), dynamic=dynamic)
    if settled and (second.reads.settled or _op_names(second) != _op_names(captured)):
        path, name = next(iter(settled))
        raise Refused(carried_message(path, name, "in place"))
    second_sizes = second.reads.sizes
    for (path, name), value in sizes.items():
        if second_sizes.get((path, name)) != value:
            raise Refused(carried_message(path, name, f"to {value}"))
    return captured


def _op_names(captured: Capture) -> list[tuple[str, str]]:
    """Return what the ops of a graph are, in order."""
    return [(node.op, str(node.target)) for node in captured.graph.nodes]


def _locate_draw(request: Request) -> Drawn | None:
    """Return the error of a model that draws random numbers, with the line that draws."""
    for dynamic in (True, False):
        try:
            export_graph(request, dynamic=dynamic, locate=True)
        except Drawn as error:
            return error
        except Exception:  # noqa: BLE001, S112  # the same exception as in the first attempt
            continue
    return None


def _in_thread(work: Callable[[], Capture]) -> Capture:
    """Run `work` in a new thread, without the dispatch modes and hooks of the caller's thread.

    A batch of a new form may arrive while saved-tensor hooks are installed, or under a fake tensor
    mode. Only autocast is copied from the caller, since a model may depend on dtypes.
    """
    autocast = [
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    results: list[Capture] = []
    errors: list[BaseException] = []

    def run() -> None:
        """Do the work under the caller's autocast, and store its result or its error."""
        try:
            with ExitStack() as stack:
                for device, dtype in autocast:
                    stack.enter_context(torch.autocast(device, dtype))
                results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            errors.append(error)

    keep_fake_device_guard()
    thread = threading.Thread(target=run, name="tracing")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
