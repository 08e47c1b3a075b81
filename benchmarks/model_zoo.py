"""Trains small models of many architectures of transformers, healthy and with a fault in a random module.

    python benchmarks/model_zoo.py [--faults N] [NAME ...]

Needs transformers. Healthy: five steps under the gate, the layer watch and `trace()` must raise no alarm and leave
every bit as it is. Faults: the report must name the module. One line for each model, then the totals.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import firstnan
from firstnan import NaNDetector, NonFiniteError

STEPS, FAILS_AT = 5, 3
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim",), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_hidden_groups"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 48),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "num_decoder_attention_heads"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "num_mel_bins"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions"), 64),
    "hidden_dim": 48, "d_kv": 8, "head_dim": 8, "rotary_dim": 4, "vocab_size": 99, "max_target_positions": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "state_size": 8,
    "image_size": 32, "patch_size": 8, "time_step_rank": 4, "intermediate_act": "gelu", "num_labels": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """The model's class without its suffix, what it reads, and settings of its own."""

    model: str
    reads: str = "text"
    config: str = ""
    settings: tuple[tuple[str, Any], ...] = ()


def entry(model: str, reads: str = "text", config: str = "", **settings: Any) -> Entry:
    return Entry(model, reads, config, tuple(settings.items()))


_CONV = {"conv_dim": (16, 16), "conv_kernel": (4, 4), "conv_stride": (4, 4), "num_conv_pos_embeddings": 8}
_AUDIO = {**_CONV, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "mask_time_prob": 0.0}
ZOO = [
    *map(entry, ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "GPTJForCausalLM", "OPTForCausalLM", "BloomForCausalLM")),
    *map(entry, ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM")),
    entry("Qwen3ForCausalLM"),
    *map(entry, ("Qwen2MoeForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM")),
    *map(entry, ("FalconForCausalLM", "StableLmForCausalLM", "OlmoForCausalLM", "Starcoder2ForCausalLM")),
    *map(entry, ("GraniteForCausalLM", "CohereForCausalLM", "OlmoeForCausalLM", "CTRLLMHeadModel", "XGLMForCausalLM")),
    entry("MambaForCausalLM"),
    entry("Mamba2ForCausalLM", head_dim=16, num_heads=4, n_groups=2, chunk_size=4),
    entry("GPTNeoForCausalLM", num_layers=2, attention_types=[[["global", "local"], 1]]),
    *map(entry, ("BertForMaskedLM", "RobertaForMaskedLM", "AlbertForMaskedLM", "ElectraForMaskedLM")),
    *map(entry, ("DistilBertForMaskedLM", "MPNetForMaskedLM", "ConvBertForMaskedLM", "NystromformerForMaskedLM")),
    *map(entry, ("ModernBertForMaskedLM", "FNetForMaskedLM", "XLNetLMHeadModel", "RoFormerForMaskedLM")),
    *map(entry, ("DebertaV2ForMaskedLM", "MegatronBertForMaskedLM", "CamembertForMaskedLM", "ErnieForMaskedLM")),
    *(entry(name, "pair") for name in ("T5ForConditionalGeneration", "BartForConditionalGeneration")),
    *(entry(name, "pair") for name in ("PegasusForConditionalGeneration", "MBartForConditionalGeneration")),
    *(entry(name, "pair") for name in ("MT5ForConditionalGeneration", "BlenderbotForConditionalGeneration")),
    entry("MarianMTModel", "pair", "MarianConfig"),
    entry("SwitchTransformersForConditionalGeneration", "pair", num_sparse_encoder_layers=1,
          num_sparse_decoder_layers=1),
    *(entry(name, "image") for name in ("ViTForImageClassification", "DeiTForImageClassification")),
    *(entry(name, "image") for name in ("BeitForImageClassification", "Dinov2ForImageClassification")),
    entry("SwinForImageClassification", "image", embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2,
          patch_size=2),
    entry("ConvNextForImageClassification", "image", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4),
    entry("ResNetForImageClassification", "image", hidden_sizes=[8, 16], depths=[1, 1], embedding_size=8),
    entry("RegNetForImageClassification", "image", hidden_sizes=[8, 16], depths=[1, 1], embedding_size=8,
          groups_width=4),
    entry("SegformerForImageClassification", "image", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
          num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16, image_size=64),
    entry("Wav2Vec2ForSequenceClassification", "sound", **_AUDIO),
    entry("HubertForSequenceClassification", "sound", **_AUDIO),
    entry("WhisperForConditionalGeneration", "spectrum", num_mel_bins=8, max_source_positions=16),
    entry("ASTForAudioClassification", "patches", num_mel_bins=16, max_length=24, patch_size=8),
]  # fmt: skip


def build(one: Entry) -> nn.Module:
    import transformers

    kind = getattr(transformers, one.model)
    config = kind.config_class
    known = config().to_dict()
    settings = {name: value for name, value in TINY.items() if name in known and not isinstance(known[name], list)}
    torch.manual_seed(0)
    made = config(**{**settings, **dict(one.settings)})
    if one.reads in ("pair", "spectrum"):
        made.decoder_start_token_id = 1
    model: nn.Module = kind(made)
    return model.train()


def batches(one: Entry, model: Any) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def ids(length: int = 12) -> Tensor:
        return torch.randint(3, 90, (2, length), generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    side = getattr(model.config, "image_size", 32)
    makers: dict[str, Callable[[], dict[str, Tensor]]] = {
        "text": lambda: {"input_ids": ids(), "labels": ids()},
        "pair": lambda: {"input_ids": ids(), "labels": ids(8)},
        "image": lambda: {
            "pixel_values": noise(2, 3, side, side),
            "labels": torch.randint(2, (2,), generator=generator),
        },
        "sound": lambda: {"input_values": noise(2, 640), "labels": torch.randint(2, (2,), generator=generator)},
        "spectrum": lambda: {"input_features": noise(2, 8, 32), "labels": ids(6)},
        "patches": lambda: {"input_values": noise(2, 24, 16), "labels": torch.randint(2, (2,), generator=generator)},
    }
    return [makers[one.reads]() for _ in range(STEPS)]


def train(model: Any, given: list[dict[str, Tensor]], detector: NaNDetector | None = None, before: Any = None) -> None:
    optimizer = (
        detector.session.scope.optimizers[0] if detector is not None else torch.optim.AdamW(model.parameters(), 1e-4)
    )  # type: ignore[index]
    torch.manual_seed(2)
    for step, batch in enumerate(detector.batches(given) if detector is not None else given):
        if before is not None:
            before(step)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


@contextlib.contextmanager
def watched(model: nn.Module, **options: Any) -> Iterator[NaNDetector]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    with NaNDetector(model, optimizer, **options) as detector:
        yield detector


def healthy(one: Entry) -> str:
    """Empty if all is well."""
    bare = build(one)
    given = batches(one, bare)
    train(bare, given)
    for name, options in (("gate", {}), ("layers", {"layers": True})):
        model = build(one)
        with watched(model, **options) as detector:
            train(model, given, detector)
        if detector.report is not None or detector.summary()["warnings"]:
            return f"false alarm ({name})"
        if not same(bare, model):
            return f"other numbers ({name})"
    model = build(one)
    with firstnan.trace():
        train(model, given)
    return "" if same(bare, model) else "other numbers (trace)"


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# --- faults -------------------------------------------------------------------------------------------------------


def log_of_zero(output: Tensor) -> Tensor:
    return output + 0 * (output * 0).log()


def masked_row(output: Tensor) -> Tensor:
    scores = output.reshape(-1, output.shape[-1])
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[0] = True
    return output + scores.masked_fill(mask, -torch.inf).softmax(-1).reshape(output.shape)


def half_overflow(output: Tensor) -> Tensor:
    return (output.abs().add(1).half() * 7e4).float() + output


def infinite(output: Tensor) -> Tensor:
    return output + torch.exp(output.abs() * 0 + 200)


FAULTS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "nan_weight": None,
    "log_of_zero": log_of_zero,
    "masked_row": masked_row,
    "fp16_overflow": half_overflow,
    "infinite_activation": infinite,
}


def used_leaves(one: Entry, model: Any, batch: dict[str, Tensor]) -> list[str]:
    """The layers with weights whose outputs take part in the loss."""
    seen: dict[str, Tensor] = {}

    def keeper(name: str) -> Any:
        def keep(module: nn.Module, given: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(name, output)

        return keep

    layers = [(n, m) for n, m in model.named_modules() if not list(m.children()) and list(m.parameters())]
    handles = [module.register_forward_hook(keeper(name)) for name, module in layers]
    loss = model(**batch).loss
    for handle in handles:
        handle.remove()
    names = [name for name, o in seen.items() if o.requires_grad and o.is_floating_point() and o.dim() > 1]
    gradients = torch.autograd.grad(loss, [seen[name] for name in names], allow_unused=True)
    return [name for name, g in zip(names, gradients, strict=True) if g is not None and bool(g.any())]


def fault(one: Entry, kind: str, chance: random.Random) -> str:
    """Empty if the report names the module."""
    model = build(one)
    given = batches(one, model)
    name = chance.choice(used_leaves(one, model, given[0]))
    module = model.get_submodule(name)
    spoil = FAULTS[kind]

    def before(step: int) -> None:
        if step != FAILS_AT:
            return
        if spoil is None:
            with torch.no_grad():
                next(module.parameters()).view(-1)[0] = torch.nan
        else:
            forward = module.forward
            module.forward = lambda *args, **kwargs: spoil(forward(*args, **kwargs))

    try:
        with watched(model) as detector:
            train(model, given, detector, before)
    except NonFiniteError as error:
        origin = error.report.origin
        if origin is None:
            return f"{kind} in {name}: no origin"
        named = origin.label.rpartition(".")[0] if kind == "nan_weight" else origin.module
        return "" if named == name else f"{kind} in {name}: named {named or 'nothing'}"
    return f"{kind} in {name}: not found"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2, metavar="N", help="faults for each model (default: 2)")
    parser.add_argument("--no-healthy", action="store_true", help="only the faults")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models whose names begin so (default: all)")
    parsed = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    chance, kinds = random.Random(0), list(FAULTS)
    built = well = named = tried = 0
    for one in ZOO:
        if parsed.names and not one.model.startswith(tuple(parsed.names)):
            continue
        try:
            train(build(one), batches(one, build(one))[:1])
        except Exception as error:
            print(f"{one.model:45} not built: {type(error).__name__}: {str(error).splitlines()[0][:90]}", flush=True)
            continue
        built += 1
        wrong = [healthy(one)] if not parsed.no_healthy else [""]
        well += not wrong[0]
        for _ in range(parsed.faults):
            found = fault(one, kinds[tried % len(kinds)], chance)
            tried, named = tried + 1, named + (not found)
            wrong.append(found)
        print(f"{one.model:45} {'; '.join(filter(None, wrong)) or 'ok'}", flush=True)
    print(
        f"{built} models, {well} healthy without an alarm and bit-identical; module named in {named} of {tried} faults"
    )


if __name__ == "__main__":
    main()
