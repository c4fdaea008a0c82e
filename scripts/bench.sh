#!/usr/bin/env bash
# Benchmarks against peers and bounds, in one run each: JSON lines on stdout, a table on stderr.
set -euo pipefail
. "$(dirname "$0")/setup.sh"

bin="$ROOT/build/bench/bin"

# One line a benchmark: its name, the packages it needs on Debian, and on macOS, its targets, and
# what runs it.
benchmarks=(
    "client|wrk nginx-light libcurl4-openssl-dev valgrind strace|wrk nginx|bench_client bench_server bench_curl|python3 $ROOT/tests/bench/client.py --bin $bin"
    "capi|nginx-light|nginx|bench_capi|python3 $ROOT/tests/bench/capi.py --bin $bin"
    "dry-run|||evalrt_program|python3 $ROOT/tests/bench/dry_run.py --bin $bin"
    "gateway|wrk nginx-light|wrk nginx|bench_server evalrt_program|python3 $ROOT/tests/bench/gateway.py --bin $bin"
    "engines|||bench_engines|python3 $ROOT/tests/bench/engines.py --bin $bin"
    "engines-real|||bench_engines evalrt_program bench_bodies|engines_real"
    "journal|nginx-light|nginx|bench_journal|python3 $ROOT/tests/bench/journal.py --bin $bin"
    "planner|||bench_planner|python3 $ROOT/tests/bench/planner.py --bin $bin"
    "replicas|||evalrt_program|replicas"
)

# The engines that the tests use, in a run of ten minutes; EVALRT_BENCH_HEAVY=1 adds vLLM, llama.cpp
# compiled here, and fifty rows one at a time: 4 GB of packages and another half hour.
engines_real() {
    local heavy=()
    setup_engine
    setup_llama
    if [ "${EVALRT_BENCH_HEAVY:-}" = 1 ]; then
        setup_native_llama
        setup_vllm
        heavy=(--long --native-llama "$NATIVE_LLAMA" "$NATIVE_LLAMA_MODEL" --vllm "$VLLM" "$VLLM_MODEL")
    fi
    python3 "$ROOT/tests/bench/engines_real.py" --bin "$bin" --server "$ENGINE_SERVER" --model "$ENGINE_MODEL" \
        --python "$ENGINE/bin/python" --llama "$LLAMA_PYTHON" --data "$BFCL_DATA" ${heavy[@]+"${heavy[@]}"}
}

# About three minutes.
replicas() {
    local folder
    setup_llama
    folder=$(make_venv_for router "$ROOT/tests/real/router.py") || return
    python3 "$ROOT/tests/bench/replicas.py" --bin "$bin" --llama "$LLAMA_PYTHON" --router "$folder/bin/sglang-router"
}

names=()
for line in "${benchmarks[@]}"; do names+=("${line%%|*}"); done
for argument in "$@"; do
    case " ${names[*]} " in
    *" $argument "*) ;;
    *)
        echo "usage: scripts/bench.sh [NAME...]; known are: ${names[*]}"
        case $argument in -h | --help) exit 0 ;; *) exit 2 ;; esac
        ;;
    esac
done

setup_build
failed=()
for line in "${benchmarks[@]}"; do
    IFS='|' read -r name debian mac targets command <<<"$line"
    [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
    read -ra packages <<<"$(if on_mac; then echo "$mac"; else echo "$debian"; fi)"
    install_packages "${packages[@]}"
    read -ra targets <<<"$targets"
    if on_mac; then
        say "$name: without libcurl (its client uses epoll), valgrind and strace, which macOS lacks"
        targets=("${targets[@]/bench_curl/}")
    fi
    build bench ${targets[@]}
    say "benchmark: $name"
    $command || failed+=("$name")
done
if [ ${#failed[@]} -gt 0 ]; then
    say "missed a goal: ${failed[*]}"
    exit 1
fi
