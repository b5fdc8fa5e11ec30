"""Resolves a model's name to its folder, and reads the author's generation defaults."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from draftproof import assets
from draftproof.models.gguf import convert as gguf
from draftproof.schema import number, read_json, token_ids, whole
from draftproof.types import SamplingParams

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "vocab.txt", "merges.txt"]
_HUB_DUPLICATES = ["consolidated*", "original/*"]  # copies of the weights in another layout
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def resolve(
    model: str | os.PathLike[str],
    revision: str | None = None,
    *,
    field: str = "model",
    file: str = "config.json",
    load_format: str = "auto",
    progress: gguf.Progress | None = None,
) -> Path:
    """The folder of `model`: a directory, a .gguf file or a folder with one (converted into the cache on first use), or
    a hub id, whose files are fetched or found in the hub's cache. `field`: the user's setting, for errors; `file`: a
    file that a directory must have ("": any); load_format "gguf": only a .gguf file is accepted.

    Raises ValueError for a missing directory, an unknown id, or an unreachable hub.
    """
    path = Path(model).expanduser()
    single = _gguf_file(path, field, file, load_format)
    if single is not None:
        return gguf.checkpoint_of(single, progress)
    if path.is_dir():
        if not (path / file).exists():
            raise ValueError(f"{field}={str(model)!r}: this folder has no {file}, so it holds no model")
        return path
    if path.exists():
        raise ValueError(f"{field}={str(model)!r}: is a file; give the folder that holds it, or a .gguf file")
    if not _HUB_ID.fullmatch(str(model)):
        advice = "check the path (a hub id reads 'owner/name')"
        if (field, str(model)) == ("model", assets.TARGET):
            advice = f"for the embedded model leave it out and set {assets.VARIABLE}={assets.TARGET}"
        raise ValueError(f"{field}={str(model)!r}: no such directory; {advice}")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                str(model), revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DUPLICATES
            )
        )
    except Exception as error:  # the client raises many unrelated types; the user needs one message
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ValueError(
            f"{field}={str(model)!r}, revision={revision!r}: no such directory here, and the hub did not give it "
            f"({type(error).__name__}: {reason}); check the name, or download it elsewhere and give the folder's path"
        ) from error


def _gguf_file(path: Path, field: str, file: str, load_format: str) -> Path | None:
    """The .gguf file at `path`, or the only one in that folder; None if `path` is something else."""
    here = f"{field}={str(path)!r}"
    if path.is_file() and path.suffix == gguf.SUFFIX:
        return path
    wanted = load_format == "gguf"
    found = sorted(path.glob(f"*{gguf.SUFFIX}")) if path.is_dir() else []
    if found and (wanted or not (path / file).exists()):
        if len(found) > 1:
            raise ValueError(
                f"{here}: this folder has {len(found)} .gguf files: give one of them, such as {found[0]}"
            )
        return found[0]
    if wanted:
        raise ValueError(f"load_format='gguf': {here}: must be a .gguf file, or a folder that holds one")
    return None


def resolve_tokenizer(name: str | os.PathLike[str]) -> Path:
    """The folder of a tokenizer, resolved like a model's; it need not contain a model."""
    return resolve(name, field="tokenizer", file="")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The author's recommended settings; None: not stated."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_config(directory: Path) -> GenerationDefaults:
    """`generation_config.json` of a folder; all None without the file. ValueError names the file, the key and what
    `SamplingParams` accepts."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return GenerationDefaults()
    raw = read_json(path)
    where = str(path)

    def given(key: str) -> float | None:
        return None if raw.get(key) is None else number(raw, key, where)

    numbers = {key: given(key) for key in ("temperature", "top_p", "min_p", "repetition_penalty")}
    top_k = None if raw.get("top_k") is None else whole(raw, "top_k", where, -1)
    stated = {key: value for key, value in {**numbers, "top_k": top_k}.items() if value is not None}
    try:
        SamplingParams(**stated)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    eos = token_ids(raw.get("eos_token_id"), f"{where}: eos_token_id")
    return GenerationDefaults(eos_token_ids=eos, top_k=top_k, **numbers)
