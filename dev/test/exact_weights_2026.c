// Files of weights of the records of summer 2026: a network that was loaded from the reference's file by the
// test's own map writes the same file, but for the matrices of no layer, and reads it back.
#include "dev/test/golden_2026.h"
#include "dev/test/tap.h"
#include "llmc/io/weights.h"
#include <unistd.h>

static Golden2026 g;

static void write_file(Trainer *t, const char *path)
{
    Error e;
    SafeWriter *w = safewriter_begin(path, &e);
    if (!w)
        fatal(1, "%s", e.text);
    weights_declare(t, w);
    if (!weights_write(t, w, &e) || !safewriter_commit(w, &e))
        fatal(1, "%s", e.text);
}

// Whether a parameter holds element i of a tensor of the file.
static bool is_held(const char *name, int64_t i)
{
    const Params *p = &g.model.params;
    for (int k = 0; k < p->count; k++) {
        const Param *a = &p->list[k];
        int64_t matrix = a->rows * a->cols, first = a->file_first * matrix;
        if (!strcmp(a->spec->name, name) && i >= first && i < first + a->matrices * matrix)
            return true;
    }
    return false;
}

static void compare_tensor(const SafeTensors *written, const TensorInfo *info)
{
    const TensorInfo *found = safetensors_find(written, info->name);
    bool shape = found && found->ndim == info->ndim;
    for (int i = 0; shape && i < info->ndim; i++)
        shape = found->shape[i] == info->shape[i];
    ok(shape, "%s has its shape", info->name);
    if (!shape)
        return;
    int64_t n, held = 0, zero = 0, wrong = 0;
    float *want = read_golden(g.init, info->name, &n), *got = read_golden(written, info->name, NULL);
    for (int64_t i = 0; i < n; i++) {
        bool mine = is_held(info->name, i);
        held += mine;
        zero += !mine && got[i] == 0;
        wrong += mine && got[i] != want[i];
    }
    ok(wrong == 0 && held > 0 && held + zero == n, "  its %lld values are the file's, %lld of no layer are 0",
       (long long)held, (long long)zero);
    free(want);
    free(got);
}

static void check_signs(const SafeTensors *written)
{
    float *want = read_golden(g.batches, "signs", NULL), *got;
    int64_t n, wrong = 0;
    got = read_golden(written, "bigram_sign_table", &n);
    for (int64_t i = 0; i < n; i++)
        wrong += got[i] != want[i];
    ok(n == (int64_t)32 * g.config.model_dim && !wrong, "bigram_sign_table");
    free(want);
    free(got);
}

// All pools, one behind the other.
static char *copy_of_values(size_t *bytes)
{
    const Params *p = &g.model.params;
    char *copy = NULL;
    *bytes = 0;
    for (int i = 0; i < p->num_pools; i++) {
        size_t size = (size_t)p->pools[i].size * sizeof(float);
        copy = xrealloc(copy, *bytes + size, 1);
        memcpy(copy + *bytes, p->pools[i].values, size);
        *bytes += size;
    }
    return copy;
}

static void check_reading(Trainer *t, const char *path)
{
    Error e = {""};
    size_t bytes;
    char *before = copy_of_values(&bytes);
    for (int i = 0; i < g.model.params.num_pools; i++) {
        const ParamPool *q = &g.model.params.pools[i];
        memset(q->values, 0, (size_t)q->size * sizeof(float));
    }
    SafeTensors *st = safetensors_open(path, &e);
    ok(st && weights_read(t, st, &e), "the file is read%s", e.text);
    char *after = copy_of_values(&bytes);
    ok(!memcmp(before, after, bytes), "every value is as before");
    const ParamPool *banks = &g.model.params.pools[params_of(&g.model.params, ROLE_VO, 0)->pool];
    ok(!memcmp(banks->values, banks->rounded, (size_t)banks->size * sizeof(float)),
       "and the copies of the banks");
    safetensors_close(st);
    free(before);
    free(after);
}

static void check_files(const char *preset, const char *files)
{
    Error e;
    char path[] = "/tmp/weights_2026_XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0)
        fatal(1, "no file in /tmp");
    close(fd);
    golden_2026_open(&g, preset, files);
    golden_2026_weights(&g);
    Trainer t = {.config = &g.config, .model = g.model};
    write_file(&t, path);
    SafeTensors *written = safetensors_open(path, &e);
    for (int i = 0; i < safetensors_count(g.init); i++)
        compare_tensor(written, safetensors_at(g.init, i));
    check_signs(written);
    ok(safetensors_count(written) == safetensors_count(g.init) + 1, "and nothing else");
    safetensors_close(written);
    check_reading(&t, path);
    golden_2026_close(&g);
    unlink(path);
}

int main(void)
{
    comm_open(); // one rank
    PART(check_files("toy-2026", "2026"));
    PART(check_files("toy-2026-08", "2026-08"));
    return tap_done();
}
