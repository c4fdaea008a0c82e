#!/usr/bin/env bash
# Configures, builds and runs the tests. Without arguments the quick set; `full` is everything;
# labels choose: unit integration capi swift consumer real.
set -euo pipefail
. "$(dirname "$0")/setup.sh"

full=no labels=()
for argument in "$@"; do
    case $argument in
    -h | --help)
        echo "usage: scripts/test.sh [full] [unit|integration|capi|swift|consumer|real ...]"
        echo "Without arguments the quick set; full adds TSan and Clang; labels choose a part."
        exit 0
        ;;
    full) full=yes ;;
    unit | integration | capi | swift | consumer | real) labels+=("$argument") ;;
    *) die "unknown label $argument; known are full unit integration capi swift consumer real" ;;
    esac
done
[ ${#labels[@]} -gt 0 ] || labels=(unit integration capi swift consumer real)
wanted() { [[ " ${labels[*]} " == *" $1 "* ]]; }
skip() { say "SKIPPED $1: $2"; skipped+=("$1"); }
skipped=() failed=()
build_dir() { echo "$ROOT/build/$1"; }

setup_build
compiled='' # labels that ctest runs
for label in unit integration capi consumer; do
    if wanted $label; then compiled+="${compiled:+|}^$label\$"; fi
done

# ctest_preset PRESET LABELS
ctest_preset() {
    ctest --test-dir "$(build_dir "$1")" --output-on-failure -j2 -L "$2" || failed+=("$1: $2")
}

if [ -n "$compiled" ]; then
    say "build and tests: dev (warnings are errors)"
    if wanted capi && ! on_mac; then install_packages abigail-tools; fi
    build dev
    build dev all_verify_interface_header_sets # each public header compiles alone
    ctest_preset dev "$compiled"
fi

if [ $full = yes ] && wanted integration; then
    say "tests that take a minute"
    "$(build_dir dev)/bin/test_runtime" "[.minute]" || failed+=("integration: runtime")
    if ! on_mac; then install_packages strace; fi
    say "a journal's run, killed at 50 moments; each write to its disk failing in turn"
    python3 "$ROOT/tests/integration/journal.py" "$(build_dir dev)/bin/evalrt" --kills 50 \
        Kills FullDisk BrokenDisk || failed+=("integration: journal")
fi

# Sanitizers, on what runs concurrently or reads foreign bytes.
sanitized=$(printf '%s' "$compiled" | tr '|' '\n' | grep -v consumer | paste -sd'|' || true)
if [ -n "$sanitized" ]; then
    say "build and tests: asan (addresses and undefined behaviour)"
    build asan
    ctest_preset asan "$sanitized"
    if [ $full = yes ]; then
        say "build and tests: tsan (threads)"
        build tsan
        ctest_preset tsan "$sanitized"
    fi
fi

if [ $full = yes ]; then
    if wanted unit; then
        if on_mac || install_packages clang-14; then
            say "build and tests: clang"
            build clang
            ctest_preset clang '^unit$'
        fi
    fi
fi

# swift_package FOLDER: builds it, against the installed library, and tests it; no package from elsewhere.
swift_package() {
    local options=(--package-path "$ROOT/$1" --scratch-path "$ROOT/build/swift/$1" --disable-automatic-resolution)
    swift build "${options[@]}" --build-tests -Xswiftc -warnings-as-errors >&2 &&
        EVALRT_TEST_BIN=$(swift build "${options[@]}" --show-bin-path) \
            swift test "${options[@]}" --skip-build --disable-xctest >&2
}

if wanted swift; then
    if ! command -v swift >/dev/null; then
        skip swift "there is no swift on PATH (https://swift.org/install, 6.0 or later)"
    else
        say "build and tests: Swift"
        setup_engine
        build release
        # SwiftPM does not notice another header.
        installed="$ROOT/build/swift/installed" header=include/evalrt_c/evalrt.h
        cmp -s "$ROOT/capi/include/evalrt.h" "$installed/$header" || rm -rf "$ROOT/build/swift"
        cmake --install "$(build_dir release)" --prefix "$installed" >"$EVALRT_CACHE/install.log" ||
            die "the library cannot be installed in $installed"
        (
            libraries=$(dirname "$(find "$installed" -name evalrt_c.pc)")/..
            export PKG_CONFIG_PATH="$libraries/pkgconfig" LD_LIBRARY_PATH="$libraries"
            export EVALRT_TEST_SERVER="$ENGINE_SERVER" EVALRT_TEST_MODEL="$ENGINE_MODEL"
            swift_package capi/swift && swift_package examples/swift
        ) || failed+=("swift")
    fi
fi

# harness_test NAME PYTHON: a harness of others, directly and through the gateway
harness_test() {
    say "real: harnesses: $1"
    "$2" "$ROOT/tests/real/${1}_client.py" --evalrt "$(build_dir release)/bin/evalrt" \
        --server "$ENGINE_SERVER" --model "$ENGINE_MODEL" || failed+=("real: $1")
}

if wanted real; then
    setup_engine
    build release
    build dev bfcl_bodies
    wire=$(make_venv_for bfcl-wire "$ROOT/tests/real/bfcl_wire.py") || exit 2
    say "real: the bytes of bfcl_eval's own client"
    "$wire/bin/python" "$ROOT/tests/real/bfcl_wire.py" --data "$BFCL_DATA" \
        --bodies "$(build_dir dev)/bin/bfcl_bodies" || failed+=("real: bfcl_wire")
    sdk=$(make_venv_for anthropic-sdk "$ROOT/tests/real/anthropic_sdk.py") || exit 2
    say "real: Anthropic's own package"
    "$sdk/bin/python" "$ROOT/tests/real/anthropic_sdk.py" --evalrt "$(build_dir release)/bin/evalrt" ||
        failed+=("real: anthropic_sdk")
    say "real: bfcl_eval's own checker"
    checker=$(make_venv_for bfcl-score "$ROOT/scripts/score_bfcl.py") || exit 2
    "$checker/bin/python" "$ROOT/tests/real/score_bfcl_test.py" --data "$BFCL_DATA" || failed+=("real: score_bfcl")
    say "real: mlx_lm.server"
    "$ENGINE/bin/python" "$ROOT/scripts/make_model.py" "$ENGINE_MODEL-tools" \
        --tools-template "$ROOT/tests/data/tool-chat-template.jinja" >&2
    "$ENGINE/bin/python" "$ROOT/tests/real/mlx_server.py" --evalrt "$(build_dir release)/bin/evalrt" \
        --server "$ENGINE_SERVER" --model "$ENGINE_MODEL" --data "$BFCL_DATA" || failed+=("real: mlx_server")
    clients=$(make_venv_for gateway-clients "$ROOT/tests/real/gateway_clients.py") || exit 2
    say "real: the gateway's clients, the packages openai and anthropic"
    "$clients/bin/python" "$ROOT/tests/real/gateway_clients.py" --evalrt "$(build_dir release)/bin/evalrt" \
        --server "$ENGINE_SERVER" --model "$ENGINE_MODEL" || failed+=("real: gateway_clients")
    if [ $full = yes ]; then
        harness_test sequential "$(command -v python3)"
        harness_test agents "$clients/bin/python"
        for name in bfcl lm_eval inspect litellm; do
            if folder=$(make_venv_for "$name-client" "$ROOT/tests/real/${name}_client.py"); then
                harness_test $name "$folder/bin/python"
            else
                skip "real: $name" "its packages cannot be installed"
            fi
        done
    else
        skip "real: harnesses" "they take minutes each; full runs them"
    fi
    say "real: llama.cpp's server"
    setup_llama
    python3 "$ROOT/tests/real/llama_server.py" --evalrt "$(build_dir release)/bin/evalrt" \
        --python "$LLAMA_PYTHON" || failed+=("real: llama_server")
    if [ $full = yes ]; then
        if folder=$(make_venv_for router "$ROOT/tests/real/router.py"); then
            say "real: sglang-router over two of llama.cpp's servers"
            "$folder/bin/python" "$ROOT/tests/real/router.py" --evalrt "$(build_dir release)/bin/evalrt" \
                --llama "$LLAMA_PYTHON" || failed+=("real: router")
        else
            skip "real: router" "the package sglang-router cannot be installed"
        fi
    else
        skip "real: router" "it takes a minute; full runs it"
    fi
    if [ "${EVALRT_TEST_VLLM:-}" = 1 ]; then
        say "real: vLLM on the CPU"
        setup_vllm
        python3 "$ROOT/tests/real/vllm_server.py" --evalrt "$(build_dir release)/bin/evalrt" \
            --vllm "$VLLM" --model "$VLLM_MODEL" || failed+=("real: vllm_server")
        if folder=$(make_venv_for lm_eval-client "$ROOT/tests/real/lm_eval_client.py"); then
            "$folder/bin/python" "$ROOT/tests/real/lm_eval_client.py" --evalrt "$(build_dir release)/bin/evalrt" \
                --server "$ENGINE_SERVER" --model "$ENGINE_MODEL" --vllm "$VLLM" --vllm-model "$VLLM_MODEL" \
                LmEval.test_log_likelihoods_are_those_of_vllm || failed+=("real: lm_eval on vLLM")
        else
            skip "real: lm_eval on vLLM" "its packages cannot be installed"
        fi
    else
        skip "real: vLLM" "3.5 GB of packages; EVALRT_TEST_VLLM=1 runs it"
    fi
    if [ $full = yes ]; then
        if on_mac; then
            skip "real: Slurm" "it is installed from Debian's packages"
        elif [ "$(id -u)" != 0 ]; then
            skip "real: Slurm" "its daemons here need root"
        elif ! install_packages slurm-wlm munge; then
            skip "real: Slurm" "the packages slurm-wlm and munge cannot be installed"
        else
            say "real: Slurm, an array of four over two servers"
            python3 "$ROOT/tests/real/slurm.py" --evalrt "$(build_dir release)/bin/evalrt" \
                --server "$ROOT/tests/support/fake_openai.py" || failed+=("real: slurm")
        fi
    fi
    say "real: the main job"
    "$ROOT/scripts/eval-throughput-smoke.sh" --cases 12 --max-tokens 64 --min-speedup 0 --out "$ROOT/build/smoke-test" &&
        "$ENGINE/bin/python" "$ROOT/tests/real/check_report.py" "$ROOT/build/smoke-test/report.json" 12 ||
        failed+=("real: smoke")
fi

[ ${#skipped[@]} -eq 0 ] || say "skipped: ${skipped[*]}"
if [ ${#failed[@]} -gt 0 ]; then
    for name in "${failed[@]}"; do say "FAILED $name"; done
    exit 1
fi
say "all tests passed"
