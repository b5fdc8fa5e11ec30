"""Containment of user code: all its exceptions become `DrafterError`, and its changes to process state are undone."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import overrides
from torch.utils import _device, _python_dispatch

MOST_WORDS = 500  # maximum length of a user exception's message, in characters
_C: Any = torch._C
_math: Any = ctypes.CDLL(None)  # the C library that this process runs with
FLOAT_STATE_BYTES = 256  # fenv_t has at most 32 bytes on known processors

# (getter, setter) of each setting. Per-thread settings are the calling thread's: steps and user code share it.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
)


class DrafterError(Exception):
    """A fault of user code, as one line that is safe to print."""


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Context manager for user code. Raises `DrafterError` for whatever the code raises, SystemExit included;
    KeyboardInterrupt passes through.

    Restores afterwards: floating-point rounding and flushing, torch's default device and dtype, number of threads,
    modes, autograd, matmul precision, deterministic flags.
    """
    state = ctypes.create_string_buffer(FLOAT_STATE_BYTES)
    _math.fegetenv(state)
    settings = [read() for read, _ in _SETTINGS]
    modes = overrides._get_current_function_mode_stack()
    device = _default_device()
    num_dispatch_modes = len(_python_dispatch._get_current_dispatch_mode_stack())
    try:
        with torch.inference_mode(
            False
        ):  # restores autograd's modes even if the code entered some and did not exit
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise DrafterError(describe(error)) from error
    finally:
        _math.fesetenv(state)
        while len(_python_dispatch._get_current_dispatch_mode_stack()) > num_dispatch_modes:
            _python_dispatch._pop_mode()
        _restore_modes(modes, device)
        for (read, put), value in zip(_SETTINGS, settings, strict=True):
            if read() != value:
                put(value)


def describe(error: BaseException) -> str:
    """The error's type and message in one line; the type alone if the message cannot be read."""
    if isinstance(error, DrafterError):
        return str(error)
    name = type(error).__name__
    try:
        words = " ".join(str(error).split())
    except KeyboardInterrupt:
        raise
    except BaseException:
        words = "(its message cannot be shown)"
    return f"{name}: {words[:MOST_WORDS]}"


def _default_device() -> tuple[Any, Any]:
    """The state that `torch.set_default_device` keeps in addition to the mode that it enters."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), _device.CURRENT_DEVICE


def _restore_modes(modes: list[Any], device: tuple[Any, Any]) -> None:
    """Restore the stack of function modes; the default device is one of them."""
    now = overrides._get_current_function_mode_stack()
    if len(now) == len(modes) and all(a is b for a, b in zip(now, modes, strict=True)):
        return
    for _ in now:
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)
    torch._GLOBAL_DEVICE_CONTEXT.device_context, _device.CURRENT_DEVICE = device
