#!/usr/bin/env bash
# From a fresh Debian to a language model in training: packages, build, data, training, a sample. Run it again to go on where it stopped.
#
#   scripts/quickstart.sh [--section.key=value]...      the options go to `concerto train`
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/stages.sh

interrupted=
trap 'interrupted=1' INT
concerto=build/release/bin/concerto
run=runs/quickstart
for option in "$@"; do if [[ $option == --run.dir=* ]]; then run=${option#--run.dir=}; fi; done

stage "packages (Debian's own; asks for a password only where sudo does)" scripts/install_deps.sh --run
stage "build" scripts/build.sh release concerto
stage "data: tokenizer, token files, model folder" scripts/prepare_quickstart.sh
stage "training" "$concerto" train examples/quickstart.yaml "$@"
if [[ $interrupted ]]; then
  printf '\nStopped; what was learnt is saved. Go on with: scripts/quickstart.sh\n'
  exit 130
fi
stage_summary
cat <<END

What the run left in $run:
  metrics.jsonl     one line a step          tail -n 1 $run/metrics.jsonl
  trace.json        a few steps in detail    open it in Perfetto (ui.perfetto.dev)
  events.out.*      for TensorBoard          tensorboard --logdir runs
  checkpoint-*      to go on from            $concerto checkpoint inspect $run/latest
  model             a Hugging Face folder    $concerto generate --model $run/model --prompt "In the beginning"
END
