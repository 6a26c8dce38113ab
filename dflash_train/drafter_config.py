"""A drafter's shape, read from and written to the `config.json` that z-lab publishes."""

from dataclasses import dataclass
from typing import Any

from dflash_cache.errors import DataError

_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter; the fields are named as in its `config.json`.

    Attributes:
        block_size: K, the slots of a block: the anchor and K-1 drafted tokens.
        target_layer_ids: the taps; id i is the output of the target's 0-based decoder layer i.
        mask_token_id: what the undrafted slots of a block hold.
        num_target_layers: decoder layers of the target.
        layer_types: "full_attention" or "sliding_attention", one for each layer.
        sliding_window: W of the sliding layers, at least K; None if there are none.
        is_causal: whether slots see only earlier slots of their block, for all layers; None as the
            engines read its absence: sliding layers are causal, full ones are not.

    Raises:
        DataError: two fields contradict each other.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    max_position_embeddings: int = 262_144

    def __post_init__(self) -> None:
        for broken, problem in self._problems():
            if broken:
                raise DataError(f"drafter config: {problem}")

    def _problems(self) -> list[tuple[bool, str]]:
        heads, groups, kinds = self.num_attention_heads, self.num_key_value_heads, self.layer_types
        layers, k, window, taps = (
            self.num_hidden_layers, self.block_size, self.sliding_window, self.target_layer_ids
        )  # fmt: skip
        sliding = "sliding_attention" in kinds
        outside = [i for i in taps if not 0 <= i < self.num_target_layers]
        return [
            (layers < 1, f"num_hidden_layers is {layers}; it must be at least 1"),
            (groups < 1 or heads % max(groups, 1) != 0,
             f"num_key_value_heads ({groups}) must divide num_attention_heads ({heads})"),
            (self.head_dim % 2 != 0, f"head_dim is {self.head_dim}; RoPE needs an even one"),
            (k < 2, f"block_size is {k}; a block needs an anchor and at least one drafted token"),
            (not taps, "target_layer_ids is empty; name the target's layers that feed the drafter"),
            (bool(outside), f"target_layer_ids names {outside}, but the target has layers "
                            f"0..{self.num_target_layers - 1}"),
            (not 0 <= self.mask_token_id < self.vocab_size, f"mask_token_id {self.mask_token_id} "
             f"is no row of an embedding of {self.vocab_size} tokens"),
            (len(kinds) != layers, f"layer_types names {len(kinds)} layers of {layers}"),
            (bool(set(kinds) - set(_KINDS)),
             f"layer_types holds {sorted(set(kinds) - set(_KINDS))}; known are {list(_KINDS)}"),
            (sliding and (window is None or window < k), f"sliding_window is {window}, but sliding "
             f"layers need a window of at least block_size ({k})"),
        ]  # fmt: skip

    @property
    def taps(self) -> int:
        """T, the number of taps (not of layers)."""
        return len(self.target_layer_ids)

    def causal(self, layer_type: str) -> bool:
        """Whether the slots of a block see only earlier slots in layers of this type."""
        return layer_type == "sliding_attention" if self.is_causal is None else self.is_causal

    def to_hf(self) -> dict[str, Any]:
        """`config.json` in z-lab's layout, with what older and newer readers look for.

        RoPE's base and the block size are written in both places where readers expect them, and
        `use_sliding_window`, without which Qwen3Config drops the window. `is_causal` is written
        only if the drafter has it, since the engines apply it to every layer.
        """
        sliding = "sliding_attention" in self.layer_types
        causal = {} if self.is_causal is None else {"is_causal": self.is_causal}
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "use_cache": True,
            "layer_types": list(self.layer_types),
            "use_sliding_window": sliding,
            "sliding_window": self.sliding_window if sliding else None,
            "max_window_layers": self.num_hidden_layers,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            **causal,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "DrafterConfig":
        """Read a published `config.json`, old or new.

        Raises:
            DataError: a key is missing, or the drafter has a feature that this package has not.
        """
        dflash = _need(config, "dflash_config")
        _refuse_unknown(config)
        layers = _need(config, "num_hidden_layers")
        kinds = config.get("layer_types") or ["full_attention"] * layers
        block = config if config.get("block_size") is not None else dflash
        return cls(
            hidden_size=_need(config, "hidden_size"),
            intermediate_size=_need(config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=_need(config, "num_attention_heads"),
            num_key_value_heads=_need(config, "num_key_value_heads"),
            head_dim=_need(config, "head_dim"),
            rms_norm_eps=float(_need(config, "rms_norm_eps")),
            rope_theta=_rope_theta(config),
            vocab_size=_need(config, "vocab_size"),
            block_size=_need(block, "block_size"),
            target_layer_ids=tuple(_need(dflash, "target_layer_ids", "dflash_config.")),
            mask_token_id=_need(dflash, "mask_token_id", "dflash_config."),
            num_target_layers=_need(config, "num_target_layers"),
            layer_types=tuple(kinds),
            sliding_window=config.get("sliding_window") if "sliding_attention" in kinds else None,
            is_causal=config.get("is_causal", dflash.get("is_causal")),
            max_position_embeddings=config.get("max_position_embeddings") or 262_144,
        )


def default_config(
    target_config: dict[str, Any],
    taps: tuple[int, ...],
    *,
    mask_token_id: int,
    block_size: int = 16,
    layers: int | None = None,
    intermediate_size: int | None = None,
    **overrides: Any,
) -> DrafterConfig:
    """A drafter for a target that no recipe knows.

    Hidden and intermediate size (3*D if the target has experts), norm and RoPE base are the
    target's; 5 full layers; 32 query and 8 kv heads of 128, fewer and smaller where D is small.

    Args:
        target_config: the target's text config as a dict, as the cache keeps it.
        taps: the target's layers that feed the drafter.
        overrides: other fields of `DrafterConfig`; None means the default.

    Raises:
        DataError: the target's config lacks a key, or the fields contradict each other.
    """
    hidden = _need(target_config, "hidden_size")
    given = {key: value for key, value in overrides.items() if value is not None}
    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or _intermediate(target_config),
        "num_hidden_layers": layers or 5,
        "rms_norm_eps": float(target_config.get("rms_norm_eps") or 1e-6),
        "rope_theta": _rope_theta(target_config),
        "vocab_size": _need(target_config, "vocab_size"),
        "block_size": block_size,
        "target_layer_ids": tuple(taps),
        "mask_token_id": mask_token_id,
        "num_target_layers": _need(target_config, "num_hidden_layers"),
        "max_position_embeddings": target_config.get("max_position_embeddings") or 262_144,
        "layer_types": ("full_attention",) * (layers or 5),
    }
    return DrafterConfig(**{**fields, **_heads(hidden, given), **given})


def _heads(hidden: int, given: dict[str, Any]) -> dict[str, int]:
    """Heads for a hidden size: 32 of 128 with 8 kv heads from 2048 on; what is given is kept."""
    head_dim = given.get("head_dim", 128 if hidden >= 1024 else 64 if hidden >= 128 else 16)
    heads = min(32, max(1, hidden // min(head_dim, 64)))
    heads = given.get("num_attention_heads", heads // 4 * 4 or heads)
    groups = max(1, heads // 4)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups if heads % groups == 0 else 1,
        "head_dim": head_dim,
    }


def _intermediate(config: dict[str, Any]) -> int:
    experts = any(
        config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    return 3 * config["hidden_size"] if experts else _need(config, "intermediate_size")


def _rope_theta(config: dict[str, Any]) -> float:
    """RoPE's base, from the old key or the new one; the new one may have an entry a layer type."""
    nested = config.get("rope_parameters") or {}
    per_type = [value for value in nested.values() if isinstance(value, dict)]
    for source in (config, nested, *per_type):
        if source.get("rope_theta") is not None:
            return float(source["rope_theta"])
    raise DataError("config.json has neither rope_theta nor rope_parameters.rope_theta; add one")


def _refuse_unknown(config: dict[str, Any]) -> None:
    scaling = [config.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    kinds = {s.get("rope_type", s.get("type", "default")) for s in scaling}
    wrong = {
        "rope_type": sorted(kinds - {"default"}),
        "attention_bias": config.get("attention_bias"),
        "hidden_act": None if config.get("hidden_act", "silu") == "silu" else config["hidden_act"],
    }
    for key, value in wrong.items():
        if value:
            raise DataError(f"config.json sets {key} to {value}, which a DFlash drafter never has")


def _need(config: dict[str, Any], key: str, prefix: str = "") -> Any:
    if config.get(key) is None:
        raise DataError(f"config.json has no {prefix}{key}; add it")
    return config[key]
