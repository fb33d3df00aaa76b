#include "llmc/run/resume.h"
#include "llmc/dist/comm.h"
#include "llmc/io/checkpoint.h"
#include "llmc/run/config_file.h"
#include "llmc/run/run_folder.h"
#include "llmc/io/safetensors.h"
#include <stdlib.h>
#include <string.h>

static bool parse_over(Config *c, int argc, char **argv, const char *path, int *status, Error *e)
{
    Error sub;
    SafeTensors *st = safetensors_open(path, &sub);
    *status = EXIT_BAD_INPUT;
    if (!st)
        return error_set(e, "--resume: %s", sub.text);
    bool good = config_read(c, argc, argv, checkpoint_option, st, &sub);
    safetensors_close(st);
    if (!good)
        return error_set(e, "--resume %s: an option of the checkpoint: %s", path, sub.text);
    *status = EXIT_USAGE;
    return config_set(c, "resume", path, e) && config_check(c, e);
}

bool resume_parse(Config *c, int argc, char **argv, int *status, Error *e)
{
    Error sub;
    *status = EXIT_USAGE;
    if (!config_read(c, argc, argv, NULL, NULL, e))
        return false;
    if (c->help)
        return true;
    if (!config_given(c, "resume") || !*c->resume)
        return config_check(c, e);

    *status = EXIT_BAD_INPUT;
    char *path = checkpoint_find(c->resume, config_trains(c, 0, NULL), &sub);
    if (!path)
        return error_set(e, "--resume: %s", sub.text);
    bool good = parse_over(c, argc, argv, path, status, e);
    free(path);
    return good;
}

bool resume_is_finished(const Trainer *t)
{
    const Config *c = t->config;
    int total = config_total_steps(c);
    bool end = *c->resume && t->step == total;
    if (!comm_any(end && comm_rank() == 0 && run_folder_finished(c->resume, total)))
        return false;
    note("%s: this run is finished, all %d steps and the last validation are done; --sample, --eval and "
         "--eval-only use its weights, --init-from trains them in a new run",
         c->resume, total);
    return true;
}
