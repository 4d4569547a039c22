#!/usr/bin/env bash
# From nothing to a trained small Mixture-of-Experts on real text: about three minutes on two idle cores.
#   bash scripts/quickstart.sh            makes .venv, data/quickstart and runs/quickstart
#   PYTHON=python3.12 bash scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
# OpenMP threads that wait for each other otherwise spin: on a busy machine an iteration takes ten times as long
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"

unset PYTHONDONTWRITEBYTECODE # every command below imports the same modules
export PIP_ONLY_BINARY=":all:" PIP_DISABLE_PIP_VERSION_CHECK=1

if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -e .venv/bin/pip ]; then # a new pip: it selects a wheel in half the time of the one that Python 3.11 contains
        python=${PYTHON:-python3}
        "$python" -m venv --without-pip .venv
        "$python" -m pip --python .venv/bin/python install --quiet --no-compile pip || .venv/bin/python -m ensurepip
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
fi

data=data/quickstart
install() { # Python compiles what it imports: compiling all installed files takes longer
    python -m pip install --quiet --no-compile --constraint constraints.txt "$@"
}
make_data() { # corpus, tokenizer and token ids; the tools need these packages only
    install numpy pyyaml sentencepiece
    python tools/make_corpus.py --output-dir "$data"
    python tools/train_tokenizer.py --input "$data/corpus.jsonl" --vocab-size 4096 --output "$data/tokenizer.model"
    python tools/preprocess_data.py --input "$data/corpus.jsonl" --output-prefix "$data/corpus" \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/tokenizer.model" --append-eod
}

# pip uses one core. The other one makes the data and then compiles what the training imports.
background=()
trap 'kill "${background[@]}" 2>/dev/null || true' EXIT
if [ ! -f "$data/corpus_text_document.idx" ]; then
    make_data &
    background+=("$!")
fi
install torch
{ python -m compileall -q arguments megatron_moe && python -c "import torch"; } &
background+=("$!")
bash scripts/install.sh "" --no-compile
for job in "${background[@]}"; do wait "$job"; done
trap - EXIT

# On a CPU, two ranks with one thread each are faster than one rank with two threads.
ranks=2
[ "$(getconf _NPROCESSORS_ONLN)" -ge 2 ] && ! command -v nvidia-smi >/dev/null || ranks=1
PYTHON=python RANKS_PER_NODE=$ranks bash scripts/launch.sh --recipe quickstart --micro-batch-size $((4 / ranks)) "$@"
python tools/generate.py --load runs/quickstart/checkpoints --prompt "def read(self, " --max-new-tokens 40

cat <<'NEXT'

The run folder is runs/quickstart: look at plots/loss.png and plots/expert_load.png. What next:
  python pretrain_moe.py --recipe quickstart --train-iters 500 --override-opt_param-scheduler   # go on, twice as long
  python tools/convert_checkpoint.py --load runs/quickstart --save hf:exports/quickstart         # for transformers
  python pretrain_moe.py --help moe                                  # every flag of the Mixture-of-Experts layer
NEXT
