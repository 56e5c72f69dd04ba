"""Tables 2 and 3 of the study: VGG-19 on 1 to 8 A100, torchgpipe, FairScale and DeepSpeed.

The model and the fit are those of `penstock study paper`, see `penstock.study.paper.simulated`.
"""

from __future__ import annotations

from collections.abc import Callable

from side_by_side import Row, Section

from penstock.study.paper.published import GPUS, STEPS, PublishedCell, published_cells
from penstock.study.paper.simulated import (
    Engine,
    Host,
    fit,
    fit_engine,
    fit_host,
    lengths,
    one_process_step,
    process_each_step,
)

__all__ = ["fit", "published_cells", "sections"]


def sections(report: Callable[[str], None]) -> list[Section]:
    """The single-process libraries, and DeepSpeed."""
    ours = published_cells()
    one = [cell for cell in ours if cell.library != "deepspeed"]
    many = [cell for cell in ours if cell.library == "deepspeed"]
    report("fit of a host that all devices share")
    host, one_fit = fit_host()
    engine, many_fit = fit_engine()
    report("56 cells")
    one_rows = [
        Row(str(cell), cell.seconds, STEPS * one_process_step(cell, host), fitted=cell in one_fit)
        for cell in one
    ]
    many_rows = [
        Row(
            str(cell),
            cell.seconds,
            STEPS * process_each_step(cell, engine),
            fitted=cell in many_fit,
        )
        for cell in many
    ]
    return [_one_process_section(one_rows, host), _engine_section(many_rows, engine)]


PUBLISHED_INPUTS = (
    (
        "seconds of 25 epochs of CIFAR-100 (390.6 batches of 128 each), VGG-19, up to 8 A100, M = 1, 8, 16: its tables are kept in "
        "src/penstock/study/data/study_tables.json"
    ),
    "an example cut of its 19 layers on 8 GPUs, 2:3:2:3:2:2:2:3: nearly even",
)
ASSUMED = (
    (
        "launches of every layer: counted from the model (64 of a forward, 81 of a backward; with M above 1 one more for every weight and bias, "
        "whose gradient is added to; two for each at the update)"
    ),
    "what the A100 itself takes: its roofline in tf32, 6 ms for a whole batch of 128: the host is what counts",
    (
        "every cut is the most even one by launches, as the published example nearly is: it comes out as 2:2:3:2:2:2:3:3"
    ),
)


def _one_process_section(rows: list[Row], host: Host) -> Section:
    off = lengths(8, 16, "size")
    by_gpus = {}
    for gpus in GPUS:
        suffix = f"M=16, {gpus} GPUs"
        by_gpus[gpus] = sum(row.ours or 0 for row in rows if row.case.endswith(suffix))
    best = min(by_gpus, key=lambda gpus: by_gpus[gpus])
    return Section(
        "study",
        "The study, tables 2 and 3: torchgpipe and FairScale, one Python process",
        "s",
        tuple(rows),
        PUBLISHED_INPUTS,
        (
            *ASSUMED,
            (
                "checkpoint='except_last', both libraries' default: nothing is recomputed at M=1 (the study says 'always' of its figure 3, and "
                f"nothing of its tables; with that, M=1 on 4 GPUs would take {_with_always(host):.0f} s, 237 to 295 are published)"
            ),
            "GPipe's schedule, backwards in reverse; a thread for each device, of whose time a part needs the one lock of the process",
            f"it comes out that {best} GPUs are fastest at M=16, as published, and that every number of GPUs is slower with more micro-batches",
        ),
        (
            (
                f"three constants, to the 4 cells torchgpipe by time at M=16: {host.launch_s * 1e6:.0f} us of the host for each launch, "
                f"{host.locked:.0%} of it with the lock, and {host.task_s * 1e3:.2f} ms with the lock for each forward or backward of a partition; "
                "44 cells are predicted"
            ),
        ),
        (
            (
                "M=1 on 2 GPUs takes the published runs 1.5 times as long as on 4. No synchronous pipeline explains that: one micro-batch visits all "
                "devices one after the other, however many they are."
            ),
            "FairScale at M=1 is slower than torchgpipe on 8 GPUs by 30 to 40 %, and as fast at M=8 and 16; here both are the same program.",
            (
                f"By size, torchgpipe's method makes {':'.join(map(str, off))} of our layers on 8 GPUs at M=16, by which the first thread would launch "
                "nearly half of everything; the published times show no such thing."
            ),
            (
                "100 us for a launch are ten times what one thread of a fast host needs: Python threads that wait for each other on a 2.25 GHz EPYC "
                "are not a fast host, and the study's model may launch more (batch norm) than ours."
            ),
        ),
    )


def _with_always(host: Host) -> float:
    return STEPS * one_process_step(
        PublishedCell(3, "torchgpipe", "time", 4, 1, 0.0, 0.0), host, always=True
    )


def _engine_section(rows: list[Row], engine: Engine) -> Section:
    off = lengths(8, 16, "parameters")
    return Section(
        "study-deepspeed",
        "The study, table 2: DeepSpeed, a process for each device",
        "s",
        tuple(rows),
        PUBLISHED_INPUTS,
        (
            *ASSUMED,
            "1F1B, everything recomputed (activation_checkpoint_interval=1), no data parallelism",
        ),
        (
            (
                f"two constants, to the 2 cells uniform on 2 and 8 GPUs: {engine.launch_s * 1e6:.0f} us for each launch and "
                f"{engine.task_s * 1e3:.2f} ms for each forward or backward of a stage; 6 cells are predicted"
            ),
        ),
        (
            (
                "The paper thinks that DeepSpeed scales because it adds data parallelism by itself. A process for each device is enough: launches of "
                "all stages go on at once, and a pipeline of p stages has p hosts."
            ),
            (
                f"By parameters, DeepSpeed's method makes {':'.join(map(str, off))} of our layers on 8 GPUs, which would be far from even; the published "
                "times are those of uniform, so that is what we take for both."
            ),
        ),
    )
