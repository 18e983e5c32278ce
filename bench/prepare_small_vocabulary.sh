#!/usr/bin/env bash
# Makes what bench/moe_vs_dense.py trains on: the King James Bible and the whole of a dictionary (GCIDE) in tokens of a small vocabulary,
# so that tiny models see many tokens for each of their parameters. Does nothing when the files are there.
#
#   bench/prepare_small_vocabulary.sh FOLDER [--vocab-size N]
#
#   FOLDER/{train,valid}.{bin,idx}   token files; `valid` holds one document in a hundred, which `train` does not hold
#   FOLDER/tokenizer                 trained on the first million bytes of the text
# CONCERTO names the program (default build/release/bin/concerto). Texts: packages bible-kjv and dict-gcide (scripts/install_deps.sh --run).
set -euo pipefail
if [[ $# -ne 1 && ! ($# -eq 3 && $2 == --vocab-size) ]]; then sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; fi
root=$(cd "$(dirname "$0")/.." && pwd)
clean=$root/scripts/clean_text.awk concerto=${CONCERTO:-$root/build/release/bin/concerto}
folder=$1 vocab_size=${3:-2048}
if [[ -s $folder/valid.idx ]]; then exit 0; fi
[[ -x $concerto ]] || { echo "no program at $concerto: scripts/build.sh, or set CONCERTO" >&2; exit 1; }
command -v bible >/dev/null && [[ -e /usr/share/dictd/gcide.dict.dz ]] ||
  { echo "the texts are missing: scripts/install_deps.sh --run, or apt-get install bible-kjv dict-gcide" >&2; exit 1; }

export LC_ALL=C
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bible -l100000 gen1:1-rev22:21 </dev/null | awk -v kind=bible -f "$clean" >"$work/bible"
zcat </usr/share/dictd/gcide.dict.dz | awk -v kind=gcide -f "$clean" >"$work/gcide"
# Whole documents go to one side or the other; one that was seen before goes to neither.
cat "$work/bible" "$work/gcide" | { iconv -c -f UTF-8 -t UTF-8 || true; } | awk -v train="$work/train.txt" -v valid="$work/valid.txt" '
  $0 == "\f" {
    if (!seen[doc]++) printf "%s\f\n", doc > (++count % 100 == 0 ? valid : train)
    doc = ""
    next
  }
  { doc = doc $0 "\n" }'

mkdir -p "$folder/tokenizer"
"$concerto" data tokenizer train --input "$work/train.txt" --vocab-size "$vocab_size" --max-bytes 1000000 --output "$folder/tokenizer"
"$concerto" data pack --tokenizer "$folder/tokenizer" --split page --output "$folder/train" "$work/train.txt"
"$concerto" data pack --tokenizer "$folder/tokenizer" --split page --output "$folder/valid" "$work/valid.txt"
