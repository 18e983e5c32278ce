#!/usr/bin/env bash
# Checks what a reviewer would otherwise count by hand: long files, unfinished marks, paths of somebody's machine, commit subjects.
set -euo pipefail
cd "$(dirname "$0")/.."

faults=0
fault() {
  printf '%s\n' "$1" >&2
  faults=$((faults + 1))
}

mapfile -t sources < <(git ls-files '*.cc' '*.h' '*.cpp' '*.cu' '*.sh' '*.py')
if ((${#sources[@]} == 0)); then
  echo "check_text: git lists no sources here" >&2
  exit 1
fi
for file in "${sources[@]}"; do
  case $file in
    tests/golden/make_golden.py) continue ;;  # came as one file with its goldens
  esac
  [[ -f $file ]] || continue  # deleted, not yet committed
  lines=$(wc -l <"$file")
  if ((lines > 800)); then fault "$file: $lines lines; the ceiling is 800"; fi
done

# The brackets keep these patterns from finding themselves.
while IFS= read -r line; do
  fault "unfinished: $line"
done < <(git grep -nIE 'TO[D]O|FIX[M]E|\bX[X]X\b|\bNY[I]\b' -- "${sources[@]}" .ci CMakeLists.txt cmake '*/CMakeLists.txt' examples)
while IFS= read -r line; do
  fault "a path of one machine: $line"
done < <(git grep -nIE '(^|[^[:alnum:]_.-])/(work|farm|root|home)/[[:alnum:]_.]' -- . ':!LICENSE')

# Subjects of the last 50 commits: `area: what` (git itself writes `Revert "area: what"`), at most 72 characters.
count=0
while IFS= read -r subject; do
  count=$((count + 1))
  if ((${#subject} > 72)); then fault "commit subject of ${#subject} characters, at most 72: $subject"; fi
  if [[ ! $subject =~ ^(Revert\ \")?[a-z0-9_./,\ -]+:\ . ]]; then fault "commit subject is not 'area: what': $subject"; fi
done < <(git log --no-merges -50 --format=%s)

if ((faults > 0)); then
  echo "text: $faults faults" >&2
  exit 1
fi
echo "text: ${#sources[@]} sources, $count commits, no fault"
