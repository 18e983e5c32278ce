#!/usr/bin/env python3
"""Check that Concerto and the real `transformers` read each other's model folders and compute the same. Run by hand.

    pip install torch transformers safetensors sentencepiece        # the CPU build of torch will do
    scripts/check_transformers.py [--concerto build/release/bin/concerto] [DIR ...]

DIR: model folders, for example what `concerto checkpoint export` made of a run. Each is loaded by AutoModelForCausalLM,
whose logits and loss `concerto verify` then compares with its own, both computing in float32; AutoTokenizer opens its
tokenizer, if it has one. Without DIR tiny random models of every kind are made, and for each
  - folders saved by transformers in float32, bfloat16 and float16, whole and in shards, are read by Concerto;
  - `checkpoint import`, then `export` in f32 and bf16, whole and in shards, gives folders that transformers loads, with the
    same settings and tensors as before (f32: bit for bit).
Exit code 0: everything agrees.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# Both sides compute in float32, in another order.
TOLERANCE = {"logits": {"max": 5e-5, "l2": 2e-5}, "loss": {"max": 1e-5, "l2": 1e-5}}
SMALL = dict(vocab_size=130, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128)
EXPERTS = dict(moe_num_experts=6, moe_k=2, moe_intermediate_size=20)
MODELS = {
    "dense, tied": (transformers.Ernie4_5Config, dict(head_dim=16)),
    "dense, untied, biases": (transformers.Ernie4_5Config, dict(head_dim=12, tie_word_embeddings=False, use_bias=True)),
    "moe, tied": (transformers.Ernie4_5_MoeConfig, dict(EXPERTS, moe_num_shared_experts=2)),
    "moe, tied, biases": (transformers.Ernie4_5_MoeConfig, dict(EXPERTS, moe_num_shared_experts=1, use_bias=True)),
    "moe, untied, biases, head_dim": (transformers.Ernie4_5_MoeConfig, dict(
        EXPERTS, moe_num_shared_experts=0, use_bias=True, tie_word_embeddings=False, head_dim=20, moe_layer_start_index=0)),
    "moe, every expert for every token": (transformers.Ernie4_5_MoeConfig, dict(EXPERTS | dict(moe_k=6), moe_num_shared_experts=1)),
    "moe, untied, every 2nd layer": (transformers.Ernie4_5_MoeConfig, dict(
        EXPERTS, moe_num_shared_experts=1, tie_word_embeddings=False, moe_layer_interval=2, num_hidden_layers=4)),
}
SHARD_BYTES = 40_000


class Checker:
    def __init__(self, concerto):
        self.concerto, self.failed, self.count = concerto, [], 0

    def run(self, *args):
        return subprocess.run([self.concerto, *map(str, args)], capture_output=True, text=True)

    def report(self, what, faults):
        self.count += 1
        print(f"{'ok  ' if not faults else 'FAIL'} {what}", flush=True)
        for fault in faults:
            print(f"     {fault}")
        if faults:
            self.failed.append(what)

    def must(self, what, *args):
        run = self.run(*args)
        if run.returncode:
            self.report(what, run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])
        return run.returncode == 0

    def same_numbers(self, what, folder):
        """Logits and loss of `folder` by transformers against Concerto's."""
        try:
            model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                               output_loading_info=True)
        except Exception as e:
            return self.report(what, [f"transformers: {type(e).__name__}: {str(e).splitlines()[0][:200]}"])
        faults = [f"transformers: {kind}: {sorted(info[kind])}" for kind in ("missing_keys", "mismatched_keys") if info[kind]]
        unexpected = [k for k in info["unexpected_keys"] if "mtp" not in k]
        faults += [f"transformers: unexpected: {unexpected}"] if unexpected else []
        ids, more = token_ids(folder, model.config)
        faults += more
        with torch.no_grad():
            out = model.eval()(input_ids=ids, labels=ids, use_cache=False)
            loss = model.loss_function(logits=out.logits, labels=ids, vocab_size=model.config.vocab_size)
        with tempfile.TemporaryDirectory() as golden:
            save_file(dict(input_ids=ids, labels=ids.clone(), logits=out.logits.contiguous(), loss=loss), f"{golden}/golden.safetensors")
            in_loss = bool(getattr(model.config, "output_router_logits", False))
            Path(golden, "case.json").write_text(json.dumps(dict(tolerance=TOLERANCE, aux_loss_in_loss=in_loss)))
            run = self.run("verify", "--model", folder, "--golden", golden, "--json")
        for line in run.stdout.splitlines():
            row = json.loads(line)
            if "name" in row and not row["ok"]:
                faults.append(f"{row['name']}: max {row['max']:.1e}, l2 {row['l2']:.1e}, tolerance {row['tolerance']}")
        if run.returncode and not faults:
            faults = [f"concerto: {line}" for line in run.stderr.strip().splitlines()]
        self.report(what, faults)


def token_ids(folder, config):
    """Some text if the folder has a tokenizer, else random ids; and what is wrong with the tokenizer."""
    if not Path(folder, "tokenizer_config.json").exists():
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, config.vocab_size, (2, 24), generator=generator), []
    text = "In the beginning God created the heaven and the earth. 起初，神创造天地。 def f(x): return x + 1"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    faults = []
    if tokenizer.decode(ids[0]) != text:
        faults.append(f"tokenizer: decodes to {tokenizer.decode(ids[0])!r}")
    if ids.max() >= config.vocab_size:
        faults.append(f"tokenizer: id {ids.max()} is not in the vocabulary of {config.vocab_size}")
    return ids, faults


def tensors(folder):
    """{name: tensor} of a folder, from one file or the shards of its index."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    found = {}
    for file in files:
        with safe_open(folder / file, "pt") as f:
            found |= {name: f.get_tensor(name) for name in f.keys()}
    return found, len(files)


def same_content(before, after, dtype, sharded):
    """What differs between a folder and its export: settings, names, shapes, types, values."""
    faults = []
    noise = ("transformers_version", "dtype", "_name_or_path")
    a, b = (AutoConfig.from_pretrained(f).to_dict() for f in (before, after))
    for c in (a, b):                                        # the MoE class takes a missing head_dim as this
        c["head_dim"] = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    faults += [f"config.json: {k}: {a.get(k)} became {b.get(k)}" for k in sorted(a.keys() | b.keys())
               if k not in noise and a.get(k) != b.get(k)]
    (old, _), (new, files) = tensors(before), tensors(after)
    if old.keys() != new.keys():
        faults.append(f"names differ: {sorted(old.keys() ^ new.keys())[:5]}")
    for name in sorted(old.keys() & new.keys()):
        kept = name.endswith(("mlp.gate.weight", "e_score_correction_bias"))
        want = old[name].to(torch.float32 if kept else dtype)
        if new[name].dtype != want.dtype or not torch.equal(new[name], want):
            faults.append(f"{name}: {new[name].dtype} {tuple(new[name].shape)} instead of {want.dtype} {tuple(want.shape)}, or other values")
    if (files > 1) != sharded:
        faults.append(f"{files} files")
    return faults


def check_kind(checker, name, make_config, settings, work):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(make_config(**SMALL | settings))
    for p in model.parameters():                            # biases, gains and the correction bias too
        p.data += 0.05 * torch.randn_like(p)
    work.mkdir()
    model.save_pretrained(work / "float32")
    for dtype in ("float32", "bfloat16", "float16"):
        loaded = AutoModelForCausalLM.from_pretrained(work / "float32", dtype=getattr(torch, dtype))
        if dtype != "float32":
            loaded.save_pretrained(work / dtype)
        loaded.save_pretrained(work / f"{dtype}-shards", max_shard_size=SHARD_BYTES)
        for folder in (dtype, f"{dtype}-shards"):
            checker.same_numbers(f"{name}: transformers' {folder}", work / folder)
    for source in ("float32", "bfloat16-shards"):
        run = work / f"run-{source}"
        if not checker.must(f"{name}: import {source}", "checkpoint", "import", work / source, "--output", run):
            continue
        for dtype, torch_dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            for sharded in (False, True):
                what = f"{name}: {source} exported in {dtype}{' shards' if sharded else ''}"
                out = work / f"{source}-{dtype}{'-shards' if sharded else ''}"
                shards = ["--shard-bytes", SHARD_BYTES] if sharded else []
                if checker.must(what, "checkpoint", "export", run, "--output", out, "--dtype", dtype, *shards):
                    checker.report(f"{what}: content", same_content(work / source, out, torch_dtype, sharded))
                    checker.same_numbers(f"{what}: numbers", out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concerto", default="build/release/bin/concerto")
    parser.add_argument("folders", nargs="*", metavar="DIR")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    checker = Checker(args.concerto)
    for folder in args.folders:
        checker.same_numbers(folder, folder)
    with tempfile.TemporaryDirectory() as work:
        for i, (name, (make_config, settings)) in enumerate({} if args.folders else MODELS.items()):
            check_kind(checker, name, make_config, settings, Path(work, str(i)))
    print(f"transformers {transformers.__version__}: {checker.count} checks, {len(checker.failed)} failed")
    sys.exit(1 if checker.failed else 0)


if __name__ == "__main__":
    main()
