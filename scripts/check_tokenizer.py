#!/usr/bin/env python3
"""Compares Concerto's tokenizer with Hugging Face's on mixed lines: English, Chinese, code, blanks, emoji, control tokens. Run by hand; needs `pip install transformers`.

    scripts/check_tokenizer.py [--folder models/moe-10m] [--concerto build/release/bin/concerto] [--lines 1000] [--text FILE]...

Checks the ids of every line, that both decode them to the line again, and the chat template. Says the first differences and exits 1 if there is one.
"""
import argparse
import json
import random
import subprocess
import sys

WORDS = """the and of in to that he was God said unto LORD shall which Debian package file system command user option
系统 文件 命令 使用 可以 软件包 配置 用户 参数 如果 一个 设置 目录 显示 返回 错误 网络 数据 服务 程序""".split()
CODE = ["def f(x):", "    return x + 1", "\tif (a == b) {", "for (int i = 0; i < n; ++i)", "x = [1, 2, 3]  # list", "std::vector<int32_t> v;",
        "<div class=\"a\">", "SELECT * FROM t;", "$ apt-get install -y", "0x7fff_ffff", "3.14159e-10", "----====----", "aaaaabbbbaaaa", "a_b__c"]
SYMBOLS = list("  \t—…“”‘’🙂🚀👩‍👩‍👧‍👦🇨🇳é̃ßñЖक한日本語，。！？、；：（）《》0123456789+-*/\\|~`^%$#@&'\"{}[]<>") + ["\u3000", "\u200b", "\ufeff", "   ", "</s>", "<s>", "<unk>",
        "<|begin_of_sentence|>", "<|end_of_sentence|>", "\x01"]


def make_line(rng, texts):
    kind = rng.randrange(6)
    if kind == 0:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 30)))
    if kind == 1:
        return rng.choice(CODE) + " " * rng.randint(0, 12) + rng.choice(CODE)
    if kind == 2:
        return "".join(rng.choice(SYMBOLS) for _ in range(rng.randint(0, 40)))
    if kind == 3:
        ranges = [(0x20, 0x7e), (0x4e00, 0x9fff), (0xa0, 0x24f), (0x400, 0x4ff), (0x1f300, 0x1f6ff), (0x3041, 0x30ff)]
        return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 40)))
    if kind == 4 and texts:
        return rng.choice(texts)
    return "".join(rng.choice(WORDS + SYMBOLS + CODE) for _ in range(rng.randint(1, 25)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="models/moe-10m")
    parser.add_argument("--concerto", default="build/release/bin/concerto")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", action="append", default=[], help="a UTF-8 file whose lines are used too")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    rng = random.Random(args.seed)
    texts = [line.rstrip("\r\n") for name in args.text for line in open(name, encoding="utf-8")]
    lines = [make_line(rng, texts) for _ in range(args.lines)]
    run = subprocess.run([args.concerto, "data", "tokenizer", "encode", "--json", "--tokenizer", args.folder], input=("\n".join(lines) + "\n").encode(),
                         stdout=subprocess.PIPE, check=True)
    ours = [json.loads(line) for line in run.stdout.splitlines()]
    theirs = AutoTokenizer.from_pretrained(args.folder)
    faults = 0

    def fault(text):
        nonlocal faults
        faults += 1
        if faults <= 5:
            print(text)

    if len(ours) != len(lines):
        sys.exit(f"{len(lines)} lines given, {len(ours)} came back")
    for line, ids in zip(lines, ours):
        wanted = theirs.encode(line, add_special_tokens=False)
        if ids != wanted:
            fault(f"{line!r}:\n  ours   {theirs.convert_ids_to_tokens(ids)}\n  theirs {theirs.convert_ids_to_tokens(wanted)}")
        # U+2581 stands for a blank inside SentencePiece and comes back as one; no line here holds it.
        if theirs.decode(ids, skip_special_tokens=False) != line:
            fault(f"{line!r}: theirs decodes our ids to {theirs.decode(ids, skip_special_tokens=False)!r}")
    for line, ids in list(zip(lines, ours))[:20]:
        if not ids:
            continue
        run = subprocess.run([args.concerto, "data", "tokenizer", "decode", "--json", "--special", "--tokenizer", args.folder, *map(str, ids)], stdout=subprocess.PIPE,
                             check=True)
        if json.loads(run.stdout) != line:
            fault(f"{line!r}: ours decodes to {json.loads(run.stdout)!r}")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "3?"}]
    chat = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if chat != "<|begin_of_sentence|>Be brief.\nUser: 2+2?\nAssistant: 4<|end_of_sentence|>User: 3?\nAssistant: ":
        fault(f"the chat template gives {chat!r}")
    print(f"{type(theirs).__name__}: {len(lines)} lines, {sum(map(len, ours))} ids, {faults} differences")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
