"""Plans for models of transformers: which part of each tensor a rank of a tensor-parallel program gets."""

from __future__ import annotations

from typing import Any

# transformers' names for the ways to divide a module, by how they divide its weight: columns, rows or not at all.
_COLUMNS = {"colwise", "colwise_rep", "colwise_gather_output", "local_colwise"}
_ROWS = {"rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise"}
_PACKED_COLUMNS = {"packed_colwise", "local_packed_colwise"}
_PACKED_ROWS = {"packed_rowwise", "local_packed_rowwise"}
_VOCABULARY = {"embedding_rowwise", "vocab_parallel"}
_WHOLE = {
    *("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "gather", "local", "mla_kv_a_proj"),
    *("isolated", "ep_router", "ep_dispatch_experts", "moe_tp_experts"),
}

# The prefixes under which checkpoints have the model that a plan describes.
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
_ATTENTION = {
    **dict.fromkeys((f"layers.*.self_attn.{n}_proj" for n in "qkv"), "colwise"),
    "layers.*.self_attn.o_proj": "rowwise",
}
_MLP = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
_EXPERTS = {"layers.*.mlp.experts.gate_up_proj": "packed_colwise", "layers.*.mlp.experts.down_proj": "rowwise"}
_TABLE = {
    **dict.fromkeys("llama mistral qwen2 qwen3 gemma gemma2 gemma3_text".split(), {**_ATTENTION, **_MLP}),
    "mixtral": {**_ATTENTION, **_EXPERTS},
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), {**_ATTENTION, **_MLP, **_EXPERTS}),
}
# Tensors that no plan divides: norms, embeddings, routers.
_REPLICATED = (
    *("embed_tokens.weight", "norm.weight", "norm.bias", "layers.*.*norm*.weight", "layers.*.*norm*.bias"),
    *("layers.*.self_attn.*norm*.weight", "layers.*.self_attn.rotary_emb.inv_freq"),
    *("layers.*.mlp.gate.weight", "layers.*.mlp.shared_expert_gate.weight", "layers.*.block_sparse_moe.gate.weight"),
)


def rules_of(config: Any, experts: bool = False) -> dict[str, Any]:
    """Returns the rules of a ShardPlan. With experts, each rank has whole experts."""
    from .shards import EXPERTS

    rules: dict[str, Any] = {}
    plan = dict(_plan_of(config))
    if any(".experts" in module for module in plan):  # files have experts one by one, even if the model fuses them
        for column in (
            "mlp.experts.*.gate_proj",
            "mlp.experts.*.up_proj",
            *(f"block_sparse_moe.experts.*.w{i}" for i in (1, 3)),
        ):
            plan.setdefault(f"layers.*.{column}", "colwise")
        for row in ("mlp.experts.*.down_proj", "block_sparse_moe.experts.*.w2"):
            plan.setdefault(f"layers.*.{row}", "rowwise")
        for part, style in (("gate_proj", "colwise"), ("up_proj", "colwise"), ("down_proj", "rowwise")):
            plan.setdefault(f"layers.*.mlp.shared_expert.{part}", style)
    for prefix in _PREFIXES:
        if experts:
            rules |= {f"{prefix}layers.*.{moe}.experts.*.**": EXPERTS for moe in ("mlp", "block_sparse_moe")}
            rules |= {f"{prefix}layers.*.mlp.experts.{fused}": 0 for fused in ("gate_up_proj", "down_proj")}
        for module, style in plan.items():
            if (found := _divided(module, style)) is not None:
                for suffix, rule in found.items():
                    rules.setdefault(f"{prefix}{module}{suffix}", rule)
        for name in _REPLICATED:
            rules.setdefault(f"{prefix}{name}", None)
    return {**rules, "lm_head.weight": 0}  # transformers divides it in every model


def _divided(module: str, style: str) -> dict[str, Any] | None:
    """Returns the rules of a module's tensors, by the suffix of their names. Fused experts are tensors themselves."""
    from .shards import Split

    if style in _COLUMNS:
        return {".weight": -2, ".bias": -1, "": -2}
    if style in _ROWS:
        return {".weight": -1, ".bias": None, "": -1}
    if style in _PACKED_COLUMNS:
        return {".weight": Split(-2, 2), ".bias": Split(-1, 2), "": Split(-2, 2)}
    if style in _PACKED_ROWS:
        return {".weight": Split(-1, 2), ".bias": None, "": Split(-1, 2)}
    if style in _VOCABULARY:
        return {".weight": 0}
    if style == "grouped_gemm":
        return {"": 0}
    if style in _WHOLE:
        return {".weight": None, ".bias": None}
    raise ValueError(f"{module!r} is divided as {style!r}, which this package does not know: write a ShardPlan")


def _plan_of(config: Any) -> dict[str, str]:
    """Returns a config's plan for the modules below its base model."""
    kind = config if isinstance(config, str) else getattr(config, "model_type", None)
    if isinstance(config, str):
        try:
            from transformers import CONFIG_MAPPING

            config = CONFIG_MAPPING[config] if config in CONFIG_MAPPING else None
        except ImportError:
            config = None
    text = getattr(config, "get_text_config", None)
    if text is not None and not isinstance(config, type):
        config = text()
        kind = getattr(config, "model_type", kind)
    plan = getattr(config, "base_model_tp_plan", None) or _TABLE.get(str(kind))
    if not plan:
        raise ValueError(f"there is no plan for models of kind {kind!r}: write a ShardPlan")
    return dict(plan)
