#!/bin/sh
# All that takes a real GPU, in parts of under ten minutes each. Needs torch, pytest and tabulate, and nothing else.
#
#     tools/gpu_day.sh                   # all parts, one after the other, then the report
#     tools/gpu_day.sh tests gpt report  # these
#
# tests             what is marked for GPUs
# no-cache          the same with PYTORCH_NO_CUDA_MEMORY_CACHING=1, where memory that is given back too early faults
# gpt, resnet       time and memory of steps at one and two stages on one device, predicted and measured
# gpt-compiled ...  the same, compiled
# report            one Markdown table of all that the parts have left
#
# OUT is where they write (gpu-day). DEVICE=cpu SIZE=toy ROUNDS=2 shows on any machine that it runs.
set -u
cd "$(dirname "$0")/.." || exit 2
OUT=${OUT:-gpu-day} DEVICE=${DEVICE:-cuda:0} SIZE=${SIZE:-full} ROUNDS=${ROUNDS:-15} PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT" || exit 2
failed=""

run() { # part, command ...: what it prints is kept, and whether it failed
    part=$1
    shift
    echo "== $part"
    timeout "${LIMIT:-570}" "$@" >"$OUT/$part.log" 2>&1
    status=$?
    echo "$status" >"$OUT/$part.status"
    tail -n 5 "$OUT/$part.log"
    [ "$status" -eq 0 ] || failed="$failed $part($status)"
}

tests() { run "$1" "$PYTHON" -m pytest -q -W default -p no:cacheprovider -m "cuda or multi_gpu" -rs tests/gpu tests/unit; }

bench() { # part, model, more options
    part=$1 model=$2
    shift 2
    run "$part" "$PYTHON" tools/bench/gpu.py --device "$DEVICE" --size "$SIZE" --rounds "$ROUNDS" --models "$model" \
        --markdown "$OUT/$part.md" --json "$OUT/$part.json" "$@"
}

report() {
    {
        echo "# A GPU: $("$PYTHON" -c "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'none')")"
        echo
        echo "| part | status | last line |"
        echo "|---|---|---|"
        for status in "$OUT"/*.status; do
            part=$(basename "$status" .status)
            echo "| $part | $(cat "$status") | $(tail -n 1 "$OUT/$part.log" | tr '|' ' ') |"
        done
        for table in "$OUT"/*.md; do
            [ "$table" = "$OUT/report.md" ] || { echo; cat "$table"; }
        done
    } >"$OUT/report.new"
    mv "$OUT/report.new" "$OUT/report.md"
    cat "$OUT/report.md"
}

for part in ${*:-tests no-cache gpt gpt-compiled resnet resnet-compiled report}; do
    case $part in
    tests) tests tests ;;
    no-cache) PYTORCH_NO_CUDA_MEMORY_CACHING=1 tests no-cache ;;
    gpt | resnet) bench "$part" "$part" --eager --schedules gpipe,1f1b,zero_bubble ;;
    *-compiled) bench "$part" "${part%-compiled}" --compiled --schedules 1f1b --checkpoints never ;;
    report) report ;;
    *) echo "no part is called $part: see the head of $0" >&2 && exit 2 ;;
    esac
done
[ -z "$failed" ] || { echo "failed:$failed" >&2 && exit 1; }
