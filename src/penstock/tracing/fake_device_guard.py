"""Keep the no-op CUDA guard of torch's fake tensors alive, where torch is built for CUDA and no
card is visible.

The first `FakeTensorMode` of a process registers a no-op guard for CUDA. The guard belongs to the
thread that entered the mode, and is freed when this thread ends, but stays registered
(c10/core/impl/DeviceGuardImplInterface.cpp, `thread_local tls_fake_device_guard`). The next
backward calls it, and the process ends by a segmentation fault: seen with torch 2.11.0+cu130.
"""

from __future__ import annotations

import functools
import threading

import torch


@functools.cache
def keep_fake_device_guard() -> None:
    """Register the guard from a thread that does not end. To be called before a thread that may end
    enters a `FakeTensorMode`; later calls do nothing.
    """
    built_for_cards = torch.version.cuda is not None or torch.version.hip is not None
    # torch before 2.9 has no such guard.
    register = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if register is None or not built_for_cards or torch.cuda.is_available():
        return
    if threading.current_thread() is threading.main_thread():
        register()
        return
    registered = threading.Event()

    def hold() -> None:
        """Register the guard, and keep this thread alive."""
        register()
        registered.set()
        threading.Event().wait()

    threading.Thread(target=hold, name="penstock-fake-device-guard", daemon=True).start()
    registered.wait()
