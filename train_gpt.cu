// The program, top-down: options -> data, model, optimizers -> the loop. No kernel and no arithmetic here.
#include "llmc/io/checkpoint.h"
#include "llmc/base/file_hash.h"
#include "llmc/data/validation.h"
#include "llmc/io/logger.h"
#include "llmc/base/source.h"
#include "llmc/run/config_file.h"
#include "llmc/run/describe.h"
#include "llmc/run/evaluate.h"
#include "llmc/run/mfu.h"
#include "llmc/run/profile_plan.h"
#include "llmc/run/profile_report.h"
#include "llmc/run/resume.h"
#include "llmc/run/run_folder.h"
#include "llmc/run/run_log.h"
#include "llmc/run/sample.h"
#include "llmc/run/signals.h"
#include "llmc/run/vocabulary.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

// ---- the run ----------------------------------------------------------------------------------------------

typedef struct {
    Config config;
    Trainer trainer;
    Logger *logger;         // NULL when nothing is trained
    Evaluation *evaluation; // NULL without --eval
    Tokenizer *tokenizer;   // of the rank that writes samples; NULL without --sample
    Sampler *sampler;       // the same
    double clock;           // when the running stretch of training time began; 0: stopped
    int first_step;         // of this process: what a checkpoint held before is not saved again
    RunFolder folder;       // of log and checkpoints
    int queued;             // step that is queued and not yet reported; -1: none
    int unproved; // step of the last checkpoint, when no loss has been computed from it yet; -1: none
    int timed_from, profile_at; // steps: --profile compares with those between the two; 0: no profile
    double timed_ms;            // train_ms at timed_from
    double timed_joules;        // the device's counter then
    double tokens_left;         // of all steps that are not reported yet
} Run;

static void start_clock(Run *r) { r->clock = seconds_now(); }

static void lap_clock(Run *r)
{
    double now = seconds_now();
    if (r->clock)
        r->trainer.train_ms += 1e3 * (now - r->clock);
    r->clock = r->clock ? now : 0;
}

static void stop_clock(Run *r)
{
    lap_clock(r);
    r->clock = 0;
}

// False, with a note, when it could not be written.
static bool save_checkpoint(Run *r, const char *consequence)
{
    Error e;
    char *path = checkpoint_path(r->folder.path, r->trainer.step);
    bool saved = checkpoint_save(&r->trainer, path, &e);
    if (saved) {
        r->unproved = r->trainer.step;
        logger_message(r->logger, "saved %s", path);
    } else if (comm_rank() == 0)
        note("checkpoint not saved, %s: %s", consequence, e.text);
    free(path);
    return saved;
}

// A loss of the weights after `done` steps. When it is no number, every later one is none either: the run
// ends, and no checkpoint of it replaces an earlier one. Those are removed only here, after a finite loss of
// the newest.
static void judge_loss(Run *r, int done, double loss, const char *what)
{
    if (!isfinite(loss)) {
        logger_failure(r->logger, "diverged");
        fatal(EXIT_DIVERGED, "%s: the loss is %s: the run has diverged; lower --adam-rate or --muon-rate",
              what, isnan(loss) ? "nan" : "infinite");
    }
    if (r->unproved < 0 || done < r->unproved)
        return;
    if (comm_rank() == 0)
        run_folder_prune(&r->folder, r->unproved, r->config.keep_checkpoints);
    r->unproved = -1;
}

static void validate(Run *r, bool final)
{
    Error e;
    double loss;
    char what[64];
    Trainer *t = &r->trainer;
    if (!trainer_validate(t, final, &loss, &e))
        fatal(EXIT_BAD_INPUT, "validation: %s", e.text);
    logger_validation(r->logger, t->step, config_total_steps(&r->config), loss, t->train_ms);
    snprintf(what, sizeof what, "validation at step %d", t->step);
    judge_loss(r, t->step, loss, what);
}

static void evaluate(Run *r, bool final)
{
    Error e;
    Evaluated result;
    Trainer *t = &r->trainer;
    for (int i = 0; r->evaluation && i < evaluation_count(r->evaluation); i++) {
        if (!evaluation_run(r->evaluation, i, final, &result, &e)) {
            logger_failure(r->logger, "diverged");
            fatal(EXIT_DIVERGED, "evaluation at step %d: %s", t->step, e.text);
        }
        if (r->logger)
            logger_evaluation(r->logger, t->step, config_total_steps(&r->config), &result);
        else if (comm_rank() == 0)
            evaluated_print(&result);
    }
}

// Waits for the step that is queued, if there is one, and reports it.
static void finish_step(Run *r)
{
    int step = r->queued;
    char what[64];
    if (step < 0)
        return;
    r->queued = -1;
    double loss = trainer_finish_step(&r->trainer, step);
    lap_clock(r);
    if (step + 1 == r->timed_from) {
        r->timed_ms = r->trainer.train_ms;
        r->timed_joules = backend_energy();
    }
    const Config *c = &r->config;
    double tokens = trainer_step_tokens(&r->trainer, step);
    double flops = tokens * mfu_flops_per_token(&r->trainer.model.params, c, step);
    r->tokens_left -= tokens;
    StepReport report = {.step = step + 1,
                         .total = config_total_steps(c),
                         .train_ms = r->trainer.train_ms,
                         .loss = loss,
                         .rate = c->muon_rate * schedule_lr_factor(c, step),
                         .momentum = schedule_momentum(c, step),
                         .tokens = tokens,
                         .tokens_left = r->tokens_left,
                         .flops = flops,
                         .peak_flops = comm_size() * mfu_peak_flops(backend_device_name())};
    logger_step(r->logger, &report);
    snprintf(what, sizeof what, "training step %d", step + 1);
    judge_loss(r, step, loss, what);
}

// Queues the next step and reports the one before. When the data ends or fails, what was trained until then
// is saved.
static void queue_step(Run *r)
{
    Error e;
    Trainer *t = &r->trainer;
    bool queued = trainer_queue_step(t, &e);
    finish_step(r);
    if (queued) {
        r->queued = t->step - 1;
        return;
    }
    if (t->step > r->first_step)
        save_checkpoint(r, "and the run is over");
    if (comm_rank() == 0)
        fatal(EXIT_BAD_INPUT, "step %d: %s", t->step, e.text);
    comm_barrier(); // rank 0 tells it and ends all
    exit(EXIT_BAD_INPUT);
}

// Steps like all others, under the tracer. The table comes from steps that run op by op; whether the device
// ever waits for the host shows in steps as they run otherwise, one queued while the other runs.
static void profile_steps(Run *r)
{
    Trainer *t = &r->trainer;
    UntracedSteps untraced = {r->profile_at - r->timed_from, t->train_ms - r->timed_ms,
                              backend_energy() - r->timed_joules};
    stop_clock(r);
    Ceilings ceilings = trainer_ceilings(t);
    start_clock(r);
    logger_profile(r->logger, "steps %d to %d", t->step + 1, t->step + PROFILE_STEPS);
    for (int op_by_op = 1; op_by_op >= 0; op_by_op--) {
        t->op_by_op = op_by_op;
        profile_start();
        for (int i = 0; i < PROFILE_TRACED; i++)
            queue_step(r);
        finish_step(r);
        profile_stop(t->stream);
        if (op_by_op)
            profile_report_ops(r->logger, &ceilings);
    }
    profile_report_steps(r->logger, &untraced, comm_size() > 1);
}

// On all ranks at the same step: a signal, or the end of --stop-after by the clock of rank 0.
static bool asked_to_stop(const Config *c)
{
    double limit = config_stop_after(c);
    bool late = limit > 0 && comm_rank() == 0 && process_seconds() >= limit;
    return comm_any(signals_came() || comm_interrupted() || late);
}

// Steps until the end, --stop-at, --stop-after, or a signal. One step is always queued ahead of the one that
// is reported, except around validations and checkpoints. Returns true when it was interrupted.
static bool train(Run *r)
{
    Trainer *t = &r->trainer;
    const Config *c = &r->config;
    int total = config_total_steps(c), end = c->stop_at ? c->stop_at : total;
    bool stop = false;
    r->first_step = t->step;
    r->queued = r->unproved = -1;
    r->tokens_left = schedule_tokens_left(c, t->step);
    if (c->profile) {
        r->profile_at = profile_plan(c, t->step, end, &r->timed_from);
        backend_energy(); // the first reading opens NVML, which takes some time
    }
    while (t->step < end && !stop) {
        bool validation = t->step == 0 || step_is_due(t->step, c->val_every),
             checkpoint = t->step > r->first_step && step_is_due(t->step, c->checkpoint_every),
             evaluation = t->step > 0 && step_is_due(t->step, c->eval_every),
             profile = t->step && t->step == r->profile_at;
        if (validation || checkpoint || evaluation || profile)
            finish_step(r);
        if (validation || checkpoint || evaluation)
            stop_clock(r);
        if (checkpoint)
            save_checkpoint(r, "training goes on");
        if (validation)
            validate(r, false);
        if (evaluation)
            evaluate(r, false);
        if (!r->clock)
            start_clock(r);
        if (profile) {
            profile_steps(r);
            continue;
        }
        queue_step(r);
        if (!backend_is_asynchronous())
            finish_step(r);
        stop = asked_to_stop(c);
    }
    finish_step(r);
    stop_clock(r);
    if (!stop || t->step == end)
        return false;
    logger_message(r->logger, "interrupted after step %d, saving checkpoint", t->step);
    return true;
}

// ---- set-up -----------------------------------------------------------------------------------------------

static void load_state(Run *r)
{
    Trainer *t = &r->trainer;
    const Config *c = &r->config;
    Error e;
    comm_patience(true); // files may come over a slow network
    if (*c->resume) {
        if (!checkpoint_load(t, c->resume, &e))
            fatal(EXIT_BAD_INPUT, "--resume: %s", e.text);
    } else if (*c->init_from) {
        if (!weights_load(t, c->init_from, &e))
            fatal(EXIT_BAD_INPUT, "--init-from: %s", e.text);
        if (!t->loader)
            trainer_finish_schedule(t); // weights to use, not to train
    } else {
        params_init(&t->model.params, c, t->stream);
    }
    if (*c->save_init && !weights_save(t, c->save_init, &e))
        fatal(EXIT_BAD_INPUT, "--save-init: %s", e.text);
    comm_barrier(); // who is done first waits with patience, too
    comm_patience(false);
}

// The backend's lines for the head of the log, then one that says how many GPUs of those that nvidia-smi
// lists took part.
static const char *version_line(int index)
{
    static char text[320];
    const char *line = backend_version_line(index);
    if (line || (index && !backend_version_line(index - 1)))
        return line;
    snprintf(text, sizeof text, "ranks: %d (%s)", comm_size(), comm_description());
    return text;
}

// Before data are looked at or any memory is taken: what cannot be written must not show after hours.
static void prepare_folder(Run *r)
{
    Error e;
    const Config *c = &r->config;
    const char *checkpoint = *c->resume ? c->resume : NULL;
    if (comm_rank())
        return;
    if (!run_folder_prepare(&r->folder, c->out, config_given(c, "out"), checkpoint, &e))
        fatal(EXIT_BAD_INPUT, "%s", e.text);
}

// One that cannot be written costs a note, as a log does.
static void write_options(Run *r)
{
    Error e;
    int step = r->trainer.step;
    char *path = run_folder_options(&r->folder, step);
    char *start = step ? format_string("# It went on after step %d.\n", step) : xstrdup("");
    char *head =
        format_string("# Options of a run. --config with this file repeats it, in the folder that it "
                      "was started in.\n# Program: %s\n%s",
                      program_commit, start);
    if (!config_file_write(&r->config, path, head, &e))
        note("%s", e.text);
    free(head);
    free(start);
    free(path);
}

static void open_logger(Run *r, int argc, char **argv)
{
    Error e;
    Config *c = &r->config;
    Trainer *t = &r->trainer;
    if (!run_folder_open(&r->folder, c->preset, &e))
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    char *resumed = *c->resume ? format_string("from step %d, %s", t->step, c->resume) : NULL;
    LogHead head = {
        .source = program_source,
        .source_size = program_source_size,
        .commit = program_commit,
        .argc = argc,
        .argv = argv,
        .version_line = version_line,
        .resumed = resumed,
        .steps_done = t->step,
        .tensorboard = c->tensorboard,
        .verbose = c->verbose,
        .patience = fmin(30, 0.5 * c->timeout), // other ranks wait meanwhile
    };
    r->logger = logger_open(r->folder.path, r->folder.uuid, comm_rank(), &head);
    free(resumed);
    if (!r->logger)
        return; // not the rank that writes
    write_options(r);
    log_run(r->logger, c, t);
}

// Before data are looked for and memory is taken.
static void check_weights(const Config *c)
{
    Error e;
    const char *path = *c->resume ? c->resume : c->init_from;
    if (*path && !checkpoint_check(c, path, *c->resume, &e))
        fatal(EXIT_BAD_INPUT, "%s: %s", *c->resume ? "--resume" : "--init-from", e.text);
}

// Before any training: a missing vocabulary or too long a prompt must not show hours later.
static void open_sampler(Run *r)
{
    Error e;
    const Config *c = &r->config;
    if (!c->sample || comm_rank())
        return;
    r->tokenizer = vocabulary_open(c, "--sample", &e);
    if (!r->tokenizer)
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    r->sampler = sampler_create(&r->trainer, r->tokenizer, &e);
    if (!r->sampler)
        fatal(EXIT_BAD_INPUT, "%s", e.text);
}

// On every rank, also before any training.
static void open_evaluation(Run *r)
{
    Error e;
    if (!*r->config.eval)
        return;
    comm_patience(true); // files may come over a slow network
    r->evaluation = evaluation_open(&r->trainer, &e);
    if (!r->evaluation)
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    comm_patience(false);
}

static void write_samples(Run *r)
{
    if (!r->sampler)
        return;
    printf("\n");
    sampler_write(r->sampler, stdout);
    char *speed = sampler_speed(r->sampler);
    note("%s", speed);
    free(speed);
}

// Trains, from the first step or from a checkpoint. Returns the exit status.
static int train_run(Run *r, int argc, char **argv)
{
    Trainer *t = &r->trainer;
    const Config *c = &r->config;
    Error e;
    if (c->profile && !profile_open(&e))
        fatal(EXIT_USAGE, "--profile: %s", e.text);
    if (c->profile_energy > 0)
        profile_check_energy();
    check_weights(c);
    trainer_create(t, &r->config, true, true);
    note_large_step(t);
    int total = config_total_steps(c); // which small data shorten
    open_sampler(r);
    open_evaluation(r);
    trainer_warm_up(t); // before the state is loaded: warming up clears gradients, which are part of it
    timeline_mark("warm-up");
    load_state(r);
    timeline_mark("weights");
    if (c->stop_at && t->step >= c->stop_at)
        fatal(EXIT_USAGE, "--stop-at %d: the checkpoint is already at step %d", c->stop_at, t->step);
    if (resume_is_finished(t)) {
        evaluate(r, true);
        write_samples(r);
        return 0;
    }
    open_logger(r, argc, argv);
    timeline_mark("log");
    char *start_up = timeline_text();
    logger_message(r->logger, "start-up: %s", start_up);
    free(start_up);
    log_memory(r->logger, t);
    if (*c->resume)
        logger_message(r->logger, "resumed %s: %d of %d steps are done", c->resume, t->step, total);
    note_unused(c, true);
    note_full_disk(t, &r->folder);
    signals_catch(true); // first: a request in between is not to end one rank alone
    comm_begins();
    if (comm_any(signals_came() || comm_interrupted())) { // of ranks that have met: all end together
        logger_close(r->logger);
        return EXIT_INTERRUPTED;
    }
    FileHash *hash = comm_rank() == 0 ? file_hash_start(validation_path(t->validation)) : NULL;
    bool stopped = train(r);
    bool done = t->step == total;
    bool saved = save_checkpoint(r, "and the run is over");
    comm_saved();
    if (done) {
        validate(r, true);
        evaluate(r, true);
    }
    if (c->profile_energy > 0) {
        const char *reason = stopped || signals_came() ? "the run was stopped"
                             : done                    ? "it is the last step"
                                                       : NULL;
        signals_catch(reason != NULL); // else a signal ends it
        profile_report_energy(r->logger, t, c->profile_energy, reason);
    }
    char *sha256 = file_hash_finish(hash);
    if (done)
        logger_validation_data(r->logger, sha256, validation_vocab_size(t->validation), c->val_tokens);
    free(sha256);
    logger_memory(r->logger, (double)device_bytes_peak() / 1048576, (double)device_bytes_in_use() / 1048576);
    if (done)
        write_samples(r);
    logger_close(r->logger);
    if (!saved)
        return EXIT_BAD_INPUT;
    return stopped ? EXIT_INTERRUPTED : 0;
}

// Validates, evaluates or samples with given weights.
static int use_run(Run *r)
{
    Config *c = &r->config;
    Trainer *t = &r->trainer;
    Error e;
    double loss;
    const char *weights = *c->resume ? c->resume : c->init_from;
    if (c->profile || c->profile_energy > 0)
        fatal(EXIT_USAGE, "--profile%s: nothing is trained here", c->profile ? "" : "-energy");
    if (!*weights)
        fatal(EXIT_USAGE, "--eval-only, --eval, --describe, and --sample without training need weights: "
                          "--init-from or --resume");
    if (!c->vocab_size && !c->eval_only && !checkpoint_peek_vocab(weights, &c->vocab_size, &e))
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    check_weights(c);
    trainer_create(t, c, false, c->eval_only);
    if (t->fit[1])
        note("%s", t->fit[1]);
    open_sampler(r);
    open_evaluation(r);
    load_state(r);
    if (*c->resume)
        note("resumed %s: %d of %d steps are done", c->resume, t->step, config_total_steps(c));
    note_unused(c, false);
    bool final = !*c->resume || t->step == config_total_steps(c);
    if (c->eval_only) {
        if (!trainer_validate(t, final, &loss, &e))
            fatal(EXIT_BAD_INPUT, "validation: %s", e.text);
        if (comm_rank() == 0)
            printf("val_loss:%.4f\n", loss);
        if (!isfinite(loss))
            fatal(EXIT_DIVERGED, "%s: the validation loss of these weights is %g", weights, loss);
    }
    if (c->describe) {
        char *line = describe_network(t);
        fputs(line, stdout);
        free(line);
    }
    evaluate(r, final);
    write_samples(r);
    return 0;
}

static void join_ranks(Run *r, bool training)
{
    Config *c = &r->config;
    // A sample is written by one, unless something else has started several.
    bool alone = !training && !c->eval_only && !*c->eval && !strcmp(c->gpus, "all") && comm_size() == 1;
    uint64_t source = fingerprint_bytes(0, program_source, program_source_size);
    uint64_t program = fingerprint_bytes(source, program_commit, strlen(program_commit));
    c->device = comm_join(&(CommOptions){
        .gpus = alone ? "1" : c->gpus,
        .ranks = alone ? 1 : c->ranks,
        .device = c->device,
        .micro_batches = c->micro_batches,
        .timeout = c->timeout,
        .program = program,
        .options = config_fingerprint(c),
    });
}

int main(int argc, char **argv)
{
    static Run run;
    Arguments all;
    int status;
    Error e;
    run.folder.lock = -1;
    open_standard_streams();
    backend_prepare_process(argv);
    timeline_mark("program");
    comm_open();
    set_program_name("train_gpt", comm_size() > 1 ? comm_rank() : -1);
    if (!config_arguments(&all, argc, argv, &e))
        fatal(EXIT_USAGE, "%s", e.text);
    if (!resume_parse(&run.config, all.argc, all.argv, &status, &e))
        fatal(status, "%s", e.text); // ranks may have got different options
    if (run.config.help) {
        if (comm_rank() == 0)
            config_print_help(stdout);
        status = finish_output();
        arguments_free(&all);
        comm_close();
        return status;
    }
    bool training = config_trains(&run.config, argc, argv);
    if (!config_backend_check(&run.config, &e))
        fatal(EXIT_USAGE, "%s", e.text);
    if (training)
        note_stop(&run.config, argc, argv);
    join_ranks(&run, training);
    signals_catch(training && comm_is_met()); // else there is nothing to save before the first step
#ifdef _OPENMP
    if (run.config.threads)
        omp_set_num_threads(run.config.threads);
#endif
    if (training)
        prepare_folder(&run);
    backend_open(run.config.device);
    timeline_mark("device");
    status = training ? train_run(&run, all.argc, all.argv) : use_run(&run);
    if (!status && (!run.logger || run.sampler)) // what training prints besides samples is in its log
        status = finish_output();
    sampler_free(run.sampler);
    tokenizer_free(run.tokenizer);
    evaluation_close(run.evaluation);
    trainer_free(&run.trainer);
    run_folder_close(&run.folder);
    arguments_free(&all);
    backend_close();
    comm_close();
    return status;
}
