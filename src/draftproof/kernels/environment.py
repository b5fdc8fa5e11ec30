"""The key of certificates beside the shape: processor or GPU, libraries, settings, threads, and the code itself."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import torch

from draftproof.kernels import compiling, gpu, native

# Prefixes of variables that change what libraries compute.
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
    """A hash of all that a certificate made now on `device` depends on, at torch's present number of threads."""
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
    """Hash of the operators, of attention, and of what certifies them."""
    kernels = Path(__file__).parent
    folders = [kernels, kernels.parent / "attention", *([kernels / "gpu"] if with_gpu else [])]
    paths = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    digest = hashlib.sha256()
    for path in [*paths, *compiling.source_files()]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
