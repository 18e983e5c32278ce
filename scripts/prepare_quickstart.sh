#!/usr/bin/env bash
# Makes what examples/quickstart.yaml trains on, from texts in Debian's packages; does nothing when it is all there.
#
#   scripts/prepare_quickstart.sh [--force]
#
#   data/quickstart/{en,zh,valid}.{bin,idx}   token files; `valid` holds one document in a hundred, which the other two do not hold
#   data/sft/{train,valid}.{jsonl,bin,idx,lsm}  questions and answers from WordNet, for fine-tuning
#   models/moe-10m                            config.json and tokenizer
#
# CONCERTO names the program (default build/release/bin/concerto).
set -euo pipefail
cd "$(dirname "$0")/.."
concerto=${CONCERTO:-build/release/bin/concerto}
data=data/quickstart sft=data/sft model=models/moe-10m
config=examples/models/moe-10m/config.json clean=scripts/clean_text.awk
vocab_size=8192 valid_share=100

bible_data=/usr/lib/bible.data
gcide=/usr/share/dictd/gcide.dict.dz
wordnet=/usr/share/wordnet/data.noun
handbook=/usr/share/doc/debian-handbook/html
man_zh=/usr/share/man/zh_CN
reference_zh=/usr/share/debian-reference/debian-reference.zh-cn.txt.gz

# The stamp says what the files were made from; another script, cleaner or config makes them anew.
stamp=$(cat scripts/prepare_quickstart.sh "$clean" "$config" | cksum)
wanted=("$data"/{en,zh,valid}.{bin,idx} "$sft"/{train,valid}.{jsonl,bin,idx,lsm} "$model"/{config.json,tokenizer.model,tokenizer.json})
is_complete() {
  [[ -f $data/stamp && $(<"$data/stamp") == "$stamp" ]] || return 1
  local file
  for file in "${wanted[@]}"; do [[ -s $file ]] || return 1; done
}
if [[ ${1:-} != --force ]] && is_complete; then
  echo "prepare_quickstart: $data, $sft and $model are there; nothing to do (--force makes them anew)"
  exit 0
fi
if [[ ! -x $concerto ]]; then
  echo "prepare_quickstart: $concerto is not there. Build it with scripts/build.sh release, or name it in CONCERTO." >&2
  exit 1
fi

# The texts, and `bible`, which unpacks the first of them.
texts_are_there() { [[ -e $bible_data && -e $gcide && -e $wordnet && -e $handbook/zh-CN && -e $man_zh/man1 && -e $reference_zh ]]; }
texts_are_there || scripts/install_deps.sh --run
if ! command -v bible >/dev/null; then
  as_root=()
  if ((EUID != 0)); then as_root=(sudo); fi
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -q install --no-install-recommends bible-kjv </dev/null >/dev/null
fi
texts_are_there || { echo "prepare_quickstart: the texts of scripts/install_deps.sh --list are not all where Debian 12 keeps them" >&2; exit 1; }

export LC_ALL=C
mkdir -p "$data" "$sft" "$model"
rm -f "$data/stamp"
work=$(mktemp -d "$data/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
say() { printf 'prepare_quickstart: %s\n' "$*"; }

say "extracting text"
bible -l100000 gen1:1-rev22:21 </dev/null | awk -v kind=bible -f "$clean" >"$work/bible"
zcat <"$gcide" | awk -v kind=gcide -v every=4 -f "$clean" >"$work/gcide"
awk -v kind=html -f "$clean" "$handbook"/en-US/*.html >"$work/handbook_en"
awk -v kind=html -v chinese=1 -f "$clean" "$handbook"/zh-CN/*.html >"$work/handbook_zh"
# Of that package only: other packages bring pages too, and the data must not depend on what else a machine has.
dpkg-query -L manpages-zh | grep "^$man_zh/.*\.gz$" | sort | while read -r page; do if [[ ! -L $page ]]; then zcat <"$page"; echo; fi; done |
  awk -v kind=man -v chinese=1 -f "$clean" >"$work/man_zh"
zcat <"$reference_zh" | awk -v kind=book -v chinese=1 -f "$clean" >"$work/reference_zh"

# Whole documents go to one side or the other; a document that was seen before goes to neither. Not all pages are UTF-8 throughout.
hold_out() {
  local file
  for file in "${@:3}"; do iconv -c -f UTF-8 -t UTF-8 "$file" || true; done |
  awk -v share="$valid_share" -v train="$1" -v valid="$2" '
    $0 == "\f" {
      if (!seen[doc]++) printf "%s\f\n", doc > (++count % share == 0 ? valid : train)
      doc = ""
      next
    }
    { doc = doc $0 "\n" }'
}
hold_out "$work/en.txt" "$work/valid_en.txt" "$work/bible" "$work/gcide" "$work/handbook_en"
hold_out "$work/zh.txt" "$work/valid_zh.txt" "$work/man_zh" "$work/reference_zh" "$work/handbook_zh"

say "training a tokenizer of $vocab_size tokens"
"$concerto" data tokenizer train --input "$work/en.txt" "$work/zh.txt" --vocab-size "$vocab_size" --max-bytes 6000000 --output "$model"
cp "$config" "$model/config.json"

say "packing token files"
"$concerto" data pack --tokenizer "$model" --split page --output "$data/en" "$work/en.txt"
"$concerto" data pack --tokenizer "$model" --split page --output "$data/zh" "$work/zh.txt"
"$concerto" data pack --tokenizer "$model" --split page --output "$data/valid" "$work/valid_en.txt" "$work/valid_zh.txt"

say "making records for fine-tuning"
# A noun's first word and its meaning up to the first example.
awk '$1 ~ /^[0-9]+$/ && split($0, part, " \\| ") > 1 && !seen[$5]++ && ++count % 40 == 0 {
    word = $5
    gsub(/_/, " ", word)
    meaning = part[2]
    sub(/[;"].*/, "", meaning)
    sub(/ +$/, "", meaning)
    if (meaning == "" || (word meaning) ~ /[\\"]/) next
    printf "{\"src\": [\"What is the meaning of %s?\"], \"tgt\": [\"%s: %s.\"]}\n", word, word, meaning
  }' "$wordnet" >"$work/words.jsonl"
awk 'NR % 20 == 0' "$work/words.jsonl" >"$sft/valid.jsonl"
awk 'NR % 20 != 0' "$work/words.jsonl" >"$sft/train.jsonl"
for part in train valid; do "$concerto" data pack --tokenizer "$model" --output "$sft/$part" "$sft/$part.jsonl"; done

printf '%s\n' "$stamp" >"$data/stamp"
say "done: $data, $sft, $model"
