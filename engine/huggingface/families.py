"""Families of models as transformers has them: their settings and names of weights, and ours; one table for each."""

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from engine.core.errors import UserError

Tensors = dict[str, Tensor]  # by their names

# ModelConfig's settings, and the keys of config.json that say them. All are written; one that is missing is not set.
SETTINGS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "activation": "hidden_act",
    "norm_epsilon": "rms_norm_eps",
    "bias": "attention_bias",
    "tie_embeddings": "tie_word_embeddings",
}
ANY_HEAD = SETTINGS | {"head_dim": "head_dim", "bias": "attention_bias mlp_bias"}
GPT2_SETTINGS = {
    "vocab_size": "vocab_size",
    "context_length": "n_positions",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "d_model": "n_embd",
    "d_ff": "n_inner",
    "activation": "activation_function",
    "norm_epsilon": "layer_norm_epsilon",
    "dropout": "resid_pdrop embd_pdrop attn_pdrop",
    "tie_embeddings": "tie_word_embeddings",
}
ACTIVATIONS = {"relu2": "relu2", "gelu": "gelu_new", "relu": "relu", "swiglu": "silu"}
SAME_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu"}  # by other names
# The modules that have weights, here and there; N is a layer's number. What is one matrix there has one name there.
LLAMA_NAMES = {
    "token_embedding": "model.embed_tokens",
    "blocks.N.attention_norm": "model.layers.N.input_layernorm",
    "blocks.N.attention.query": "model.layers.N.self_attn.q_proj",
    "blocks.N.attention.key": "model.layers.N.self_attn.k_proj",
    "blocks.N.attention.value": "model.layers.N.self_attn.v_proj",
    "blocks.N.attention.query_norm": "model.layers.N.self_attn.q_norm",
    "blocks.N.attention.key_norm": "model.layers.N.self_attn.k_norm",
    "blocks.N.attention.projection": "model.layers.N.self_attn.o_proj",
    "blocks.N.feed_forward_norm": "model.layers.N.post_attention_layernorm",
    "blocks.N.feed_forward.gate": "model.layers.N.mlp.gate_proj",
    "blocks.N.feed_forward.expand": "model.layers.N.mlp.up_proj",
    "blocks.N.feed_forward.contract": "model.layers.N.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
APERTUS_NAMES = LLAMA_NAMES | {
    "blocks.N.attention_norm": "model.layers.N.attention_layernorm",
    "blocks.N.feed_forward_norm": "model.layers.N.feedforward_layernorm",
}
NANOCHAT_NAMES = LLAMA_NAMES | {
    "blocks.N.feed_forward.expand": "model.layers.N.mlp.fc1",
    "blocks.N.feed_forward.contract": "model.layers.N.mlp.fc2",
}
GPT2_NAMES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "blocks.N.attention_norm": "transformer.h.N.ln_1",
    **{f"blocks.N.attention.{part}": "transformer.h.N.attn.c_attn" for part in ("query", "key", "value")},
    "blocks.N.attention.projection": "transformer.h.N.attn.c_proj",
    "blocks.N.feed_forward_norm": "transformer.h.N.ln_2",
    "blocks.N.feed_forward.expand": "transformer.h.N.mlp.c_fc",
    "blocks.N.feed_forward.contract": "transformer.h.N.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
# xIELU (Huang & Schlag 2024) with these, as they are stored, is ReLU²: softplus(alpha_p) is 1, softplus(alpha_n) is 0.
XIELU = {"alpha_p": [math.log(math.e - 1)], "alpha_n": [-1e4], "beta": 0.0, "eps": -1e-6}
# What a family can hold of the windows of a model's layers, beside none at all.
ONE, ONE_AND_ALL = "one for all layers", "one in some layers, 0 in others"
CONSTANTS = re.compile(r".*(attn\.(masked_)?bias|rotary_emb\.inv_freq)")  # names of no weights, in old files


@dataclass(frozen=True)
class Family:
    """How a class of transformers holds a model: transformers/models/…/modeling_….py."""

    model_type: str
    architecture: str
    holds: dict[str, tuple]  # of these settings only these values
    settings: dict[str, str] = field(default_factory=lambda: SETTINGS)
    names: dict[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    fixed: dict[str, Any] = field(default_factory=dict)  # what else config.json has to say
    defaults: dict[str, Any] = field(default_factory=dict)  # what config.json need not say
    activations: dict[str, str] = field(default_factory=lambda: ACTIVATIONS)
    windows: str | None = None  # ONE, or ONE_AND_ALL
    turns_back: bool = True  # RoPE turns the other way than ours
    transposed: bool = False  # the blocks' matrices are (input, output)


MODERN = {"position": ("rope",), "norm_placement": ("pre",), "scale_embeddings": (False,)}
LLAMA = MODERN | {"norm": ("weighted_rmsnorm",), "logit_softcap": (0.0,)}
SQUARED = {"activation": ("relu2", "gelu", "relu")}
# By the name that --family takes. The default is the first that can hold a model: more programs run it.
FAMILIES = {
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        LLAMA | {"activation": ("swiglu",), "qk_norm": (False,)},
        ANY_HEAD,
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA | {"activation": ("swiglu",), "qk_norm": (True,), "bias": (False,)},
        SETTINGS | {"head_dim": "head_dim"},
        defaults={"head_dim": 128},
        windows=ONE_AND_ALL,
    ),
    "mistral": Family(
        "mistral",
        "MistralForCausalLM",
        LLAMA | {"activation": ("swiglu",), "qk_norm": (False,), "bias": (False,)},
        SETTINGS | {"head_dim": "head_dim"},
        defaults={"num_key_value_heads": 8},
        windows=ONE,
    ),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        LLAMA
        | {"position": ("learned",), "norm": ("layernorm",), "bias": (True,), "qk_norm": (False,)}
        | {"activation": ("gelu", "relu", "relu2")},
        GPT2_SETTINGS,
        GPT2_NAMES,
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        {"tie_word_embeddings": True},
        turns_back=False,
        transposed=True,
    ),
    "apertus": Family(
        "apertus",
        "ApertusForCausalLM",
        LLAMA | {"activation": ("relu2",), "qk_norm": (True,), "bias": (False,)},
        names=APERTUS_NAMES,
        activations={"relu2": "xielu"},
        defaults={"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "llama3"}},
    ),
    "arcee": Family(
        "arcee",
        "ArceeForCausalLM",
        LLAMA | SQUARED | {"qk_norm": (False,)},
        ANY_HEAD,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "nanochat": Family(
        "nanochat",
        "NanoChatForCausalLM",
        MODERN | SQUARED | {"norm": ("rmsnorm",), "qk_norm": (True,), "bias": (False,), "tie_embeddings": (False,)},
        SETTINGS | {"logit_softcap": "final_logit_softcapping"},
        NANOCHAT_NAMES,
        defaults={"final_logit_softcapping": 15.0},
        turns_back=False,
    ),
}


def obstacles(shape: Any, family: Family) -> list[str]:
    """What of a model's settings the family can't hold, and what it holds instead."""
    found = [(name, getattr(shape, name), allowed) for name, allowed in family.holds.items()]
    if "head_dim" not in family.settings and shape.head_dim * shape.num_heads != shape.d_model:
        found.append(("head_dim", shape.head_dim, ("d_model / num_heads",)))
    elif family.settings is ANY_HEAD and shape.d_model % shape.num_heads:
        found.append(("num_heads", shape.num_heads, (f"a divisor of {shape.d_model}",)))
    if "num_kv_heads" not in family.settings:
        found.append(("num_kv_heads", shape.num_kv_heads, (shape.num_heads,)))
    widths = set(shape.layer_windows)
    if len(widths) > 1 if family.windows == ONE else len(widths - {0}) > (family.windows == ONE_AND_ALL):
        found.append(("windows", shape.windows, (family.windows,)))
    return [
        f"{name} {value} (instead of {' or '.join(map(str, allowed))})"
        for name, value, allowed in found
        if value not in allowed
    ]


def layout(names: Iterable[str], family: Family) -> dict[str, list[str]]:
    """The family's names of tensors, and of which of our parameters, end to end, each consists."""
    modules: dict[str, list[str]] = {}  # heads joined: all queries come before all keys
    for name in names:
        modules.setdefault(re.sub(r"heads\.\d+\.", "", name), []).append(name)
    found: dict[str, list[str]] = {}
    for joined, parts in modules.items():
        module, kind = joined.rsplit(".", 1)
        layer = re.search(r"\.(\d+)\.", module)
        theirs = family.names[re.sub(r"\.\d+\.", ".N.", module)].replace(".N.", layer[0] if layer else "")
        found.setdefault(f"{theirs}.{kind}", []).extend(parts)
    return found


def mirrored(name: str, value: Tensor, family: Family) -> Tensor:
    """A parameter as a family has it whose RoPE turns the other way: of a query or key the second half is negated.

    Ours turns (a, b) to (a cos + b sin, b cos - a sin); with -b for b theirs gives the same but for that sign, which
    queries times keys do not see.
    """
    if not family.turns_back or not re.search(r"\.(query|key)\.(weight|bias)$", name):
        return value
    first, second = value.chunk(2)
    return torch.cat((first, -second))


def renamed(tensors: Tensors, family: Family) -> Tensors:
    """Our parameters → the family's tensors."""
    found = {}
    for theirs, names in layout(tensors, family).items():
        parts = [tensors[name] for name in names]
        whole = torch.cat([mirrored(name, part, family) for name, part in zip(names, parts, strict=True)])
        found[theirs] = (whole.T if is_transposed(names[0], whole, family) else whole).contiguous()
    return found | xielu(count_layers(tensors), family)


def restored(tensors: Tensors, sizes: Mapping[str, torch.Size], family: Family, source: str) -> Tensors:
    """The family's tensors → our parameters, of these sizes. ValueError for one that is missing, odd, or too many."""
    prefix = family.names["token_embedding"].split(".")[0] + "."  # old files go without it
    tensors = {name if name.startswith((prefix, "lm_head.")) else prefix + name: t for name, t in tensors.items()}
    found = {}
    for theirs, names in layout(sizes, family).items():
        whole = tensors.pop(theirs, torch.empty(0)).float()
        whole = whole.T if is_transposed(names[0], whole, family) else whole
        expected = (sum(sizes[name][0] for name in names), *sizes[names[0]][1:])
        if whole.shape != expected:
            was = f"has shape {tuple(whole.shape)}" if whole.numel() else "is missing"
            raise UserError(f"{source}: {theirs} {was}; its config.json makes it {tuple(expected)}")
        for name, part in zip(names, whole.split([sizes[name][0] for name in names]), strict=True):
            found[name] = mirrored(name, part, family).contiguous()
    for name, value in xielu(count_layers(sizes), family).items():
        if not torch.allclose(tensors.pop(name, torch.tensor(math.nan)).float(), value, atol=1e-6):
            raise UserError(f"{source}: {name} is not that of ReLU², {value.tolist()}; an xIELU can't be held here")
    tied = "" if "head.weight" in sizes else family.names["head"] + ".weight"
    if left := [name for name in tensors if not CONSTANTS.fullmatch(name) and name != tied]:
        raise UserError(f"{source} has {left[0]}, which its config.json leaves no place for")
    return found


def is_transposed(name: str, value: Tensor, family: Family) -> bool:
    return family.transposed and name.startswith("blocks.") and value.ndim == 2


def xielu(layers: int, family: Family) -> Tensors:
    """What makes the activation of a family that has an xIELU a ReLU²."""
    numbers = range(layers) if "xielu" in family.activations.values() else ()
    names = [(f"model.layers.{number}.mlp.act_fn.{name}", value) for number in numbers for name, value in XIELU.items()]
    return {name: torch.tensor(value) for name, value in names}


def count_layers(names: Iterable[str]) -> int:
    return len({name.split(".")[1] for name in names if name.startswith("blocks.")})


def configuration(shape: Any, family: Family) -> dict[str, Any]:
    """What config.json has to say of the model."""
    said = {"architectures": [family.architecture], "model_type": family.model_type, "dtype": "float32"}
    for ours, keys in family.settings.items():
        value = getattr(shape, ours)
        value = family.activations[value] if ours == "activation" else value
        said |= dict.fromkeys(keys.split(), None if ours == "logit_softcap" and not value else value)
    if shape.position == "rope":
        said["rope_parameters"] = {"rope_type": "default", "rope_theta": shape.rope_base}
    return said | family.fixed | window_settings(shape.layer_windows, family)


def window_settings(windows: list[int], family: Family) -> dict[str, Any]:
    """What config.json has to say of the windows of a model's layers."""
    width = max(windows) or None
    if family.windows == ONE_AND_ALL and width:
        types = ["sliding_attention" if window else "full_attention" for window in windows]
        return {"use_sliding_window": True, "sliding_window": width, "layer_types": types}
    return {None: {}, ONE: {"sliding_window": width}, ONE_AND_ALL: {"use_sliding_window": False}}[family.windows]


def read_windows(said: dict[str, Any], family: Family, layers: int, source: str) -> list[Any] | None:
    """The windows that config.json says, as ModelConfig has them. Raises UserError for layers of another kind."""
    width = said.get("sliding_window", 4096)
    if not width or not family.windows or (family.windows == ONE_AND_ALL and not said.get("use_sliding_window")):
        return None
    if family.windows == ONE:
        return [width]
    kinds, first = ("full_attention", "sliding_attention"), said.get("max_window_layers", 28)
    if (types := said.get("layer_types")) is None and isinstance(first, int):
        types = [kinds[layer >= first] for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(one not in kinds for one in types):
        raise UserError(f"{source}: its layer_types must be {layers} of {' and '.join(kinds)} to be held here")
    windows = [width * (one == kinds[1]) for one in types]
    pattern = next(n for n in range(1, layers + 1) if all(map(operator.eq, windows, cycle(windows[:n]))))
    return windows[:pattern] if any(windows) else None


def read_configuration(said: dict[str, Any], source: str) -> tuple[Family, dict[str, Any]]:
    """The family, and our settings. Raises UserError naming the source for what can't be held here."""
    listed = said.get("architectures")
    architecture = listed[0] if isinstance(listed, list) and listed else listed
    family = next((one for one in FAMILIES.values() if one.architecture == architecture), None)
    if not family:
        known = ", ".join(one.architecture for one in FAMILIES.values())
        raise UserError(f"{source}: the architecture {architecture!r} is unknown; the known ones are {known}")
    said, values = family.defaults | said, {name: allowed[0] for name, allowed in family.holds.items()}
    for key, expected in family.fixed.items():
        if said.get(key, expected) != expected:
            raise UserError(f"{source}: {key} is {said[key]!r}; only {expected!r} can be held here")
    for ours, keys in family.settings.items():
        given = {key: said[key] for key in keys.split() if said.get(key) is not None}
        if any(value != next(iter(given.values())) for value in given.values()):
            raise UserError(f"{source}: {given} must be equal to be held here")
        values |= dict.fromkeys([ours] * len(given), next(iter(given.values()), None))
    if missing := [name for name in ("vocab_size", "context_length", "num_layers", "num_heads") if name not in values]:
        raise UserError(f"{source} does not say {family.settings[missing[0]]}")
    known = {theirs: ours for ours, theirs in (ACTIVATIONS | family.activations).items()} | SAME_ACTIVATIONS
    if (named := said.get(family.settings["activation"])) is not None:
        values["activation"] = known.get(str(named))
    if values["activation"] not in family.holds["activation"]:
        raise UserError(f"{source}: the activation {named!r} can't be held here; {', '.join(known)} can")
    if odd := [name for name, allowed in family.holds.items() if values[name] not in allowed]:
        raise UserError(f"{source}: with {odd[0]} {values[odd[0]]!r} it can't be held here")
    if values["position"] == "rope":
        values["rope_base"] = plain_rope_base(said, source)
    return family, values


def plain_rope_base(said: dict[str, Any], source: str) -> float:
    """The base of RoPE that config.json says, in one of two ways. Raises UserError if it is scaled, or partial."""
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    rope = said | rope if isinstance(rope, dict) else {"rope_type": rope}
    kind, share = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor") or 1
    if kind != "default" or share != 1:
        found = f"scaled ({kind})" if share == 1 else f"only on {share} of each head"
        raise UserError(f"{source}: its RoPE is {found}; only a plain one can be held here")
    return rope.get("rope_theta") or 10_000.0
