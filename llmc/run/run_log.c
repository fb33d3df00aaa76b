#include "llmc/run/run_log.h"
#include "llmc/base/memory.h"
#include "llmc/io/checkpoint.h"
#include "llmc/run/config_file.h"
#include "llmc/run/mfu.h"
#include <stdlib.h>

static void log_options(Logger *l, const Config *c)
{
    const char *name;
    for (int i = 0; (name = config_option_name(i, NULL)); i++) {
        char *value = config_option_value(c, i);
        OptionKind kind = config_option_is_number(i) ? KIND_NUMBER
                          : config_option_is_flag(i) ? KIND_FLAG
                                                     : KIND_TEXT;
        logger_option(l, name, value, kind);
        free(value);
    }
}

static void log_description(Logger *l, const Config *c, const Trainer *t)
{
    static const char *const mlp_modes[] = {"bf16", "fp8", "fp8-backward"};
    bool up_alone = c->mlp == MLP_FP8 && config_record(c)->mlp_scales.up_alone;
    const NsOptions *ns = &t->optimizer.ns;
    char *data = loader_describe(t->loader), *ns_text = ns_describe(ns), *stages = schedule_describe(c);
    logger_message(l, "%s; %d rank%s (%s)", backend_description(), comm_size(), comm_size() > 1 ? "s" : "",
                   comm_description());
    logger_message(l, "data: %s", data);
    for (int i = 0; i < TRAINER_NOTES; i++) {
        if (t->fit[i])
            logger_message(l, "data: %s", t->fit[i]);
    }
    if (t->fit_memory)
        logger_message(l, "memory: %s", t->fit_memory);
    logger_message(l, "model: %lld parameters, %s activations; head %s, MLP %s%s, QKV %s",
                   (long long)params_total(&t->model.params), FLOATX_NAME,
                   c->head == HEAD_FP8 ? "fp8" : "bf16", mlp_modes[c->mlp], up_alone ? " (up alone)" : "",
                   c->qkv == QKV_FP8 ? "fp8" : "bf16");
    if (schedule_stage(c, 0).targets.count > 1)
        logger_message(l,
                       "loss: a training step's has several targets (--stage-targets), so it is higher than "
                       "val_loss, which has the next token alone");
    logger_message(l, "optimizer: NorMuon, Newton-Schulz %s%s, %d iterations",
                   ns_variant_name((NsVariant)c->ns), *c->ns_tuples ? " (--ns-tuples)" : "", ns->steps);
    logger_detail(l, "stages: %s", stages);
    logger_detail(l, "Newton-Schulz: %s", ns_text);
    if (ns_caution(ns))
        note("%s", ns_caution(ns));
    free(data);
    free(ns_text);
    free(stages);
}

void log_run(Logger *l, const Config *c, const Trainer *t)
{
    log_options(l, c);
    log_description(l, c, t);
}

void log_memory(Logger *l, const Trainer *t)
{
    char *line;
    for (int i = 0; (line = memory_line(i)); i++) {
        logger_detail(l, "memory: %s", line);
        free(line);
    }
    double in_use = (double)device_bytes_in_use() / 1048576,
           ours = (double)device_bytes_allocated() / 1048576;
    logger_detail(l, "memory: %-20s %9.1f MiB, on the device %.1f", "context, libraries", in_use - ours,
                  in_use);
    logger_detail(l, "memory: activations: %s", t->memory_plan);
}

void note_stop(const Config *c, int argc, char **argv)
{
    if (c->stop_at && !arguments_name(argc, argv, "stop-at"))
        note("--config: this run ends at step %d, as the file says (stop-at); --stop-at 0 trains to the end",
             c->stop_at);
}

void note_unused(const Config *c, bool training)
{
    for (int reason = 0; reason < UNUSED_REASONS; reason++) {
        char *line = config_unused(c, training, reason);
        if (line)
            note("%s", line);
        free(line);
    }
}

// A step of more FLOPs takes minutes on a CPU; that of preset tiny has 2e10 with a vocabulary of bytes.
static const double large_step_flops = 1e13;

void note_large_step(const Trainer *t)
{
    double tokens = trainer_step_tokens(t, 0);
    double flops = tokens * mfu_flops_per_token(&t->model.params, t->config, 0);
    if (!backend_is_asynchronous() && flops > large_step_flops)
        note("%.1f million parameters and %.0f tokens a step are for a GPU: a step will take very long on "
             "the CPU; presets tiny and tiny-2026 are made for it",
             1e-6 * (double)params_total(&t->model.params), tokens);
}

void note_full_disk(const Trainer *t, const RunFolder *f)
{
    int64_t needed = checkpoint_bytes(t), there = run_folder_free(f);
    if (there < needed)
        note("%s: %.1f MiB are free on this disk, and a checkpoint takes %.1f: make room before one is saved",
             f->path, (double)there / 1048576, (double)needed / 1048576);
}
