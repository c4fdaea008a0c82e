"""The header's ABI is the recorded one:  abi.py COMPILER HEADER RECORD [--record]

Old callers go on working if functions, error codes, and fields at the end of structs that have a
struct_size are added, and nothing else. After such an addition --record writes RECORD anew. What is
looked at is a library of empty functions, made from the header: the real one's DWARF is full of
C++. Needs abigail-tools.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

compiler, header, record = sys.argv[1:4]


def stub(text):
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    functions = re.findall(r"^(?:[a-z][\w ]*[\w*]\W)[^;{}#]*?\bevalrt_\w+\([^;{}]*\);", text, re.M)
    names = {re.search(r"\b(evalrt_\w+)\(", function).group(1) for function in functions
             if not function.startswith("typedef")}
    assert names == set(re.findall(r"\b(evalrt_\w+)\s*\(", text)), names
    return ("#include <evalrt.h>\n#define EVALRT_NULLABLE\n#define EVALRT_NONNULL\n" +
            "\n".join(function[:-1] + " { __builtin_trap(); }" for function in functions
                      if not function.startswith("typedef")))


with tempfile.TemporaryDirectory() as folder:
    source, library, now = (str(Path(folder) / name) for name in ("stub.c", "stub.so", "now.abi"))
    Path(source).write_text(stub(Path(header).read_text(encoding="utf-8")), encoding="utf-8")
    subprocess.run([compiler, "-std=c11", "-g", "-fPIC", "-shared", "-I", Path(header).parent,
                    source, "-o", library], check=True)
    subprocess.run(["abidw", "--drop-undefined-syms", "--no-elf-needed", "--no-corpus-path",
                    "--no-comp-dir-path", "--no-show-locs", "--type-id-style", "hash",
                    "--out-file", record if "--record" in sys.argv else now, library], check=True)
    if "--record" in sys.argv:
        sys.exit(0)
    diff = subprocess.run(["abidiff", "--harmless", "--no-show-locs", record, now],
                          capture_output=True, text=True)
if diff.returncode:
    print(diff.stdout + diff.stderr)
    print("the ABI is not the recorded one. If no old caller can tell, record it with --record; "
          "otherwise EVALRT_ABI goes up")
sys.exit(1 if diff.returncode else 0)
