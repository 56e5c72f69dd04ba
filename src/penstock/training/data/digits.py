"""Handwritten digits, 1,797 images of 8x8 pixels: real data that needs no file, since scikit-learn
includes it.

Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits (UCI), of which
scikit-learn has the test part.
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cluster.local import available_memory_bytes
from penstock.errors import MissingExtra, SettingError
from penstock.training.data.batches import Dataset, check_count
from penstock.training.data.catalogue import register
from penstock.units import format_bytes

if TYPE_CHECKING:
    import numpy as np

#: Pixels per side of the UCI digits.
_SIDE = 8


@register("digits", usage="digits", takes=("image", "channels"), source="comes with scikit-learn")
def digits(*, image: int = _SIDE, channels: int = 1) -> Dataset:
    """1,437 digits to train and 360 to test: inputs (n, channels, image, image) float32, targets
    (n,) in 0..9.

    Images are resized by bilinear interpolation, then shifted and scaled so that the training part
    has mean 0 and variance 1 at the size that the model sees; the test part is shifted and scaled
    by the same two numbers. The channels are copies of one.

    The split is always the same: of the images sorted by digit, in their own order within a digit,
    every fifth is in the test part. So each part has its share of every digit, give or take one
    image.

    Args:
        image: height and width, in pixels. 224 with 3 channels takes 1.1 GB.
        channels: copies of the one channel.

    Raises:
        SettingError: `image` or `channels` is below 1, or the images exceed the free memory.
        MissingExtra: scikit-learn is not installed.
    """
    import numpy as np
    import torch
    from torch.nn import functional

    check_count("image", image)
    check_count("channels", channels)
    images, labels = _load()
    needed, free = 4 * len(images) * channels * image**2, available_memory_bytes()
    if needed > free:
        raise SettingError(
            f"digits of {image}x{image} pixels with {channels} channels take {format_bytes(needed)}, "
            f"and {format_bytes(free)} of memory are free: set image or channels to less"
        )
    in_test = np.zeros(len(labels), dtype=bool)
    in_test[np.argsort(labels, kind="stable")[::5]] = True
    inputs = torch.from_numpy(images)[:, None]
    if image != _SIDE:
        inputs = functional.interpolate(
            inputs, size=(image, image), mode="bilinear", align_corners=False
        )
    targets, test = torch.from_numpy(labels), torch.from_numpy(in_test)
    std, mean = torch.std_mean(inputs[~test], correction=0)
    inputs = ((inputs - mean) / std).repeat(1, channels, 1, 1)
    train_count, test_count = int((~test).sum()), int(test.sum())
    return Dataset(
        name="digits",
        train_inputs=inputs[~test],
        train_targets=targets[~test],
        test_inputs=inputs[test],
        test_targets=targets[test],
        classes=10,
        task="classify",
        description=(
            f"handwritten digits (UCI, from scikit-learn), {_SIDE}x{_SIDE} pixels made "
            f"{image}x{image} with {channels} channel{'s' if channels > 1 else ''}: "
            f"{train_count:,} to train, {test_count:,} to test, 10 classes"
        ),
    )


def _load() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (1797, 8, 8) float32 in 0..16, and digits (1797,) int64."""
    import numpy as np

    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise MissingExtra("scikit-learn", "data", "the data set digits")
    # The file itself: importing scikit-learn and SciPy would take a second of every process.
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(file, "rt", encoding="ascii") as text:
            rows = np.loadtxt(text, delimiter=",")
    except OSError:
        from sklearn.datasets import load_digits  # a version that keeps its data elsewhere

        bunch = load_digits()
        rows = np.column_stack([bunch.data, bunch.target])
    pictures = rows[:, :-1].reshape(-1, _SIDE, _SIDE)
    return pictures.astype(np.float32), rows[:, -1].astype(np.int64)
