"""llama.cpp's server, as it is: server.py MODEL FOLDER; says where it listens, ends with its standard input.

Slots are saved in the folder and restored from there.
"""

import sys

import xllamacpp


def main() -> None:
    model, folder = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.port = 1024, 2, 0
    params.slot_save_path = f"{folder}/"
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
