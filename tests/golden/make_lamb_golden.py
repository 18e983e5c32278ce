#!/usr/bin/env python3
"""Make the golden fixture of LAMB (You et al. 2020, "Large batch optimization for deep learning", algorithm 2).

    make_lamb_golden.py OUT [CASE ...] [--table FILE.json]

Model, inputs, tensors and tolerances are make_golden.py's; only the 20 training steps differ. For each tensor of the
file (an expert's gate, up and down projection are three) and step t, with g the globally clipped gradient:

    m <- b1 m + (1 - b1) g               v <- b2 v + (1 - b2) g^2
    r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
    u = r + weight_decay w               weight_decay is 0 for 1-D tensors if `decay` is `matrices`
    w <- w - lr * ratio * u              ratio = |w| / |u|, or 1 where either is 0

The paper's phi is the identity: no norm is clipped. `lm_head.bias` starts as zeros, so that its first ratio is 1.
"""
import argparse
import json
from pathlib import Path

import torch
import transformers

import make_golden as mg

CASES = {
    "lamb-moe": dict(
        about="LAMB: MoE with biases and a zero lm_head.bias, one layer of 8 experts top-2, first layer dense",
        family="moe", weights=131, data=231,
        config=dict(vocab_size=128, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, moe_num_experts=8, moe_k=2, moe_intermediate_size=20,
                    moe_num_shared_experts=1, use_bias=True, max_position_embeddings=256),
        rows=[24, 24],
        train=dict(optimizer="lamb", lr=1e-2, betas=[0.9, 0.99], eps=1e-5, weight_decay=0.1, decay="matrices",
                   rows=[20, 13]),
    ),
}


class Lamb:
    """Stands in for make_golden.py's torch.optim.AdamW."""

    def __init__(self, model, s):
        self.s, self.t, self.pieces = s, 0, []
        for name, p in model.named_parameters():
            self.pieces += [(p, index, {}) for index in self.tensors_of_the_file(name, p)]

    @staticmethod
    def tensors_of_the_file(name, p):
        """Indices that cut a parameter into what the file holds: fused experts are one matrix per expert and projection."""
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return [...]
        if name.endswith("down_proj"):
            return list(range(p.shape[0]))
        half = p.shape[1] // 2
        return [(e, rows) for e in range(p.shape[0]) for rows in (slice(0, half), slice(half, None))]

    def zero_grad(self, set_to_none=True):
        for p, _, _ in self.pieces:
            p.grad = None

    @torch.no_grad()
    def step(self):
        self.t += 1
        (b1, b2), s = self.s["betas"], self.s
        for p, index, state in self.pieces:
            if p.grad is None:                              # the correction bias: never touched
                continue
            w, g = p[index], p.grad[index]
            m = state["m"] = b1 * state.get("m", torch.zeros_like(w)) + (1 - b1) * g
            v = state["v"] = b2 * state.get("v", torch.zeros_like(w)) + (1 - b2) * g * g
            update = m / (1 - b1 ** self.t) / ((v / (1 - b2 ** self.t)).sqrt() + s["eps"])
            if s["decay"] == "all" or w.ndim > 1:
                update = update + s["weight_decay"] * w
            w_norm, update_norm = w.norm(), update.norm()
            ratio = w_norm / update_norm if w_norm > 0 and update_norm > 0 else 1.0
            p[index] = w - s["lr"] * ratio * update


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
    build = mg.build_model

    def build_with_zero_bias(case):
        model = build(case)
        if getattr(model.lm_head, "bias", None) is not None:
            model.lm_head.bias.data.zero_()
        return model

    mg.build_model, mg.optimizer = build_with_zero_bias, Lamb
    for name in args.cases or table:
        mg.make_case(name, table[name], args.out)


if __name__ == "__main__":
    main()
