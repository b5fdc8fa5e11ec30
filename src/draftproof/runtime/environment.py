"""The environment part of a certificate's key: processor or GPU, libraries, settings, threads, and the code itself."""

from __future__ import annotations

import functools
import hashlib
import os

import torch

from draftproof.runtime import compiling, gpu, native

ROOMS = ("attention", "kernels", "matmul", "runtime")  # folders whose code affects results
# Prefixes of environment variables that change what libraries compute.
LIBRARIES = (
    "ATEN",
    "CUBLAS",
    "DNNL",
    "GLIBC_TUNABLES",
    "GOMP",
    "KMP",
    "MKL",
    "NVIDIA_TF32",
    "OMP",
    "ONEDNN",
    "OPENBLAS",
    "TORCH",
    "TRITON",
)


def key(device: torch.device, library: native.Library | None) -> str:
    """A hash of everything that a certificate made on `device` depends on, at torch's current number of threads."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else compiling.processor()
    settings = sorted(item for item in os.environ.items() if item[0].startswith(LIBRARIES))
    facts = (
        name,
        torch.__version__,
        torch.__config__.show(),
        torch.backends.mkldnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cpu.get_cpu_capability(),
        gpu.version(device),
        torch.get_num_threads(),
        settings,
        None if library is None else library.build_key,
        _code(with_gpu=gpu.available(device)),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]


@functools.cache
def _code(*, with_gpu: bool) -> str:
    """Hash of the source of the operators, of attention, and of their certification; `with_gpu`: including Triton's
    versions.
    """
    package = compiling.SOURCES
    paths = [path for room in ROOMS for path in sorted((package / room).rglob("*.py"))]
    names = [path.relative_to(package).as_posix() for path in [*paths, *compiling.source_files()]]
    digest = hashlib.sha256()
    for name in names:
        if with_gpu or "triton" not in name:
            digest.update(name.encode() + (package / name).read_bytes())
    return digest.hexdigest()
