#!/usr/bin/env bash
# The main job: the same real evaluation cases one at a time, as harnesses ask them today, and
# batched by evalrt, each against a freshly started server; then both compared.
set -euo pipefail
. "$(dirname "$0")/setup.sh"

usage() {
    cat <<EOF
usage: scripts/eval-throughput-smoke.sh [options]
  --cases N            requests (default 32; with --suite facts all of them)
  --suite NAME         a BFCL category (default simple_python), or facts: questions with exact answers
  --max-tokens N       answer length (default 256; with --suite facts what the suite says)
  --backend NAME       server of the batched run (default mlx-server)
  --model PATH         model (default: a small real one, made on first use)
  --url URL            use the server that runs there; it is not restarted between the runs
  --baseline NAME      who answers one at a time: same (server as batched, default) or tinygpt
  --max-in-flight N    of the batched run (default: what suits the backend)
  --min-speedup X      below this the exit code is 1 (default 3)
  --score              score both runs with the suite's own checker
  --out DIR            results (default: build/smoke)
EOF
}

cases='' suite=simple_python max_tokens='' backend=mlx-server model='' url='' baseline=same
in_flight=auto min_speedup=3 score=no out="$ROOT/build/smoke"
while [ $# -gt 0 ]; do
    case $1 in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac # --cases=8
    case $1 in
    --score) score=yes; shift; continue ;;
    -h | --help) usage; exit 0 ;;
    --cases | --suite | --max-tokens | --backend | --model | --url | --baseline | --max-in-flight | --min-speedup | --out)
        [ $# -ge 2 ] || die "$1 needs a value (--help shows the options)" ;;
    *) die "unknown option $1 (--help shows the options)" ;;
    esac
    case $1 in
    --cases) cases=$2 ;;
    --suite) suite=$2 ;;
    --max-tokens) max_tokens=$2 ;;
    --backend) backend=$2 ;;
    --model) model=$2 ;;
    --url) url=$2 ;;
    --baseline) baseline=$2 ;;
    --max-in-flight) in_flight=$2 ;;
    --min-speedup) min_speedup=$2 ;;
    --out) out=$2 ;;
    esac
    shift 2
done
is_number() { [[ $1 =~ ^[0-9]{1,9}$ ]] && [ "$1" -gt 0 ]; }
[ "$in_flight" = auto ] || is_number "$in_flight" || die "--max-in-flight is a number from 1, or auto, not $in_flight"
[ -z "$max_tokens" ] || is_number "$max_tokens" || die "--max-tokens is a number from 1, not $max_tokens"
[ -z "$cases" ] || is_number "$cases" || die "--cases is a number from 1, not $cases"
[[ $min_speedup =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "--min-speedup is a number, not $min_speedup"
case $baseline in same | tinygpt) ;; *) die "--baseline is same or tinygpt, not $baseline" ;; esac
if [ "$baseline" = tinygpt ]; then
    command -v tinygpt >/dev/null || die "--baseline tinygpt: there is no tinygpt on PATH"
    [ -n "$model" ] || die "--baseline tinygpt: give --model with a model that both servers load"
fi

# Only what an earlier run has left is replaced.
mkdir -p "$out" 2>/dev/null && [ -w "$out" ] || die "cannot write to $out; choose another folder with --out"
if [ ! -e "$out/.evalrt-smoke" ] && [ -n "$(ls -A "$out")" ]; then
    die "$out is not empty and not from an earlier run of this script; choose another folder with --out"
fi
touch "$out/.evalrt-smoke"

say "1/5 setting up (cache: $EVALRT_CACHE)"
setup_build
setup_engine
say "2/5 building"
build release evalrt_program
evalrt="$ROOT/build/release/bin/evalrt"

# A run's answers must not be taken for a later run's.
rm -rf "$out/sequential" "$out/batched" "$out"/*.json "$out"/*.jsonl "$out"/*.part
mkdir -p "$out/sequential" "$out/batched"

server=(--backend "$backend")
if [ -n "$url" ]; then
    server+=(--url "$url")
    [ -z "$model" ] || server+=(--model "$model")
else
    server+=(--model "${model:-$ENGINE_MODEL}")
    [ "$backend" != mlx-server ] || server+=(--executable "$ENGINE_SERVER")
fi
first_server=("${server[@]}")
[ "$baseline" = same ] || first_server=(--backend tinygpt --model "$model")

# ask NAME ARGUMENT...: the suite's cases once, into $out/NAME and $out/NAME.json.
ask() {
    local name=$1 code=0
    shift
    if [ "$suite" = facts ]; then
        "$evalrt" run "$ROOT/scripts/suites/facts.jsonl" -o "$out/$name/out.jsonl" \
            ${cases:+--limit "$cases"} ${max_tokens:+--max-tokens "$max_tokens"} \
            --json "$out/$name.json" "$@" || code=$?
    else
        "$evalrt" bfcl "$suite" --mode prompt --bfcl-data "$BFCL_DATA" --limit "${cases:-32}" \
            --max-tokens "${max_tokens:-256}" --temperature 0 --result-dir "$out/$name" \
            --json "$out/$name.json" "$@" || code=$?
    fi
    # Failed items are the report's business; without a summary there is no report.
    [ $code -le 1 ] && [ -s "$out/$name.json" ] || exit $code
}

export EVALRT_ENGINE_TOUCH_GB=7 # what its 32 sequences and its cache come to take
say "3/5 one at a time"
ask sequential "${first_server[@]}" --max-in-flight 1 --order fifo
say "4/5 batched by evalrt"
ask batched "${server[@]}" --max-in-flight "$in_flight"

say "5/5 time to first token, cold and warm, and what the engine can do at best"
python=$ENGINE/bin/python
"$python" "$ROOT/scripts/smoke_report.py" ttft-requests "$ROOT/scripts/suites/facts.jsonl" "$out/ttft-requests.jsonl"
EVALRT_ENGINE_TOUCH_GB='' "$evalrt" run "$out/ttft-requests.jsonl" -o "$out/ttft.jsonl" "${server[@]}" --max-in-flight 1 --order fifo ||
    say "the time to first token could not be measured"
"$python" "$ROOT/scripts/smoke_report.py" limit-requests "$out"
"$evalrt" run "$out/limit-requests.jsonl" -o "$out/limit.jsonl" "${server[@]}" --max-in-flight 32 --order fifo ||
    say "the engine's limit could not be measured"

scores=()
if [ "$score" = yes ]; then
    say "scoring"
    for name in sequential batched; do
        if [ "$suite" = facts ]; then
            "$python" "$ROOT/scripts/score_facts.py" "$ROOT/scripts/suites/facts_answers.jsonl" \
                "$out/$name/out.jsonl" >"$out/score-$name.json"
        else
            score_env=$(make_venv_for bfcl-score "$ROOT/scripts/score_bfcl.py") || exit 2
            rows=$(find "$out/$name" -name "BFCL_v4_${suite}_result.json")
            [ -n "$rows" ] || die "nothing to score: no case of the run '$name' was answered"
            "$score_env/bin/python" "$ROOT/scripts/score_bfcl.py" --data "$BFCL_DATA" --mode prompt \
                --category "$suite" --report "$out/$name.json" "$rows" >"$out/score-$name.json"
        fi
        scores+=("$out/score-$name.json")
    done
fi
"$python" "$ROOT/scripts/smoke_report.py" report "$out" --min-speedup "$min_speedup" ${scores:+--scores "${scores[@]}"}
