"""Small random models that read images, made with transformers, and drafters for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.made.native import Maker

VOCAB = 96
IMAGE = 90  # token id that stands for a row of an image
VIDEO = 91  # for a row of a video
BLANK = 5  # Gemma 4's id for padding
BREAK, END = 94, 95  # Pixtral's ids after a line of an image, and after the last
HIDDEN = 64
_TEXT: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
INTERLEAVED = {**MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    **{"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2},
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def qwen2_5_vl(folder: Path, seed: int = 7, **text: Any) -> Any:
    """transformers' model, saved in `folder` with its image processor. `text`: other sizes of the text config."""
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": MROPE, **text},
        vision_config={
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4},
            **{"window_size": 16, "fullatt_block_indexes": [1]},
            "out_hidden_size": text.get("hidden_size", HIDDEN),
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    return _saved(model, folder, _QWEN_PROCESSOR, seed)


_QWEN3_ENCODER: dict[str, Any] = {
    **{"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4},
    **{"out_hidden_size": HIDDEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]},
}
_QWEN3_IDS = {
    **{"image_token_id": IMAGE, "video_token_id": VIDEO},
    **{"vision_start_token_id": 92, "vision_end_token_id": 93},
}


def qwen3_vl(folder: Path, seed: int = 7, **text: Any) -> Any:
    """Like `qwen2_5_vl`, with interleaved rotary axes, and encoder features added after two layers (DeepStack)."""
    config = transformers.Qwen3VLConfig(
        text_config={
            **{**_TEXT, "head_dim": 16, "rope_parameters": INTERLEAVED},
            **text,
        },
        vision_config={**_QWEN3_ENCODER, "out_hidden_size": text.get("hidden_size", HIDDEN)},
        **_QWEN3_IDS,
    )
    model = transformers.Qwen3VLForConditionalGeneration(config)
    return _saved(model, folder, _QWEN_PROCESSOR, seed)


def qwen3_vl_moe(folder: Path, *, published: bool = True) -> Any:
    """Like `qwen3_vl`, with experts. published: files in its authors' layout, else in transformers'."""
    config = transformers.Qwen3VLMoeConfig(
        text_config={
            **{**_TEXT, "head_dim": 16, "rope_parameters": INTERLEAVED, "moe_intermediate_size": 48},
            **{"num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
        },
        vision_config=_QWEN3_ENCODER,
        **_QWEN3_IDS,
    )
    model = _saved(transformers.Qwen3VLMoeForConditionalGeneration(config), folder, _QWEN_PROCESSOR)
    raw = json.loads((folder / "config.json").read_text())
    text = raw["text_config"]
    if not published:
        del text["rope_parameters"]["mrope_interleaved"]  # they are interleaved in any case
    else:
        tensors = load_file(folder / "model.safetensors")
        turned = {name: t.mT.contiguous() for name, t in tensors.items() if ".mlp.experts." in name}
        save_file({**tensors, **turned}, folder / "model.safetensors")
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "norm_topk_prob": True}
        text["num_experts"] = text.pop("num_local_experts")
        raw["vision_config"]["model_type"] = "qwen3_vl_moe"
    (folder / "config.json").write_text(json.dumps(raw))
    return model


def llava(folder: Path, tower: str = "clip_vision_model", strategy: str = "default") -> Any:
    """Like `qwen2_5_vl`, with one rotary axis, and equally many rows for every image. strategy: which of the tower's
    rows are used."""
    config = transformers.LlavaConfig(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={
            **{"model_type": tower, "hidden_size": 32, "intermediate_size": 48},
            **{"num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        },
        vision_feature_select_strategy=strategy,
        image_token_index=IMAGE,
        image_seq_length=16,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    size = {"height": 32, "width": 32}
    processor = {"image_processor_type": "CLIPImageProcessor", "size": size, "crop_size": size}
    return _saved(model, folder, processor)


def gemma3(folder: Path) -> Any:
    """Like `llava`, with rows of an image that attend to each other, and some sliding-window layers."""
    config = transformers.Gemma3Config(
        text_config={
            **{**_TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 32, "patch_size": 4},
        },
        **{
            "mm_tokens_per_image": 16,
            "image_token_index": IMAGE,
            "boi_token_index": 92,
            "eoi_token_index": 93,
        },
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    processor = {
        **{"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
        **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    }
    return _saved(model, folder, processor)


def gemma4(folder: Path, *, sees_whole: bool = True) -> Any:
    """Like `gemma3`, with per-layer inputs and shared keys and values; images have any size, with more rows than the
    window. sees_whole: an image's rows attend to each other, in sliding-window layers only."""
    config = transformers.Gemma4Config(
        text_config={
            **{**_TEXT, "num_hidden_layers": 5, "head_dim": 16, "global_head_dim": 32, "sliding_window": 20},
            **{"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "pad_token_id": BLANK},
            **{"num_kv_shared_layers": 1, "use_bidirectional_attention": "vision" if sees_whole else None},
        },
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"num_key_value_heads": 2, "head_dim": 16, "patch_size": 2, "pooling_kernel_size": 3},
            **{"position_embedding_size": 256, "standardize": True, "use_clipped_linears": True},
        },
        audio_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "output_proj_dims": 32,
        },
        **{"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 94},
        **{"boi_token_id": 92, "eoi_token_id": 93, "boa_token_id": 95, "eoa_token_index": 89},
    )
    model = transformers.Gemma4ForConditionalGeneration(config)
    model.model.vision_tower.std_bias.fill_(0.1)
    model.model.vision_tower.std_scale.fill_(0.5)
    for name, buffer in model.model.vision_tower.named_buffers():
        if name.endswith("put_max"):
            buffer.fill_(2.0)
    processor = {
        **{"image_processor_type": "Gemma4ImageProcessor", "patch_size": 2, "pooling_kernel_size": 3},
        "max_soft_tokens": 70,
    }
    return _saved(model, folder, processor, quiet=("q_norm", "k_norm"))


def gemma4_assistant(folder: Path, num_centroids: int = 0) -> Any:
    """transformers' assistant for `gemma4`, saved in `folder`. num_centroids: its tokens are grouped by this many, and
    it computes those of the best three."""
    config = transformers.Gemma4AssistantConfig(
        text_config={
            **{**_TEXT, "num_hidden_layers": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 20},
            **{"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 2},
            **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "pad_token_id": BLANK},
            "model_type": "gemma4_text",
        },
        backbone_hidden_size=HIDDEN,
        use_ordered_embeddings=num_centroids > 0,
        num_centroids=num_centroids or 2048,
        centroid_intermediate_top_k=3,
    )
    # transformers 5.23 looks for the layers whose keys are read, although all of them read another model's
    with mock.patch.object(type(config.text_config), "kv_sharing_modes", ["reuse"] * 2):
        model = transformers.Gemma4AssistantForCausalLM(config)
    if num_centroids:
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
        model.masked_embedding.token_ordering.copy_(order)
    return _saved(model, folder, {}, quiet=("q_norm", "k_norm"))


def gemma4_causal(folder: Path) -> Any:
    return gemma4(folder, sees_whole=False)


_PIXTRAL: dict[str, Any] = {
    **{"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 64, "patch_size": 4},
}
_PIXTRAL_PROCESSOR = {
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": 4,
    "size": {"longest_edge": 48},
}


def pixtral(folder: Path) -> Any:
    """Like `llava`, with images of any size, whose lines of rows end with a token."""
    config = transformers.LlavaConfig(
        text_config={**_TEXT, "model_type": "mistral", "sliding_window": None},
        vision_config=_PIXTRAL,
        **{"image_token_index": IMAGE, "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
    )
    tokenizer(folder)
    return _saved(transformers.LlavaForConditionalGeneration(config), folder, _PIXTRAL_PROCESSOR)


def mistral3(folder: Path, merged: int = 2) -> Any:
    """Like `pixtral`; a row covers `merged` patches in each direction."""
    config = transformers.Mistral3Config(
        text_config={**_TEXT, "model_type": "mistral", "sliding_window": None},
        vision_config=_PIXTRAL,
        **{"image_token_index": IMAGE, "spatial_merge_size": merged, "tie_word_embeddings": False},
    )
    tokenizer(folder)
    return _saved(transformers.Mistral3ForConditionalGeneration(config), folder, _PIXTRAL_PROCESSOR)


def _saved(
    model: Any, folder: Path, processor: Mapping[str, Any], seed: int = 7, quiet: tuple[str, ...] = ()
) -> Any:
    """Save the model with weights that keep vectors' norms, so that answers depend on all of it; `quiet`: norms whose
    weights are less than 1."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=random)
            if tensor.ndim == 1:
                tensor.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))
                tensor.mul_(0.4 if any(part in name for part in quiet) else 1.0)
            else:
                tensor.copy_(noise * tensor[0].numel() ** -0.5)
        model.get_output_embeddings().weight[IMAGE:] = (
            0.0  # transformers takes an id of an image for one more row
        )
    model.eval().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def rows_of_images(model: Any, found: Mapping[str, Any], count: int) -> list[list[int]]:
    """The token ids for each image's rows, by transformers' processor."""
    if "image_sizes" in found:
        side = 4 * getattr(model.config, "spatial_merge_size", 1)
        return [
            ([IMAGE] * int(width // side) + [BREAK]) * int(height // side - 1)
            + [IMAGE] * int(width // side)
            + [END]
            for height, width in found["image_sizes"]
        ]
    if "image_grid_thw" in found:
        return [[IMAGE] * n for n in (found["image_grid_thw"].prod(1) // 4).tolist()]
    if "num_soft_tokens_per_image" in found:
        return [[IMAGE] * int(n) for n in found["num_soft_tokens_per_image"]]
    has_own = getattr(model.config.vision_config, "model_type", "") == "clip_vision_model"
    is_less = getattr(model.config, "vision_feature_select_strategy", "full") == "default"
    return [[IMAGE] * (16 + has_own - is_less)] * count


def tokenizer(folder: Path) -> None:
    """Save a tokenizer of words w0, w1, ... and a chat template that marks images."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {f"w{i}": i for i in range(VOCAB)}
    for text, i in (("<img>", IMAGE), ("<vid>", VIDEO), ("[IMG_BREAK]", BREAK), ("[IMG_END]", END)):
        words[text] = words.pop(f"w{i}")
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<img>", "<vid>"])
    made.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for p in m['content'] %}{% if p['type'] == 'image' %} <img> "
        "{% elif p['type'] == 'video' %} <vid> {% else %}{{ p['text'] }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def text_draft(folder: Path) -> str:
    """A text-only model with the same vocabulary."""
    config = transformers.Qwen2Config(**{**_TEXT, "num_hidden_layers": 1})
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def _attention(made: Maker, prefix: str, width: int = HIDDEN) -> None:
    """Add attention tensors. width: of the input."""
    for name, rows in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2)):
        made.add(f"{prefix}.self_attn.{name}_proj.weight", rows, width)
    made.add(f"{prefix}.self_attn.o_proj.weight", HIDDEN, HIDDEN)
    made.mlp(f"{prefix}.mlp", 96)


def _head(made: Maker, folder: Path, raw: Mapping[str, Any]) -> str:
    folder.mkdir()
    save_file(made.tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


def eagle1(folder: Path, rope: Mapping[str, Any]) -> str:
    """A random EAGLE-1 head."""
    made = Maker(1.0)
    made.add("fc.weight", HIDDEN, 2 * HIDDEN)
    made.add("fc.bias", HIDDEN)
    _attention(made, "layers.0")
    made.add("layers.0.post_attention_layernorm.weight", HIDDEN)
    raw = {**_TEXT, "num_hidden_layers": 1, "model_type": "llama", "rope_parameters": rope}
    return _head(made, folder, raw)


def mtp(folder: Path, target: Path) -> str:
    """A random MTP module of the target's kind, in its own files."""
    text = json.loads((target / "config.json").read_text())
    text = text.get("text_config", text)
    made = Maker(1.0)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        made.add(f"mtp_layers.0.{name}.weight", HIDDEN)
    made.add("mtp_layers.0.input_proj.weight", HIDDEN, 2 * HIDDEN)
    _attention(made, "mtp_layers.0")
    made.norms("mtp_layers.0")
    own = {"qwen3_vl_text": (("q_norm.weight", 16), ("k_norm.weight", 16))}
    biases = (("q_proj.bias", HIDDEN), ("k_proj.bias", HIDDEN // 2), ("v_proj.bias", HIDDEN // 2))
    for name, size in own.get(text["model_type"], biases):
        made.add(f"mtp_layers.0.self_attn.{name}", size)
    raw = {"speculators_model_type": "mtp", "transformer_layer_config": text, "num_nextn_predict_layers": 1}
    return _head(made, folder, raw)


def mtp_in_target(folder: Path, target: Path) -> str:
    """The target with a random MTP module in its files."""
    shutil.copytree(target, folder)
    raw = json.loads((target / "config.json").read_text())
    raw.get("text_config", raw)["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(raw))
    around = {"token_layernorm": "pre_fc_norm_embedding", "hidden_layernorm": "pre_fc_norm_hidden"}
    around |= {"final_layernorm": "norm", "input_proj": "fc"}
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in load_file(Path(mtp(folder / "module", target)) / "model.safetensors").items():
        stem, _, kind = name.removeprefix("mtp_layers.0.").rpartition(".")
        tensors[f"mtp.{around[stem]}.{kind}" if stem in around else f"mtp.layers.0.{stem}.{kind}"] = tensor
    shutil.rmtree(folder / "module")
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def dflash(folder: Path, rope: Mapping[str, Any]) -> str:
    """A random DFlash head."""
    made = Maker(1.0)
    made.add("fc.weight", HIDDEN, 2 * HIDDEN)
    made.add("hidden_norm.weight", HIDDEN)
    made.add("norm.weight", HIDDEN)
    _attention(made, "layers.0")
    made.norms("layers.0")
    for name in ("q_norm", "k_norm"):
        made.add(f"layers.0.self_attn.{name}.weight", 16)
    own = {"target_layer_ids": [0, 1], "mask_token_id": 94}
    raw = {
        **{**_TEXT, "num_hidden_layers": 1, "model_type": "qwen3", "head_dim": 16},
        **{"architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": own},
        "rope_parameters": rope,
    }
    return _head(made, folder, raw)


def eagle3(folder: Path, rope: Mapping[str, Any]) -> str:
    """A random EAGLE-3 head."""
    made = Maker(1.0)
    made.add("fc.weight", HIDDEN, 3 * HIDDEN)
    _attention(made, "midlayer", 2 * HIDDEN)
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        made.add(f"midlayer.{name}.weight", HIDDEN)
    made.add("norm.weight", HIDDEN)
    made.add("lm_head.weight", VOCAB, HIDDEN)
    raw = {
        **_TEXT,
        "num_hidden_layers": 1,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "rope_parameters": rope,
    }
    return _head(made, folder, raw)
