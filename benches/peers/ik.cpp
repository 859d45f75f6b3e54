// ik_llama.cpp behind five plain functions, so that ik_worker.py needs no layout of its structures.
// run.py compiles it against the sources and the library that it is given.

#include <algorithm>

#include "llama.h"

static void quiet(ggml_log_level, const char *, void *) {}

extern "C" {

/// A model, or null. `repack` rewrites weights to interleaved rows while loading, which excludes mapping the file;
/// `merge` joins queries, keys and values; `huge` asks for large pages.
llama_model *peer_open(const char *path, bool flash, bool repack, bool merge, bool huge) {
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.flash_attn = flash;
    params.repack_tensors = repack;
    params.use_mmap = !repack;
    params.merge_qkv = merge;
    params.use_thp = huge;
    return llama_model_load_from_file(path, params);
}

/// An empty state that computes `ubatch` tokens at once, or null.
llama_context *peer_context(llama_model *model, int n_context, int batch, int ubatch, bool flash) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = n_context;
    params.n_batch = batch;
    params.n_ubatch = ubatch;
    params.flash_attn = flash;
    return llama_init_from_model(model, params);
}

int peer_vocab(const llama_model *model) { return llama_n_vocab(model); }

void peer_clear(llama_context *context) { llama_kv_cache_clear(context); }

/// Runs `n` tokens on from position `at`, for the logits of the last one. Where `logits` is given, it gets those of
/// all tokens, one row each. Answers what llama_decode does.
int peer_run(llama_context *context, const int *tokens, int n, int at, int threads, float *logits) {
    llama_set_n_threads(context, threads, threads);
    llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int i = 0; i < n; ++i) {
        batch.token[i] = tokens[i];
        batch.pos[i] = at + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = logits != nullptr || i == n - 1;
    }
    const int status = llama_decode(context, batch);
    llama_batch_free(batch);
    if (status != 0) {
        return status;
    }
    if (!llama_get_logits_ith(context, n - 1)) { // waits for them
        return -1;
    }
    const size_t vocab = llama_n_vocab(llama_get_model(context));
    for (int i = 0; logits && i < n; ++i) {
        const float *row = llama_get_logits_ith(context, i);
        std::copy(row, row + vocab, logits + i * vocab);
    }
    return 0;
}

} // extern "C"
