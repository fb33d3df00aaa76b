#include "llmc/text/prefix.h"
#include <stdlib.h>
#include <string.h>

static int compare_tokens(const void *a, const void *b, void *tokens)
{
    int32_t i = *(const int32_t *)a, k = *(const int32_t *)b;
    const TokenBytes *x = (const TokenBytes *)tokens + i, *y = (const TokenBytes *)tokens + k;
    int order = memcmp(x->bytes, y->bytes, x->length < y->length ? x->length : y->length);
    if (order)
        return order;
    return x->length != y->length ? (x->length < y->length ? -1 : 1) : (i > k) - (i < k);
}

static bool is_proper_prefix(const TokenBytes *of, const TokenBytes *x)
{
    return x->length < of->length && !memcmp(x->bytes, of->bytes, x->length);
}

void prefix_table(int32_t *prefix, const TokenBytes *tokens, int count)
{
    int32_t *sorted = xcalloc((size_t)count + 1, sizeof *sorted),
            *stack = xcalloc((size_t)count + 1, sizeof *stack);
    int n = 0, depth = 0;
    for (int i = 0; i < count; i++) {
        prefix[i] = -1;
        if (tokens[i].length)
            sorted[n++] = i;
    }
    qsort_r(sorted, (size_t)n, sizeof *sorted, compare_tokens, (void *)tokens);

    for (int i = 0; i < n; i++) {
        int32_t id = sorted[i];
        while (depth > 0 && !is_proper_prefix(&tokens[id], &tokens[stack[depth - 1]]))
            depth--;
        if (depth > 0)
            prefix[id] = stack[depth - 1];
        stack[depth++] = id;
    }
    free(sorted);
    free(stack);
}

TokenBytes *token_bytes(const Tokenizer *t, int padded)
{
    TokenBytes *tokens = xcalloc((size_t)padded, sizeof *tokens);
    for (int id = 0; id < tokenizer_vocab_size(t); id++) {
        if (id != tokenizer_document(t))
            tokens[id].bytes = tokenizer_token(t, id, &tokens[id].length);
    }
    return tokens;
}

int32_t *prefix_table_of(const Tokenizer *t, int padded, int *found)
{
    TokenBytes *tokens = token_bytes(t, padded);
    int32_t *prefix = xcalloc((size_t)padded, sizeof *prefix);
    prefix_table(prefix, tokens, padded);
    *found = 0;
    for (int id = 0; id < padded; id++)
        *found += prefix[id] >= 0;
    free(tokens);
    return prefix;
}
