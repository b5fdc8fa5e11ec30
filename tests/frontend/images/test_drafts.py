"""What is drafted after images. By law 1 a wrong embedding, position or feature of a drafter's rows leaves the answer
alone, so drafts are held against those of heads computed anew, over states that transformers gives.

Shapes: T rows, H hidden size, D head size, X whatever width a piece is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from draftproof import LLM, SamplingParams
from tests.frontend.images.cases import BARE, FAMILIES, PROMPTS, logits_of, placed
from tests.made import vision
from tests.made.vision import INTERLEAVED, MROPE
from tests.slow import some

MODELS = {"qwen2_5_vl": vision.qwen2_5_vl, "qwen3_vl": vision.qwen3_vl}
ROPES = {"qwen2_5_vl": MROPE, "qwen3_vl": INTERLEAVED}
FLAT = {"rope_type": "default", "rope_theta": 10000.0}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
K = 3
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 7, "max_num_seqs": 3}


@pytest.fixture(scope="module", params=MODELS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(transformers' model, its folder), of each family with several axes."""
    folder = tmp_path_factory.mktemp(request.param)
    return MODELS[request.param](folder), folder


def test_a_target_that_drafts_for_itself_is_always_right(target: tuple[Any, Path]) -> None:
    check_own_drafts(target[1], {}, CHUNKS)


@pytest.mark.parametrize("family", ["llava", "pixtral", "mistral3", "gemma4, causal", "gemma3", "gemma4"])
def test_so_is_one_whose_rows_stand_as_text_does(family: str, tmp_path: Path) -> None:
    FAMILIES[family](tmp_path)
    check_own_drafts(tmp_path, *([{}] if family in ("gemma3", "gemma4") else []), CHUNKS)


def test_an_encoder_that_makes_other_rows_of_an_image_is_not_asked(tmp_path: Path) -> None:
    vision.mistral3(tmp_path / "target")
    vision.mistral3(tmp_path / "draft", merged=1)
    config = {"model": str(tmp_path / "draft"), "num_speculative_tokens": K}
    with LLM(str(tmp_path / "target"), dtype="float32", speculative_config=config) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.stats.speculation.num_draft_tokens > 0 and llm.stats.num_drafter_faults == 0
        assert not llm.engine.runner.items._own


def check_own_drafts(folder: Path, *forms: dict[str, Any]) -> None:
    """forms: settings of engines."""
    config = {"model": str(folder), "num_speculative_tokens": K}
    for settings in forms:
        with LLM(str(folder), dtype="float32", speculative_config=config, **settings) as llm:
            assert len(llm.engine.runner.items._own) == 1, "it has its own encoder"
            for prompts in (PROMPTS, PROMPTS, PROMPTS[4:], PROMPTS[4:]):  # then inside of what is cached
                llm.generate(prompts, GREEDY, use_tqdm=False)
            speculation = llm.stats.speculation
            assert speculation.num_draft_tokens > 60 and llm.stats.num_cached_tokens > 0
            assert speculation.num_accepted_tokens == speculation.num_draft_tokens
            assert llm.stats.num_drafter_faults == 0


class States(NamedTuple):
    """What a head may read of a text: what its rows carry, the streams entering each layer and leaving the last one,
    the state after the final norm, and the angles by which rows turn."""

    embedded_TH: Tensor
    streams: list[Tensor]
    final_TH: Tensor
    cos_TD: Tensor
    sin_TD: Tensor


def states_of(
    model: Any, folder: Path, given: Mapping[str, Any], answer: list[int]
) -> tuple[list[int], States]:
    """(all ids, their states) of a prompt and its answer."""
    prompt, found = placed(model, folder, given)
    body = model.model.language_model
    streams, last, angles = list[Tensor](), list[Tensor](), list[tuple[Tensor, Tensor]]()
    hooks = [
        part.register_forward_pre_hook(
            lambda module, given, kw: streams.append(given[0][0]), with_kwargs=True
        )
        for part in (*body.layers, body.norm)
    ]
    hooks.append(body.norm.register_forward_hook(lambda module, given, out: last.append(out[0])))
    hooks.append(body.rotary_emb.register_forward_hook(lambda module, given, out: angles.append(out)))
    logits_of(model, prompt + answer, found)
    for hook in hooks:
        hook.remove()
    cos, sin = angles[0]
    if cos.ndim == 4:  # an axis each, which the family joins when it turns
        section = 2 * model.config.text_config.rope_parameters["mrope_section"]
        cos, sin = (
            torch.cat([m[i % 3] for i, m in enumerate(x.split(section, dim=-1))], dim=-1) for x in (cos, sin)
        )
    return prompt + answer, States(streams[0], streams, last[0], cos[0], sin[0])


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


class Network:
    """A head's tensors, and a layer of them over rows that are all there."""

    def __init__(self, folder: str, layer: str, model: Any) -> None:
        self.tensors = load_file(Path(folder) / "model.safetensors")
        self.embed_VH = model.get_input_embeddings().weight.detach()
        self.head_VH = self.tensors.get("lm_head.weight", model.get_output_embeddings().weight.detach())
        self._layer = layer

    def norm(self, name: str, x: Tensor) -> Tensor:
        return normed(x, self.tensors[f"{name}.weight"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def layer(self, x_TX: Tensor, residual_TH: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        name, T = self._layer, len(x_TX)
        q, k, v = (self.linear(f"{name}.self_attn.{part}_proj", x_TX).view(T, -1, 16) for part in "qkv")
        if f"{name}.self_attn.q_norm.weight" in self.tensors:
            q, k = (self.norm(f"{name}.self_attn.{part}_norm", x) for part, x in (("q", q), ("k", k)))
        q, k = (self._turned(x, cos_TD[:, None], sin_TD[:, None]) for x in (q, k))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        seen = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )
        mixed_TH = self.linear(f"{name}.self_attn.o_proj", seen[0].transpose(0, 1).reshape(T, -1))
        residual_TH = residual_TH + mixed_TH
        x_TH = self.norm(f"{name}.post_attention_layernorm", residual_TH)
        gate, up = (self.linear(f"{name}.mlp.{part}_proj", x_TH) for part in ("gate", "up"))
        return residual_TH + self.linear(f"{name}.mlp.down_proj", functional.silu(gate) * up)

    @staticmethod
    def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # rows -> (for logits, fed back)


def eagle3(net: Network) -> tuple[Callable[[States], Tensor], Step]:
    def features(s: States) -> Tensor:
        return net.linear("fc", torch.cat([s.streams[i] for i in (1, 2, 3)], dim=-1))

    def step(embedded: Tensor, feature: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat(
            (net.norm("midlayer.input_layernorm", embedded), net.norm("midlayer.hidden_norm", feature)), -1
        )
        stream = net.layer(x, feature, cos, sin)
        return net.norm("norm", stream), stream

    return features, step


def eagle1(net: Network) -> tuple[Callable[[States], Tensor], Step]:
    def step(embedded: Tensor, feature: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        fused = net.linear("fc", torch.cat((embedded, feature), -1))
        stream = net.layer(fused, fused, cos, sin)
        return stream, stream

    return lambda s: s.final_TH, step


def mtp(net: Network) -> tuple[Callable[[States], Tensor], Step]:
    name = "mtp_layers.0"

    def step(embedded: Tensor, feature: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        parts = net.norm(f"{name}.token_layernorm", embedded), net.norm(f"{name}.hidden_layernorm", feature)
        fused = net.linear(f"{name}.input_proj", torch.cat(parts, -1))
        stream = net.layer(net.norm(f"{name}.input_layernorm", fused), fused, cos, sin)
        out = net.norm(f"{name}.final_layernorm", stream)
        return out, out

    return lambda s: s.streams[-1], step


def mtp_in_target(net: Network) -> tuple[Callable[[States], Tensor], Step]:
    def step(embedded: Tensor, feature: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        parts = net.norm("mtp.pre_fc_norm_embedding", embedded), net.norm("mtp.pre_fc_norm_hidden", feature)
        fused = net.linear("mtp.fc", torch.cat(parts, -1))
        out = net.norm(
            "mtp.norm", net.layer(net.norm("mtp.layers.0.input_layernorm", fused), fused, cos, sin)
        )
        return out, out

    return lambda s: s.final_TH, step


HEADS: dict[str, tuple[Callable[..., str], str, Callable[[Network], Any]]] = {
    "eagle3": (vision.eagle3, "midlayer", eagle3),
    "eagle1": (vision.eagle1, "layers.0", eagle1),
    "mtp": (vision.mtp, "mtp_layers.0", mtp),
    "mtp in target": (vision.mtp_in_target, "mtp.layers.0", mtp_in_target),
}


def expected(net: Network, kind: str, ids: list[int], s: States, known: int, num: int) -> list[int]:
    """`num` drafts after so many ids, of which the last was not yet a row of the target's. The row at p carries what
    stands at p + 1, and stands where the target's row at p does."""
    features, step = HEADS[kind][2](net)
    feature = features(s)[: known - 1]
    embedded = s.embedded_TH[1:known]
    drafts = list[int]()
    for _ in range(num):
        rows = len(feature)
        out, fed_back = step(embedded, feature, s.cos_TD[:rows], s.sin_TD[:rows])
        drafts.append(int((out[-1] @ net.head_VH.T).argmax()))
        embedded = torch.cat((embedded, net.embed_VH[drafts[-1:]]))
        feature = torch.cat((feature, fed_back[-1:]))
    return drafts


def proposals(llm: LLM, prompt: Any) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """(the answer, (number of known ids, drafts) of each round)."""
    request = llm.requests.add(prompt, GREEDY)
    found = list[tuple[int, list[int]]]()
    answer = list[int]()
    while not request.finished:
        llm.requests.step()
        for running in llm.engine.scheduler.running:
            if running.num_outputs:
                known, num = len(running.tokens), running.num_drafts
                found.append((known, llm.engine.runner.known_drafts(running.slot, known, num)))
                answer = list(running.tokens)
    return answer, found


def drafted(
    llm: LLM, model: Any, folder: Path, num_beyond: int
) -> Iterator[tuple[list[int], States, list[tuple[int, list[int]]]]]:
    """For each of three prompts: ids, transformers' states of them with `num_beyond` rows more, and the proposals."""
    for given in (PROMPTS[1], PROMPTS[4], BARE):
        known_ids, found = proposals(llm, given)
        size = len(placed(model, folder, given)[0])
        yield *states_of(model, folder, given, known_ids[size:] + [0] * num_beyond), found


CASES = [
    *itertools.product(HEADS, ["embeddings"], ["own"], [2048, 7]),
    *itertools.product(HEADS, ["tokens"], ["own"], [2048]),
    *itertools.product(["eagle3", "eagle1"], ["embeddings"], ["flat"], [7]),
]
FEW = [
    *itertools.product(HEADS, ["embeddings"], ["own"], [7]),
    *itertools.product(["eagle3", "mtp"], ["tokens"], ["own"], [2048]),
    *itertools.product(["eagle1"], ["embeddings"], ["flat"], [7]),
]


@pytest.mark.parametrize(("kind", "inputs", "axes", "chunk"), some(CASES, FEW))
def test_drafts_are_those_of_a_head_computed_anew(
    target: tuple[Any, Path], tmp_path: Path, kind: str, inputs: str, axes: str, chunk: int
) -> None:
    model, folder = target
    make, layer, _ = HEADS[kind]
    rope = ROPES[model.config.model_type] if axes == "own" else FLAT
    head = make(tmp_path / kind, folder if kind.startswith("mtp") else rope)
    net = Network(head, layer, model)
    config = {"model": head, "num_speculative_tokens": K, "image_inputs": inputs}
    if kind == "mtp in target":
        folder = Path(head)
        config["method"] = "mtp"
    num_compared = 0
    with (
        LLM(str(folder), dtype="float32", speculative_config=config, max_num_batched_tokens=chunk) as llm,
        torch.no_grad(),
    ):
        for number, (ids, s, found) in enumerate(drafted(llm, model, folder, K)):
            if axes == "flat":
                s = flat(s)
            if inputs == "tokens":
                s = s._replace(embedded_TH=net.embed_VH[ids])
            for known, drafts in found:
                assert drafts == expected(net, kind, ids, s, known, len(drafts)), (number, known)
                num_compared += len(drafts)
        assert llm.stats.num_drafter_faults == 0 and num_compared > 30


def flat(s: States) -> States:
    """Rows that turn by their place."""
    angles = torch.outer(torch.arange(len(s.cos_TD)).float(), 10000.0 ** -(torch.arange(0, 16, 2) / 16))
    angles = torch.cat((angles, angles), dim=-1)
    return s._replace(cos_TD=angles.cos(), sin_TD=angles.sin())


def block_drafts(net: Network, ids: list[int], s: States, known: int, num: int) -> list[int]:
    """DFlash's: masks behind the newest token see each other, and what is made of the target's states before them."""
    features = net.norm("hidden_norm", net.linear("fc", torch.cat((s.streams[1], s.streams[2]), -1)))[
        : known - 1
    ]
    embedded = net.embed_VH[[ids[known - 1], 94, 94, 94]]
    x, at = net.norm("layers.0.input_layernorm", embedded), "layers.0.self_attn"
    q, (k, v) = (
        net.linear(f"{at}.q_proj", x),
        (
            torch.cat((net.linear(f"{at}.{part}_proj", features), net.linear(f"{at}.{part}_proj", x)))
            for part in "kv"
        ),
    )
    q, k, v = (each.view(len(each), -1, 16) for each in (q, k, v))
    cos, sin = s.cos_TD[: known + 3, None], s.sin_TD[: known + 3, None]
    q = net._turned(net.norm(f"{at}.q_norm", q), cos[known - 1 :], sin[known - 1 :])
    k = net._turned(net.norm(f"{at}.k_norm", k), cos, sin)
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    seen = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1).reshape(4, -1)
    stream = embedded + net.linear(f"{at}.o_proj", seen)
    x = net.norm("layers.0.post_attention_layernorm", stream)
    gate, up = (net.linear(f"layers.0.mlp.{part}_proj", x) for part in ("gate", "up"))
    stream = stream + net.linear("layers.0.mlp.down_proj", functional.silu(gate) * up)
    logits = net.norm("norm", stream) @ net.head_VH.T
    return logits[1 : 1 + num].argmax(-1).tolist()


@pytest.mark.parametrize("chunk", some([2048, 7], [7]))
def test_blocks_are_those_of_a_head_computed_anew(
    target: tuple[Any, Path], tmp_path: Path, chunk: int
) -> None:
    model, folder = target
    head = vision.dflash(tmp_path / "dflash", ROPES[model.config.model_type])
    net = Network(head, "layers.0", model)
    config = {"model": head, "num_speculative_tokens": K}
    num_compared = 0
    with (
        LLM(str(folder), dtype="float32", speculative_config=config, max_num_batched_tokens=chunk) as llm,
        torch.no_grad(),
    ):
        for number, (ids, s, found) in enumerate(drafted(llm, model, folder, K + 1)):
            for known, drafts in found:
                assert drafts == block_drafts(net, ids, s, known, len(drafts)), (number, known)
                num_compared += len(drafts)
    assert num_compared > 30
