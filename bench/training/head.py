"""A one-layer EAGLE-3 head in training: its folder's weights in fp32, products in bf16, and its target's embedding and
output layer.

Pass i computes draft i of every position: the layer reads the token i positions later, and the stream of the pass
before (at pass 0 the target's fused states); it attends to earlier tokens' keys of pass 0, and to its own of later
passes.
Shapes: N texts, L longest text, H hidden size, A heads, K key heads, D size of a head, C draft vocabulary,
V vocabulary, P positions.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.training.answers import Text, up_to
from bench.training.settings import Settings
from bench.training.target import DTYPE, Target, causal, rope, rotate
from draftproof.schema import read_json

WEIGHTS = "model.safetensors"
MAPS = ("d2t", "t2d")  # between the draft vocabulary and the target's
PARTS = 4096  # rows of the target's logits at once
LAYER = "layers.0"
ATTENTION = "layers.0.self_attn"
_WANTED = {
    "speculators_model_type": "eagle3",
    "norm_before_residual": True,
    "norm_before_fc": False,
    "norm_output": False,
}


class Head:
    """The head of `folder`, written by `draftproof train`. `weights`: trained tensors, by their names in the file."""

    def __init__(self, folder: Path, target: Target, num_positions: int) -> None:
        raw = read_json(folder / "config.json")
        c = raw["transformer_layer_config"]
        found = {**{key: raw.get(key) for key in _WANTED}, "num_hidden_layers": c["num_hidden_layers"]}
        if found != {**_WANTED, "num_hidden_layers": 1}:
            raise ValueError(
                f"{folder}: {found}: start from an EAGLE-3 head of one layer by `draftproof train`"
            )
        if (c["hidden_size"], c["vocab_size"]) != (target.config.hidden_size, target.config.vocab_size):
            raise ValueError(
                f"{folder}: hidden_size={c['hidden_size']}, vocab_size={c['vocab_size']}: another target's"
            )
        self._folder, self._size, self._eps = folder, c["head_dim"], c["rms_norm_eps"]
        self._num_keys = c["num_key_value_heads"]
        self.taps: list[int] = raw["eagle_aux_hidden_state_layer_ids"]
        tensors = load_file(folder / WEIGHTS, device=str(target.device))
        self._maps = {name: tensors.pop(name) for name in MAPS if name in tensors}
        self.weights = {name: t.float().requires_grad_() for name, t in tensors.items()}
        self.ids_C = torch.arange(target.config.vocab_size, device=target.device)
        if self._maps:
            self.ids_C = self._maps["d2t"] + self.ids_C[: len(self._maps["d2t"])]
        self.embed_VH, self.unembed_CH = target.embed_VH, target.unembed_VH[self.ids_C]
        theta = c["rope_parameters"]["rope_theta"]
        self._cos_PD, self._sin_PD = rope(theta, self._size, num_positions, target.device)

    def _w(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"].to(DTYPE)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._w(name), self._eps)

    def fuse(self, taps_NLH: Sequence[Tensor]) -> Tensor:
        if "fc_norm.0.weight" in self.weights:
            taps_NLH = [self._normed(tap, f"fc_norm.{i}") for i, tap in enumerate(taps_NLH)]
        return F.linear(torch.cat(list(taps_NLH), -1), self._w("fc"))

    def step(
        self,
        number: int,
        tokens_NL: Tensor,
        hidden_NLH: Tensor,
        context: list[tuple[Tensor, Tensor]],
        bias_LL: Tensor,
    ) -> Tensor:
        """Run pass `number`; returns the stream after the layer. `context`: keys and values of the passes so far, to
        which this pass appends its own."""
        num_texts, length = tokens_NL.shape
        normed_NLH = self._normed(hidden_NLH, f"{LAYER}.hidden_norm")
        embedded_NLH = self._normed(self.embed_VH[tokens_NL], f"{LAYER}.input_layernorm")
        x = torch.cat([embedded_NLH, normed_NLH], -1)
        q, k, v = (
            F.linear(x, self._w(f"{ATTENTION}.{name}_proj"))
            .view(num_texts, length, -1, self._size)
            .transpose(1, 2)
            for name in "qkv"
        )
        places = slice(1 + number, 1 + number + length)
        q, k = (rotate(t, self._cos_PD[places], self._sin_PD[places]) for t in (q, k))
        context.append((k, v))
        a_NALD = causal(q, k, v) if number == 0 else self._attend(q, context, bias_LL)
        a_NLH = a_NALD.transpose(1, 2).reshape(num_texts, length, -1)
        x_NLH = normed_NLH + F.linear(a_NLH, self._w(f"{ATTENTION}.o_proj"))
        y = self._normed(x_NLH, f"{LAYER}.post_attention_layernorm")
        gate, up = (F.linear(y, self._w(f"{LAYER}.mlp.{name}_proj")) for name in ("gate", "up"))
        return x_NLH + F.linear(F.silu(gate) * up, self._w(f"{LAYER}.mlp.down_proj"))

    def _attend(self, q_NALD: Tensor, context: Sequence[tuple[Tensor, Tensor]], bias_LL: Tensor) -> Tensor:
        """Attention to earlier tokens' keys of pass 0 and a row's own keys of later passes, in one softmax."""
        num_texts, _, length, size = q_NALD.shape
        grouped = (q_NALD * size**-0.5).reshape(num_texts, self._num_keys, -1, length, size)
        k_NKLD, v_NKLD = context[0]
        before = (grouped.flatten(2, 3) @ k_NKLD.transpose(-1, -2)).view(*grouped.shape[:4], length) + bias_LL
        own = torch.stack([(grouped * k[:, :, None]).sum(-1) for k, _ in context[1:]], -1)
        own = F.pad(own, (0, -own.shape[-1] % 8), value=-torch.inf)  # products of odd sizes are slow
        share = torch.cat([before, own], -1).softmax(-1)
        out = (share[..., :length].flatten(2, 3) @ v_NKLD).view(grouped.shape)
        for i, (_, v) in enumerate(context[1:]):
            out = out + share[..., length + i, None] * v[:, :, None]
        return out.reshape(q_NALD.shape)

    def logits(self, stream_NLH: Tensor) -> Tensor:
        """Logits of the draft vocabulary [N, L, C]."""
        return F.linear(self._normed(stream_NLH, "norm"), self.unembed_CH)

    def save(self, folder: Path) -> None:
        """Write the head in the engine's format: bf16, with the config of the head that it started from."""
        tensors = {name: t.detach().to("cpu", DTYPE).contiguous() for name, t in self.weights.items()}
        partial = folder / f"{WEIGHTS}.partial"
        save_file(
            tensors | {name: t.cpu() for name, t in self._maps.items()}, partial, metadata={"format": "pt"}
        )
        partial.chmod(0o644)
        partial.replace(folder / WEIGHTS)
        if not (folder / "config.json").exists():
            shutil.copyfile(self._folder / "config.json", folder / "config.json")


class Draft(NamedTuple):
    """Logits of one pass at each position, and their targets. `p`: the target's probabilities of the draft vocabulary;
    `best`: its argmax over all; `is_text`: the position is in a text; `is_answer`: the drafted token is in its
    answer."""

    logits_NLC: Tensor
    p_NLC: Tensor
    best_NL: Tensor
    is_text_NL: Tensor
    is_answer_NL: Tensor


def drafts(
    target: Target,
    head: Head,
    texts: Sequence[Text],
    settings: Settings,
    *,
    noise: float = 0.0,
    temperature: float = 1.0,
) -> Iterator[Draft]:
    """The passes over some texts. The target computes its states on the fly; none are stored on disk."""
    tokens_NL, lengths_N, num_prompt_N = _padded(texts, target.device)
    with torch.no_grad():
        last_NLH, taps = target.read(tokens_NL, head.taps)
        p_NLC, best_NL = _wanted(target, head, last_NLH, temperature)
        if noise:
            taps = [_noisy(tap, noise) for tap in taps]
    length = tokens_NL.shape[1]
    bias_LL = torch.full((length, length), -torch.inf, dtype=DTYPE, device=target.device).triu(1)
    stream_NLH = head.fuse(taps)
    context: list[tuple[Tensor, Tensor]] = []
    place_1L = torch.arange(length, device=target.device)[None]
    for number in range(settings.num_drafts):
        ahead = 1 + number  # offset of the last token known to this pass
        stream_NLH = head.step(number, _ahead(tokens_NL, ahead), stream_NLH, context, bias_LL)
        yield Draft(
            head.logits(stream_NLH),
            _ahead(p_NLC, ahead),
            _ahead(best_NL, ahead),
            place_1L + ahead < lengths_N[:, None],
            place_1L + ahead + 1 >= num_prompt_N[:, None],
        )


def _padded(texts: Sequence[Text], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Texts as padded tensors: (tokens_NL, lengths_N, num_prompt_N)."""
    longest = up_to(max(len(text.tokens_T) for text in texts), 16)
    tokens_NL = torch.zeros(len(texts), longest, dtype=torch.int64)
    for i, text in enumerate(texts):
        tokens_NL[i, : len(text.tokens_T)] = text.tokens_T
    lengths_N = torch.tensor([len(text.tokens_T) for text in texts])
    num_prompt_N = torch.tensor([text.num_prompt for text in texts])
    return tokens_NL.to(device), lengths_N.to(device), num_prompt_N.to(device)


def _wanted(target: Target, head: Head, last_NLH: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(the target's probabilities of the draft vocabulary [N, L, C], its argmax over all [N, L])."""
    p, best = [], []
    for part in last_NLH.flatten(0, 1).split(PARTS):
        logits = F.linear(part, target.unembed_VH)
        best.append(logits.argmax(-1))
        total = (logits.float() / temperature).logsumexp(-1, keepdim=True)
        p.append((F.linear(part, head.unembed_CH).float() / temperature - total).exp().to(DTYPE))
    shape = last_NLH.shape[:2]
    return torch.cat(p).view(*shape, -1), torch.cat(best).view(shape)


def _noisy(tap_NLH: Tensor, share: float) -> Tensor:
    size_NL1 = tap_NLH.float().square().mean(-1, keepdim=True).sqrt().to(DTYPE)
    return tap_NLH + share * size_NL1 * torch.randn_like(tap_NLH)


def _ahead(t: Tensor, num: int) -> Tensor:
    """`t` shifted by `num` positions to the left, with zeros at the end."""
    return torch.cat([t[:, num:], t.new_zeros(t.shape[0], num, *t.shape[2:])], 1)
