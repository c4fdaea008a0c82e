"""The library exports exactly the header's functions:  exports.py HEADER LIBRARY NM LINKER_LIST"""

import re
import subprocess
import sys

header, library, nm, linker_list = sys.argv[1:]
text = re.sub(r"/\*.*?\*/", "", open(header, encoding="utf-8").read(), flags=re.S)
declared = set(re.findall(r"\b(evalrt_\w+)\s*\(", text))

mac = library.endswith(".dylib")
out = subprocess.run([nm, "-gU" if mac else "-D", library] + ([] if mac else ["--defined-only"]),
                     check=True, capture_output=True, text=True).stdout
symbols = [line.split() for line in out.splitlines()]
# GNU: "evalrt_open@@EVALRT_1", and the version itself as an absolute symbol.
exported = {symbol[-1].split("@")[0] for symbol in symbols if symbol[-2] != "A"}
if mac:
    exported = {name.removeprefix("_") for name in exported}

listed = {line.removeprefix("_") for line in open(linker_list, encoding="utf-8").read().split()}

ok = True
for what, names in ("exported", exported), ("listed for the macOS linker", listed):
    for name in sorted(names ^ declared):
        print(f"{name}: {f'not {what}' if name in declared else f'{what}, but not in the header'}")
        ok = False
print(f"{len(declared)} functions in the header")
sys.exit(0 if ok and len(declared) > 10 else 1)
