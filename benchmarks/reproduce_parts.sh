#!/usr/bin/env bash
# All figures of the reproduction, in parts that take less than ten minutes each on an H200.
#
#   benchmarks/reproduce_parts.sh [OUT]      exit code 75: there is more to do, call it again; 0: all is done
#
# MINUTES (7): no unit of work is begun later than this; the longest takes about two.
# DEVICE (cuda), JOBS (14): where to run, and how many units of work at a time; an evaluation has one for each network.
# MPS (0): 1 lets processes compute on the GPU at the same time, not in turns, by NVIDIA's MPS, where that works here.
# HEADTILT_COMMIT: the commit to note, for a copy of the repository without its history.
# What is done lies in OUT/.partial and in the cache folder; keep both between calls.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-results}
device=${DEVICE:-cuda}
minutes=${MINUTES:-7}
jobs=${JOBS:-14}
commit=${HEADTILT_COMMIT:-$(git describe --always --abbrev=40 --dirty=+ --exclude='*' 2>/dev/null || true)}
export HEADTILT_COMMIT=$commit

if [ "${MPS:-0}" = 1 ] && command -v nvidia-cuda-mps-control > /dev/null; then
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    end_mps() { echo quit | timeout 20 nvidia-cuda-mps-control > /dev/null 2>&1 || true; }
    trap end_mps EXIT
    # Where a process cannot use the GPU through it, all goes on without it.
    if ! { nvidia-cuda-mps-control -d && timeout 60 python -c 'import torch; torch.ones(1, device="cuda").item()'; } >&2
    then
        end_mps
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
        echo "MPS does not work here; going on without it" >&2
    fi
fi

# Whether OUT/NAME.json was written by this commit.
done_already() {
    [ -n "$commit" ] && grep -q "\"commit\": \"$commit\"" "$out/$1.json" 2>/dev/null
}

# NAME WORDS…: an evaluation that writes OUT/NAME.json, if there is time left to begin one.
evaluate() {
    local name=$1
    shift
    done_already "$name" && return
    if [ "$SECONDS" -ge $((60 * minutes)) ]; then
        echo "more to do: $name" >&2
        exit 75
    fi
    headtilt evaluate "$@" --device "$device" --out "$out" --name "$name" >&2
}

headtilt reproduce all --device "$device" --jobs "$jobs" --minutes "$minutes" --out "$out"

unfitted=vanilla,tta-mean,tta-max,energy,default,paper3,paper5,tree3-energy,tree3-sum,joint,anneal,balanced,balanced+gate
fitted=vanilla,oracle,orient,accurate,accurate+gate
for set in digits mnist fashion-mnist gtsrb; do
    passes=50 networks=$((jobs < 5 ? jobs : 5))
    [ "$set" = gtsrb ] && passes=5 networks=$((jobs < 3 ? jobs : 3))
    evaluate "$set-affine" "$set" --networks 5 --jobs "$networks" --mc-passes "$passes" --fit-images 12000 --batch 1000 \
        --method "$unfitted,augmented,last-layer"
    evaluate "$set-fitted" "$set" --networks 5 --jobs "$networks" --thorough --fit-images 12000 --method "$fitted"
done
evaluate cifar10-fitted cifar10 --networks 3 --jobs "$((jobs < 3 ? jobs : 3))" --thorough --fit-images 12000 --method "$fitted"
for model in mobilenet_v2 vit_tiny; do
    evaluate "photographs-$model" imagenet-mini --model "hf:${HEADTILT_DATA:-data}/${model}_imagenet" \
        --perturb rotation --limit 0 --fit-images 1000 --thorough --batch 100 --method "$fitted"
done
headtilt reproduce --check --out "$out" || true
echo "all is done" >&2
