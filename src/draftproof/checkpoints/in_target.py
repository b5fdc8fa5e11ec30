"""MTP modules stored in the target's own files; a key of its config.json says how many."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.drafters.context import DraftCheckpoint
from draftproof.drafters.mtp import TargetMtpSettings
from draftproof.models import vision
from draftproof.models.config import ModelConfig, language_model, read_raw
from draftproof.models.ffns.experts import ExpertsConfig
from draftproof.models.weights import Weights, WeightSource
from draftproof.schema import whole

KEY = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNaming:
    """How a family names its modules' tensors. `modules`: name of their list; `after_layers`: they follow the target's
    layers in the layers' list; `names`: the tensors outside the decoder layer, in the order of `_OURS`; `is_one`: a
    single module without a list, whose decoder layer is in a list; `key`: config key with the number of modules."""

    modules: str
    after_layers: bool
    names: tuple[str, ...]
    state_first: bool = False
    is_one: bool = False
    key: str = KEY

    def split(self, name: str) -> tuple[int, str] | None:
        """(module number, name within the module); None if the tensor is not a module's."""
        number = "" if self.is_one else r"\.(\d+)"
        match = re.fullmatch(rf"(?:model\.)?{self.modules}{number}\.(.+)", name)
        if match is None:
            return None
        return (0, match[1].removeprefix("layers.0.")) if self.is_one else (int(match[1]), match[2])

    def joined(self, number: int, rest: str) -> str:
        """The inverse of `split`: the full name."""
        if not self.is_one:
            return f"model.{self.modules}.{number}.{rest}"
        is_around = rest.rpartition(".")[0] in self.names
        return f"{self.modules}.{rest}" if is_around else f"{self.modules}.layers.0.{rest}"


_OURS = ("embed_norm", "hidden_norm", "fc", "norm")
_DEEPSEEK = ModuleNaming(
    modules="layers", after_layers=True, names=("enorm", "hnorm", "eh_proj", "shared_head.norm")
)
_MIMO = ModuleNaming(
    modules="mtp_layers",
    after_layers=False,
    names=("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    state_first=True,
)
_QWEN = ModuleNaming(
    modules="mtp",
    after_layers=False,
    names=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    is_one=True,
    key="mtp_num_hidden_layers",
)
NAMINGS: Mapping[str, ModuleNaming] = {
    **{"deepseek_v3": _DEEPSEEK, "glm4_moe": _DEEPSEEK, "mimo": _MIMO},
    **dict.fromkeys(("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"), _QWEN),
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's own tensors


def read(
    directory: Path, weights: WeightSource | None = None, overrides: Mapping[str, Any] | None = None
) -> DraftCheckpoint:
    """The modules of the target in `directory`. `weights` replaces the files' tensors, `overrides` replaces keys of
    config.json.

    ValueError if there are none, with what config.json says and what the files hold.
    """
    raw, where = read_raw(directory, overrides)
    target = language_model(raw, where)
    naming = NAMINGS.get(target.model_type)
    if naming is None:
        raise ValueError(
            f"speculative_config: method='mtp' without model: {where} is of model_type={target.model_type!r}, and "
            f"prediction modules are known of {', '.join(NAMINGS)}; give the module's folder as model"
        )
    text, key = vision.text_part(raw, where), naming.key
    num = whole(text, key, where, 0, default=0)
    if num < 1:
        raise ValueError(
            f"speculative_config: method='mtp' without model: {where} says {key}={text.get(key)!r}, so the model has "
            "no prediction modules; give a module's folder as model, or take another method"
        )
    if naming.is_one and num > 1:
        raise ValueError(f"{where}: {key}={num}: only one layer is supported")
    return DraftCheckpoint(
        method="mtp",
        where=where,
        settings=TargetMtpSettings(layers=_layer(target), num_modules=num, state_first=naming.state_first),
        weights=_modules(directory, naming, target.num_layers, num) if weights is None else weights,
        directory=directory,
        num_drafts=num if num > 1 else None,
    )


def _layer(target: ModelConfig) -> ModelConfig:
    """The config of a module's layer: like the target's last layer, with experts if any layer has them."""
    last = target.layers[-1]
    ffns = [layer.ffn for layer in reversed(target.layers)]
    ffn = next((ffn for ffn in ffns if isinstance(ffn, ExpertsConfig)), last.ffn)
    return dataclasses.replace(target, layers=(dataclasses.replace(last, ffn=ffn),))


def _modules(directory: Path, naming: ModuleNaming, num_layers: int, num: int) -> Weights:
    """The modules' tensors under our names; ValueError if a module is missing."""
    files = Weights.open(directory)
    first = num_layers if naming.after_layers else 0
    theirs: dict[str, str] = {}
    for name in files.names():
        found_in = naming.split(name)
        if found_in and found_in[0] >= first and found_in[1] not in _COPIES:
            theirs[f"modules.{found_in[0] - first}.{_ours(found_in[1], naming)}"] = name
    found = {name.split(".")[1] for name in theirs}
    if len(found) != num:
        raise ValueError(
            f"{directory}: config.json says {naming.key}={num}, but the files hold {len(found)} prediction modules "
            f"({naming.modules}.{first} and on); download the files that are missing, or leave out method='mtp': some "
            "releases come without them"
        )

    def stored(name: str) -> str:
        _, number, rest = name.split(".", 2)
        return theirs.get(name, naming.joined(first + int(number), _theirs(rest, naming)))

    return Weights(files.where, theirs, lambda name: files.read(theirs[name]), stored)


def _ours(name: str, naming: ModuleNaming) -> str:
    stem, _, kind = name.rpartition(".")
    return f"{_OURS[naming.names.index(stem)]}.{kind}" if stem in naming.names else f"layers.0.{name}"


def _theirs(name: str, naming: ModuleNaming) -> str:
    stem, _, kind = name.rpartition(".")
    return f"{naming.names[_OURS.index(stem)]}.{kind}" if stem in _OURS else name.removeprefix("layers.0.")
