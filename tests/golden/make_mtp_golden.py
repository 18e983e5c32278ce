#!/usr/bin/env python3
"""Make golden fixtures for multi-token prediction, which Hugging Face's ERNIE 4.5 does not have.

    make_mtp_golden.py OUT [CASE ...] [--table FILE.json]

The main model is Hugging Face's, fed and recorded by make_golden.py; the MTP blocks are written out below in plain
torch. Tensors, tolerances and case.json are those of make_golden.py (README.md), and beside them `mtp_loss.{m}`, and
`attn_out.{L+m}`, `mlp_out.{L+m}`, `hidden.{L+m+1}` of the block of depth m, which counts as layer L + m.

With h0 the main hidden state before the final norm (mtp_hidden: pre_norm) or after it (post_norm), depth m = 0, 1, ...
at position t of a document x_0 .. x_{n-1}:

    u       = Proj_m([RMSNorm(Emb(x_{t+1+m})) ; RMSNorm(h_t)])     embedding half first
    h       = DecoderLayer_m(u)                                    dense FFN; positions t, or t + m + 1 (mtp_positions: shifted)
    logits  = Head(FinalNorm(h)) predict x_{t+2+m}                 norm, head and embedding of the main model
    L_m     = mean over the positions whose target lies in the document and is not -100
    total   = main loss (+ aux loss) + mtp_loss_scaling_factor * mean_m L_m

h goes on to depth m + 1 as it left the decoder layer. Where x_{t+1+m} is outside the document, the pad token is looked
up, which adds no gradient to its row. Rotary positions are relative, so that `shifted` gives the numbers of `main` but
for rounding: what the case checks is that the longer table is right.
"""
import argparse
import copy
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import make_golden as mg

CASES = {
    "mtp-pre-main": dict(
        about="MoE, one MTP depth on the state before the final norm, main positions; padded rows, aux loss in the loss",
        family="moe", weights=121, data=221,
        config=dict(vocab_size=128, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, moe_num_experts=8, moe_k=2, moe_intermediate_size=20,
                    moe_num_shared_experts=1, output_router_logits=True, router_aux_loss_coef=0.05,
                    max_position_embeddings=256),
        mtp=dict(num_nextn_predict_layers=1, mtp_loss_scaling_factor=0.3, mtp_hidden="pre_norm", mtp_positions="main"),
        rows=[28, 19, 2],
        ignore=[[4, 6]],
        train=dict(lr=2e-3, betas=[0.9, 0.95], eps=1e-6, weight_decay=0.1, decay="matrices", rows=[20, 13]),
    ),
    "mtp-post-shifted": dict(
        about="dense, two MTP depths on the state after the final norm, shifted positions; packed documents, biases, untied",
        family="dense", weights=122, data=222,
        config=dict(vocab_size=128, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=16, use_bias=True, tie_word_embeddings=False,
                    max_position_embeddings=256),
        mtp=dict(num_nextn_predict_layers=2, mtp_loss_scaling_factor=0.4, mtp_hidden="post_norm", mtp_positions="shifted"),
        rows=[[13, 2, 11], [9, 1, 3, 13]],
        ignore=[[3, 4]],
        train=dict(lr=2e-3, betas=[0.9, 0.95], eps=1e-6, weight_decay=0.1, decay="all"),
    ),
}


# --------------------------------------------------------------------------------------------------------
# The blocks
# --------------------------------------------------------------------------------------------------------
class Gain(nn.Module):
    """RMSNorm."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def rotate(x, positions, theta):
    """x [B, heads, S, D]: neighbours (2j, 2j+1) turn by positions * theta^(-2j/D)."""
    dim = x.shape[-1]
    angle = positions[:, None, :, None].to(x.dtype) * theta ** (-torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin())
    return torch.stack(turned, -1).flatten(-2)


class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        H, I, eps = c.hidden_size, c.intermediate_size, c.rms_norm_eps
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.dim = getattr(c, "head_dim", None) or H // self.heads
        self.theta = c.rope_parameters["rope_theta"]
        linear = lambda n_in, n_out: nn.Linear(n_in, n_out, bias=c.use_bias)
        self.self_attn = nn.ModuleDict(dict(
            q_proj=linear(H, self.heads * self.dim), k_proj=linear(H, self.kv_heads * self.dim),
            v_proj=linear(H, self.kv_heads * self.dim), o_proj=linear(self.heads * self.dim, H)))
        self.mlp = nn.ModuleDict(dict(gate_proj=linear(H, I), up_proj=linear(H, I), down_proj=linear(I, H)))
        self.input_layernorm, self.post_attention_layernorm = Gain(H, eps), Gain(H, eps)

    def forward(self, x, positions, allowed, fused, record):
        B, S, _ = x.shape
        split = lambda y: y.view(B, S, -1, self.dim).transpose(1, 2)
        y, a = self.input_layernorm(x), self.self_attn
        q, k, v = (split(a[f"{n}_proj"](y)) for n in "qkv")
        q, k = rotate(q, positions, self.theta), rotate(k, positions, self.theta)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        if fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None])
        else:
            scores = (q @ k.transpose(2, 3) / math.sqrt(self.dim)).masked_fill(~allowed[:, None], -math.inf)
            y = scores.softmax(-1) @ v
        x = x + record("attn_out", a["o_proj"](y.transpose(1, 2).reshape(B, S, -1)))
        y, m = self.post_attention_layernorm(x), self.mlp
        return x + record("mlp_out", m["down_proj"](F.silu(m["gate_proj"](y)) * m["up_proj"](y)))


class Mtp(nn.Module):
    """Parameters named as in the file, without their leading `model.`."""

    def __init__(self, c, settings):
        super().__init__()
        self.settings, depths = settings, range(settings["num_nextn_predict_layers"])
        H = c.hidden_size
        self.mtp_emb_norm = nn.ModuleList(Gain(H, c.rms_norm_eps) for _ in depths)
        self.mtp_hidden_norm = nn.ModuleList(Gain(H, c.rms_norm_eps) for _ in depths)
        self.mtp_linear_proj = nn.ModuleList(nn.Linear(2 * H, H, bias=c.use_bias) for _ in depths)
        self.mtp_block = nn.ModuleList(DecoderLayer(c) for _ in depths)


class WholeModel(nn.Module):
    """Hugging Face's model and the MTP blocks; gives what training needs of both."""

    def __init__(self, hf, mtp, fused=False):
        super().__init__()
        self.hf, self.mtp, self.fused = hf, mtp, fused

    def forward(self, batch, recorder=None):
        hf, s, c = self.hf, self.mtp.settings, self.hf.config
        ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
        states = {}
        handle = hf.model.norm.register_forward_hook(lambda m, args, out: states.update(pre_norm=args[0], post_norm=out))
        try:
            with mg.semantics(hf):
                out = hf(**batch.arguments(next(hf.parameters()).dtype))
        finally:
            handle.remove()
        docs = document_numbers(batch)
        allowed = (docs[:, :, None] == docs[:, None, :]) & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        positions = position_in_document(docs)
        h, losses = states[s["mtp_hidden"]], []
        for m in range(s["num_nextn_predict_layers"]):
            layer = c.num_hidden_layers + m

            def record(name, value, layer=layer):
                if recorder:
                    recorder.put(f"{name}.{layer}", value)
                return value

            tokens = ahead(ids, docs, m + 1, c.pad_token_id)
            targets = ahead(labels, docs, m + 2, -100)
            embedded = F.embedding(tokens, hf.model.embed_tokens.weight, padding_idx=c.pad_token_id)
            joined = torch.cat([self.mtp.mtp_emb_norm[m](embedded), self.mtp.mtp_hidden_norm[m](h)], -1)
            shift = m + 1 if s["mtp_positions"] == "shifted" else 0
            h = self.mtp.mtp_block[m](self.mtp.mtp_linear_proj[m](joined), positions + shift, allowed, self.fused, record)
            record("hidden", h, layer + 1)
            with mg.semantics(hf):
                logits = hf.lm_head(hf.model.norm(h))
            losses.append(mean_loss(logits, targets))
        if recorder:                                        # the blocks used the norm again
            recorder.put("final_norm", states["post_norm"])
        total = out.loss + s["mtp_loss_scaling_factor"] * sum(losses) / len(losses)
        return dict(logits=out.logits, loss=mean_loss(out.logits[:, :-1], labels[:, 1:]), mtp=losses, total=total, out=out)


def document_numbers(batch):
    ids = batch.inputs["input_ids"]
    docs = batch.extra.get("doc_ids", torch.zeros_like(ids))
    if "attention_mask" in batch.inputs:                    # padding is a document of its own
        docs = torch.where(batch.inputs["attention_mask"].bool(), docs, -1)
    return docs


def position_in_document(docs):
    out = torch.zeros_like(docs)
    for s in range(1, docs.shape[1]):
        out[:, s] = torch.where(docs[:, s] == docs[:, s - 1], out[:, s - 1] + 1, 0)
    return out


def ahead(values, docs, n, outside):
    """values[t + n] where that is in the document of t and no padding, else `outside`."""
    out = torch.full_like(values, outside)
    inside = (docs[:, n:] == docs[:, :docs.shape[1] - n]) & (docs[:, n:] >= 0)
    out[:, :values.shape[1] - n][inside] = values[:, n:][inside]
    return out


def mean_loss(logits, targets):
    used = targets != -100
    return -logits[used].log_softmax(-1).gather(-1, targets[used][:, None]).mean()


# --------------------------------------------------------------------------------------------------------
# Parameters under the names of the file
# --------------------------------------------------------------------------------------------------------
def named(whole, value):
    tensors = mg.saved_names(whole.hf, {n: value(p) for n, p in whole.hf.named_parameters()})
    return tensors | {f"model.{n}": value(p).contiguous() for n, p in whole.mtp.named_parameters()}


def parameters(whole):
    return named(whole, lambda p: p.detach().clone())


def gradients(whole):
    grads = named(whole, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    has = named(whole, lambda p: torch.full_like(p, float(p.grad is not None)))
    return {n: g for n, g in grads.items() if has[n].any()}, sorted(n for n in grads if not has[n].any())


def randomize(mtp, seed):
    rng = np.random.default_rng(seed)
    for name, p in sorted(mtp.named_parameters()):
        z = rng.standard_normal(p.shape)
        if p.ndim == 1:
            w = rng.uniform(0.5, 1.5, p.shape) if name.endswith("weight") else 0.1 * z
        else:
            w = z * (0.8 if re.search("[on]_proj.weight", name) and "self_attn" in name else 1.0) / math.sqrt(p.shape[-1])
        p.data.copy_(torch.from_numpy(w.astype(np.float32)))


# --------------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------------
def run_once(whole, batch):
    whole.zero_grad(set_to_none=True)
    recorder = mg.Recorder(whole.hf)
    try:
        out = whole(batch, recorder)
        with mg.semantics(whole.hf):
            out["total"].backward()
    finally:
        for h in recorder.handles:
            h.remove()
    t = recorder.tensors
    t |= {"logits": out["logits"].detach(), "loss": out["loss"].detach(), "total_loss": out["total"].detach()}
    t |= {f"mtp_loss.{m}": loss.detach() for m, loss in enumerate(out["mtp"])}
    if list(mg.routers(whole.hf)):
        t["aux_loss"] = mg.aux_loss(whole.hf, batch, out["out"])
    grads, without = gradients(whole)
    t["grad_norm"] = torch.sqrt(sum(g.double().square().sum() for g in grads.values()))
    t |= {f"grad.{n}": g.clone() for n, g in grads.items()}
    whole.zero_grad(set_to_none=True)
    return t, without


def train(whole, s, next_batch):
    whole = copy.deepcopy(whole)
    start, opt = parameters(whole), mg.optimizer(whole, s)
    log = {k: [] for k in ("loss", "ce", "aux_loss", "grad_norm")}
    for step in range(mg.STEPS):
        batch = next_batch(step, whole.hf)
        opt.zero_grad(set_to_none=True)
        out = whole(batch)
        with mg.semantics(whole.hf):
            out["total"].backward()
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), mg.CLIP_NORM, foreach=False)
        opt.step()
        log["loss"].append(out["total"].detach())
        log["ce"].append(out["loss"].detach())
        log["grad_norm"].append(norm)
        if getattr(out["out"], "aux_loss", None) is not None:
            log["aux_loss"].append(out["out"].aux_loss.detach())
    t = {f"train.{k}": torch.stack(v) for k, v in log.items() if v}
    end = parameters(whole)
    chosen = mg.final_selection([n for n in end if not n.startswith("model.mtp_")])
    chosen += [n for n in end if re.fullmatch(r"model\.mtp_(linear_proj|emb_norm|hidden_norm)\.\d+\..*|model\.mtp_block\.\d+\.self_attn\.k_proj.*", n)]
    t |= {f"final.{n}": end[n] for n in chosen}
    t |= {f"final_delta_l2.{n}": (end[n].double() - start[n].double()).norm() for n in end}
    return t


def make_case(name, case, out):
    folder = Path(out) / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    hf = mg.build_model(case)
    hf.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    mtp = Mtp(hf.config, case["mtp"])
    randomize(mtp, case["weights"] + 1000)
    whole = WholeModel(hf, mtp)
    tensors = load_file(folder / "model.safetensors") | {f"model.{n}": p.detach().clone() for n, p in mtp.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | case["mtp"]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    exact = WholeModel(mg.to_float64(hf), copy.deepcopy(mtp).double())
    moe = bool(list(mg.routers(hf)))
    kernels = dict(attn_implementation="sdpa", experts_implementation="batched_mm" if moe else "eager")
    other = WholeModel(mg.load_model(case, folder, **kernels), copy.deepcopy(mtp), fused=True)

    sampler = mg.Sampler(case, exact.hf, case["data"])
    batch = sampler.batch(case["rows"])
    golden, without = run_once(whole, batch)
    ref, _ = run_once(exact, batch)
    variant, _ = run_once(other, batch)
    assert mg.choice_flips(golden, ref, batch)[0] == 0 and mg.choice_flips(variant, ref, batch)[0] == 0

    s, train_sampler, steps = case["train"], mg.Sampler(case, exact.hf, case["data"] + 1000), []

    def draw(step, hf_now):
        train_sampler.model = hf_now
        steps.append(train_sampler.batch(s.get("rows", case["rows"])))
        return steps[-1]

    ref |= train(exact, s, draw)
    golden |= train(whole, s, lambda i, m: steps[i])
    variant |= train(other, s, lambda i, m: steps[i])

    labels = batch.inputs["labels"]
    record = dict(batch.inputs) | batch.extra
    record["target_ids"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    record |= {f"train.{k}": torch.stack([b.inputs[k] for b in steps]) for k in steps[0].inputs}
    record |= {f"train.{k}": v for k, v in steps[0].extra.items()}
    scalars = ["loss", "total_loss", "aux_loss", "grad_norm", "train.loss", "train.grad_norm", *(k for k in ref if k.startswith("mtp_loss"))]
    record |= {f"float64.{k}": ref[k] for k in scalars if k in ref}

    e32, e32b = mg.errors(golden, ref, batch), mg.errors(variant, ref, batch)
    tolerance = {c: {m: mg.round_up(max(mg.TOL_FACTOR * max(e32[c][i], e32b[c][i]), mg.TOL_FLOOR))
                     for i, m in enumerate(("max", "l2"))} for c in e32}
    short = lambda *values: [float(f"{v:.2g}") for v in values]
    facts = dict(
        case=name, about=case["about"], family=case["family"], seeds=dict(weights=case["weights"], data=case["data"]),
        versions=dict(transformers=transformers.__version__, torch=torch.__version__.split("+")[0]),
        batch=dict(rows=case["rows"], shape=list(labels.shape), packed=batch.allowed is not None,
                   padded="attention_mask" in batch.inputs, labels_used=int((record["target_ids"] != -100).sum())),
        mtp=case["mtp"],
        aux_loss_in_loss=bool(getattr(hf.config, "output_router_logits", False)),
        aux_loss_coef=getattr(hf.config, "router_aux_loss_coef", None) if moe else None,
        train=dict(dict(steps=mg.STEPS, clip_norm=mg.CLIP_NORM, rows=case["rows"]), **s),
        parameters_without_gradient=without,
        metric="max: max|a-b| / max|b|; l2: |a-b| / |b| in the 2-norm; worst tensor of each category",
        tolerance=tolerance,
        observed_float32_vs_float64={c: dict(max=short(e32[c][0], e32b[c][0]), l2=short(e32[c][1], e32b[c][1]),
                                             worst=e32[c][2]) for c in e32},
        routing=mg.routing_facts(exact.hf, ref, hf.config.moe_k, batch) if moe else {},
    )
    record |= golden
    stored = lambda v: (v if v.dtype != torch.bool else v.to(torch.uint8)).contiguous().clone()
    record = {k: stored(v.float() if k in golden and v.dtype == torch.float64 else v) for k, v in record.items()}
    save_file(dict(sorted(record.items())), folder / "golden.safetensors")
    (folder / "case.json").write_text(mg.compact_json(facts) + "\n")
    for f in folder.iterdir():
        f.chmod(0o644)
    size = sum(f.stat().st_size for f in folder.iterdir())
    depths = [round(golden[f"mtp_loss.{m}"].item(), 4) for m in range(case["mtp"]["num_nextn_predict_layers"])]
    print(f"{name}: {size / 1e6:.2f} MB, loss {golden['loss'].item():.4f}, mtp {depths}, train {golden['train.loss'][0]:.3f} -> "
          f"{golden['train.loss'][-1]:.3f}, tolerance {tolerance}", flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("out")
    ap.add_argument("cases", nargs="*", help="default: every case of the table")
    ap.add_argument("--table", help="JSON file with cases to use in place of the built-in table")
    args = ap.parse_args()
    table = json.loads(Path(args.table).read_text()) if args.table else CASES
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    mg.CATEGORIES = [(c, f"{p}|mtp_loss\\..*" if c == "loss" else p) for c, p in mg.CATEGORIES]
    for name in args.cases or table:
        make_case(name, table[name], args.out)


if __name__ == "__main__":
    main()
