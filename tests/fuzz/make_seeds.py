#!/usr/bin/env python3
"""Writes the seeds of the fuzz targets: small files that are whole, and some with one fault each.

    make_seeds.py OUT        makes OUT/TARGET/NAME for every target
"""
import json
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def safetensors(header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def safetensors_seeds():
    one = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    two = {"__metadata__": {"format": "pt"}, **one, "b.c": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]}}
    integers = {"i": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}, "u": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]}}
    return {
        "one": safetensors(one, bytes(16)),
        "two": safetensors(two, bytes(22)),
        "integers": safetensors(integers, bytes(12)),
        "scalar": safetensors({"s": {"dtype": "F16", "shape": [], "data_offsets": [0, 2]}}, bytes(2)),
        "no_rows": safetensors({"n": {"dtype": "F64", "shape": [0, 5], "data_offsets": [0, 0]}}, b""),
        "empty": safetensors({}, b""),
        "truncated": safetensors(one, bytes(15)),
        "long_header": safetensors(one, bytes(16), length=1 << 62),
        "overlap": safetensors({**one, "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, bytes(24)),
        "huge_shape": safetensors({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 16]}}, bytes(16)),
        "not_json": safetensors(b"{]", bytes(4)),
    }


def index(lengths, documents, magic=b"MMIDIDX\0\0", version=1, code=8, count=None, width=2):
    offsets = [width * sum(lengths[:i]) for i in range(len(lengths))]
    n = len(lengths) if count is None else count
    return (magic + struct.pack("<QBQQ", version, code, n, len(documents)) + struct.pack(f"<{len(lengths)}i", *lengths)
            + struct.pack(f"<{len(offsets)}q", *offsets) + struct.pack(f"<{len(documents)}q", *documents))


def idx_seeds():
    return {
        "three": index([5, 1, 7], [0, 1, 2, 3]),
        "joined": index([5, 1, 7], [0, 2, 3]),
        "int32": index([4, 4], [0, 1, 2], code=4, width=4),
        "none": index([], [0]),
        "empty_document": index([0, 3], [0, 1, 2]),
        "truncated": index([5, 1, 7], [0, 1, 2, 3])[:-5],
        "count": index([5, 1, 7], [0, 1, 2, 3], count=1 << 60),
        "negative": index([5, -1, 7], [0, 1, 2, 3]),
        "magic": index([5], [0, 1], magic=b"TNTIDX\0\0\0"),
        "version": index([5], [0, 1], version=9),
        "code": index([5], [0, 1], code=6),
    }


def jsonl_seeds():
    return {
        "text": '{"text": "Rain fell on the harbour."}\n{"text": ["雨落在港口。"]}\n',
        "sft": '{"system":"Be brief.","src":["2+2?","And times 3?"],"tgt":["4","12"],"label":[0,1]}\n',
        "strings": '{"src":"Hi","tgt":"Hello"}\n\n{"is_system":1,"src":["s","q"],"tgt":["","a"]}\n',
        "escapes": '{"text": "\\u4f60\\ud83d\\ude00\\n\\t\\""}\r\n',
        "broken": '{"text": "a"}\n{"text": \n',
        "wrong_type": '{"text": 7}\n[1, 2]\nnull\n',
        "lengths": '{"src":["a","b"],"tgt":["c"]}\n',
        "not_utf8": b'{"text": "\xff\xfe"}\n',
        "deep": "[" * 200 + "]" * 200 + "\n",
    }


def yaml_seeds():
    seeds = {path.stem: path.read_bytes() for path in sorted((ROOT / "examples").glob("*.yaml"))}
    seeds.update({
        "unknown": "trainig: {steps: 3}\n",
        "range": "training: {steps: -1, micro_batch_size: 1e400}\n",
        "alias": "a: &x [1, 2]\nb: *x\nmodel: {<<: *x}\n",
        "inline": "model: {num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 3}\n",
        "scalar": "7\n",
        "broken": "run: {dir: [}\n",
        "json": '{"run": {"dir": "runs/x"}, "data": {"train": "a"}}\n',
    })
    return seeds


def bodies(*parts):
    return b"".join(bytes([len(part)]) + part for part in parts)


def load_seeds():
    head, one, two = bytes([2, 3, 1, 3]), bytes([1, 0, 5, 5, 5, 9, 0, 6]), bytes([2, 1, 5, 5, 5, 9, 0, 6, 0, 1, 2, 3, 0, 0])
    bias = bytes([200, 1, 2, 5, 5, 5, 9, 0, 6]) + struct.pack("<4f", -1, 1, 0, 0.5)
    return {
        "three": bodies(head, one, two, bias),
        "large": bodies(head, bytes([1, 0]) + b"\xff\xff\xff\xff\x0f" * 6),
        "far": bodies(head, one, b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f\0" + one[2:]),
        "twice": bodies(head, one, one),
        "short": bodies(head, one[:-1]),
        "many_layers": bodies(bytes([127, 3, 1])),
        "many_experts": bodies(b"\1\xff\xff\xff\xff\xff\xff\xff\x7f\1", one),
        "bare": b"CNCLOAD1",
        "length": b"CNCLOAD1" + b"\xff" * 8,
    }


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    makers = {"safetensors_fuzz": safetensors_seeds, "idx_fuzz": idx_seeds, "jsonl_fuzz": jsonl_seeds, "load_fuzz": load_seeds,
              "yaml_fuzz": yaml_seeds}
    for target, maker in makers.items():
        folder = Path(sys.argv[1]) / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in maker().items():
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


if __name__ == "__main__":
    main()
