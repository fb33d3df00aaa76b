// Logits of a checkpoint, for comparisons with other programs:
//   logits --resume CHECKPOINT [option ...] <tokens >logits
// tokens: (N) int32 of one document;  logits: (N, padded vocabulary) fp32, softcapped
#include "llmc/io/checkpoint.h"
#include "llmc/run/resume.h"
#include <stdlib.h>

static int32_t *read_tokens(int *count)
{
    enum { MOST = 1 << 16 };
    int32_t *tokens = xcalloc(MOST, sizeof *tokens);
    *count = (int)fread(tokens, sizeof *tokens, MOST, stdin);
    return tokens;
}

static void write_logits(Trainer *t, const int32_t *tokens, int count)
{
    size_t columns = (size_t)config_vocab_padded(t->config);
    float *z = xcalloc(columns, sizeof *z);
    for (int n = 1; n <= count; n++) {
        trainer_next_logits(t, tokens, n, z);
        if (fwrite(z, sizeof *z, columns, stdout) != columns)
            fatal(EXIT_BAD_INPUT, "standard output: cannot be written");
    }
    free(z);
}

int main(int argc, char **argv)
{
    static Config config;
    static Trainer trainer;
    Error e;
    int status, count;
    backend_prepare_process(argv);
    comm_open();
    set_program_name("logits", -1);
    if (!resume_parse(&config, argc, argv, &status, &e))
        fatal(status, "%s", e.text);
    comm_join(&(CommOptions){.gpus = "1", .ranks = 1, .device = -1, .micro_batches = 1, .timeout = 600});
    backend_open(config.device);
    trainer_create(&trainer, &config, false, false);
    if (!checkpoint_load(&trainer, config.resume, &e))
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    int32_t *tokens = read_tokens(&count);
    write_logits(&trainer, tokens, count);
    free(tokens);
    trainer_free(&trainer);
    backend_close();
    comm_close();
    return 0;
}
