#!/usr/bin/env bash
# Installs the Debian packages that Concerto needs. Does nothing, and asks nobody, when they are all there.
#
#   scripts/install_deps.sh [--run | --test | --all] [--list]
#
# --run   compiler, libraries, and the texts of the quickstart (the default)
# --test  compiler, libraries, and what the fast tests need
# --all   all of the above, and clang and clang-format for the format check and the fuzz targets
# --list  print the names of the packages and stop
set -euo pipefail
cd "$(dirname "$0")/.."

build=(g++ cmake ninja-build pkg-config ccache libdnnl-dev libyaml-cpp-dev nlohmann-json3-dev libcli11-dev libfmt-dev
       libsentencepiece-dev libopenmpi-dev openmpi-bin libgtest-dev)  # the tests share the build folder, so configuring it wants GoogleTest
# A package of texts, and a file of it: slim images drop /usr/share/doc and /usr/share/man, where some of the texts live.
texts=(bible-kjv dict-gcide wordnet-base debian-handbook manpages-zh debian-reference-zh-cn)
text_files=(/usr/bin/bible /usr/share/dictd/gcide.dict.dz /usr/share/wordnet/data.noun
            /usr/share/doc/debian-handbook/html/zh-CN /usr/share/man/zh_CN/man1 /usr/share/debian-reference/debian-reference.zh-cn.txt.gz)
tests=(python3 git)
checks=(clang-16 libclang-rt-16-dev clang-format-14)  # older clang lacks parts of C++20; format 14 is the pinned one

wanted=("${build[@]}" "${texts[@]}")
list_only=
with_texts=1
for argument in "$@"; do
  case $argument in
    --run) ;;
    --test) wanted=("${build[@]}" "${tests[@]}"); with_texts= ;;
    --all) wanted=("${build[@]}" "${texts[@]}" "${tests[@]}" "${checks[@]}") ;;
    --list) list_only=1 ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
done
if [[ $list_only ]]; then
  printf '%s\n' "${wanted[@]}"
  exit 0
fi

if [[ $(uname -m) != x86_64 ]]; then
  echo "install_deps: this machine is $(uname -m); Concerto runs on x86-64 Linux so far." >&2
  exit 1
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  echo "install_deps: no apt-get here. Concerto is built and tested on Debian 12 (bookworm)." >&2
  echo "On another system install the equal of these, then run scripts/build.sh: ${wanted[*]}" >&2
  exit 1
fi

is_installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

missing=()
for package in "${wanted[@]}"; do is_installed "$package" || missing+=("$package"); done
stripped=()
if [[ $with_texts ]]; then
  for i in "${!texts[@]}"; do
    if is_installed "${texts[i]}" && [[ ! -e ${text_files[i]} ]]; then stripped+=("${texts[i]}"); fi
  done
fi
if ((${#missing[@]} + ${#stripped[@]} == 0)); then
  echo "install_deps: all ${#wanted[@]} packages are installed"
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "install_deps: not root, and no sudo. Ask an administrator to run: apt-get install ${missing[*]} ${stripped[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
apt_get() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 \
    -o Dpkg::Options::=--path-include=/usr/share/doc/* -o Dpkg::Options::=--path-include=/usr/share/man/zh* "$@" </dev/null
}
install() {
  # A third-party source that does not answer must not stop the packages of Debian: the install decides.
  apt_get update || echo "install_deps: apt-get update failed; trying with the package lists that are here" >&2
  if ((${#missing[@]})); then apt_get install --no-install-recommends "${missing[@]}" || return 1; fi
  if ((${#stripped[@]})); then apt_get install --reinstall "${stripped[@]}" || return 1; fi
}

echo "install_deps: installing ${missing[*]} ${stripped[*]}"
for try in 1 2 3; do
  if install; then exit 0; fi
  if ((try < 3)); then
    echo "install_deps: try $try of 3 failed; again in $((try * 10)) s" >&2
    sleep $((try * 10))
  fi
done
echo "install_deps: apt-get could not install these packages (its own message stands above): ${missing[*]} ${stripped[*]}" >&2
exit 1
