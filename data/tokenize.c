// tokenize: text files, folders, JSONL and standard input to token shards.
//
//   reader (main thread) -> ring of jobs -> workers: parse, repair, encode -> writer (main thread, in input
//   order)
//
// The ring bounds the memory: each job holds about 1 MB of text and its tokens. What is written does not
// depend on the number of threads. Every file gets its name only at the very end, so a failed run leaves the
// data set that was there untouched.
#include "data/tokenize_output.h"
#include "llmc/base/grow.h"
#include "llmc/text/text_source.h"
#include "llmc/text/tokenizer.h"
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// ---- jobs -------------------------------------------------------------------------------------------------

typedef enum { JOB_FREE, JOB_WAITING, JOB_DONE } JobState;

typedef struct {
    JobState state;
    TextChunk chunk;
    TokenList tokens;
    size_t *starts; // (start_count) of (start_capacity): positions of document tokens
    size_t start_count, start_capacity;
    int64_t text_bytes, replaced;
    bool failed;
    Error error;
} Job;

typedef struct {
    const Tokenizer *t;
    Job *jobs; // (count), used round and round
    int count;
    int64_t submitted, taken; // jobs handed in by the reader, and taken by workers
    bool stop;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
} Ring;

static void add_document_start(Job *job, const Tokenizer *t)
{
    job->starts = grow(job->starts, &job->start_capacity, job->start_count + 1, sizeof *job->starts);
    job->starts[job->start_count++] = job->tokens.count;
    uint16_t document = (uint16_t)tokenizer_document(t);
    token_list_append(&job->tokens, &document, 1);
}

static void encode_text(Job *job, TextEncoder *encoder, const char *text, size_t len)
{
    job->replaced += (int64_t)text_encode(encoder, text, len, &job->tokens);
    job->text_bytes += (int64_t)len;
}

static void encode_job(Job *job, const Tokenizer *t, TextEncoder *encoder)
{
    job->tokens.count = job->start_count = 0;
    job->text_bytes = job->replaced = 0;
    job->failed = false;
    for (size_t i = 0; i < job->chunk.piece_count; i++) {
        const TextPiece *piece = &job->chunk.pieces[i];
        add_document_start(job, t);
        encode_text(job, encoder, job->chunk.bytes + piece->begin, piece->end - piece->begin);
    }
    if (job->chunk.split)
        return;
    if (!job->chunk.file->jsonl) {
        if (job->chunk.begins_document)
            add_document_start(job, t);
        encode_text(job, encoder, job->chunk.bytes, job->chunk.len);
        return;
    }
    JsonlReader records;
    const char *text;
    size_t len;
    ChunkStatus status;
    jsonl_begin(&records, &job->chunk);
    while ((status = jsonl_next(&records, &text, &len, &job->error)) == CHUNK_READ) {
        add_document_start(job, t);
        encode_text(job, encoder, text, len);
    }
    job->failed = status == CHUNK_ERROR;
    jsonl_end(&records);
}

static void *worker(void *argument)
{
    Ring *ring = argument;
    TextEncoder *encoder = text_encoder_create(ring->t);
    pthread_mutex_lock(&ring->lock);
    for (;;) {
        while (ring->taken == ring->submitted && !ring->stop)
            pthread_cond_wait(&ring->work, &ring->lock);
        if (ring->stop)
            break;
        Job *job = &ring->jobs[ring->taken++ % ring->count];
        pthread_mutex_unlock(&ring->lock);
        encode_job(job, ring->t, encoder);
        pthread_mutex_lock(&ring->lock);
        job->state = JOB_DONE;
        pthread_cond_signal(&ring->done);
    }
    pthread_mutex_unlock(&ring->lock);
    text_encoder_free(encoder);
    return NULL;
}

static void submit(Ring *ring)
{
    pthread_mutex_lock(&ring->lock);
    ring->jobs[ring->submitted++ % ring->count].state = JOB_WAITING;
    pthread_cond_signal(&ring->work);
    pthread_mutex_unlock(&ring->lock);
}

static void wait_for(Ring *ring, Job *job)
{
    pthread_mutex_lock(&ring->lock);
    while (job->state != JOB_DONE)
        pthread_cond_wait(&ring->done, &ring->lock);
    pthread_mutex_unlock(&ring->lock);
}

// ---- the run ----------------------------------------------------------------------------------------------

// SIGINT, SIGTERM and SIGHUP are blocked and read from this descriptor: a handler that runs just before
// read(2) does not end the wait for a pipe.
static int catch_requests_to_stop(void)
{
    sigset_t requests;
    sigemptyset(&requests);
    sigaddset(&requests, SIGINT);
    sigaddset(&requests, SIGTERM);
    struct sigaction hangup;
    if (sigaction(SIGHUP, NULL, &hangup) || hangup.sa_handler != SIG_IGN) // nohup ignores it
        sigaddset(&requests, SIGHUP);
    sigprocmask(SIG_BLOCK, &requests, NULL); // of the threads to come, too
    int fd = signalfd(-1, &requests, SFD_CLOEXEC);
    if (fd < 0)
        fatal(EXIT_BAD_INPUT, "signalfd: %s", strerror(errno));
    return fd;
}

static bool interrupted(int requests)
{
    struct pollfd request = {.fd = requests, .events = POLLIN};
    return poll(&request, 1, 0) > 0;
}

typedef struct {
    int64_t read, total; // bytes of input, for the progress line; total -1: unknown
    int64_t text_bytes, replaced;
    const char *first_replaced;
    double start, last_shown;
    bool terminal;
} Progress;

static void show_progress(Progress *p, const Output *out)
{
    double now = seconds_now(), seconds = now - p->start;
    if (now - p->last_shown < (p->terminal ? 0.25 : 10))
        return;
    p->last_shown = now;
    char of[48] = "", eta[48] = "";
    if (p->total > 0) {
        long long left = (long long)((double)(p->total - p->read) * seconds / (double)max_i64(p->read, 1));
        snprintf(of, sizeof of, " of %.1f", 1e-6 * (double)p->total);
        snprintf(eta, sizeof eta, "  ETA %lld:%02lld", left / 60, left % 60);
    }
    fprintf(stderr, "%stokenize: %.1f%s MB  %.1f MB/s  %.2f M tokens%s%s", p->terminal ? "\r" : "",
            1e-6 * (double)p->read, of, 1e-6 * (double)p->read / seconds, 1e-6 * (double)out->tokens, eta,
            p->terminal ? "   " : "\n");
}

static bool write_job(Output *out, Progress *p, const Job *job, Error *e)
{
    if (job->failed) {
        *e = job->error;
        return false;
    }
    size_t at = 0;
    for (size_t i = 0; i <= job->start_count;
         i++) { // what precedes the first start continues the document before
        size_t end = i < job->start_count ? job->starts[i] : job->tokens.count;
        if (end > at && !shard_writer_append(out->current, job->tokens.ids + at, end - at, e))
            return false;
        out->document_tokens += (int64_t)(end - at);
        if (i < job->start_count && !output_begin_document(out, e))
            return false;
        at = end;
    }
    out->tokens += (int64_t)job->tokens.count;
    p->read += (int64_t)job->chunk.len;
    p->text_bytes += job->text_bytes;
    if (job->replaced && !p->replaced)
        p->first_replaced = text_file_name(job->chunk.file);
    p->replaced += job->replaced;
    return true;
}

// Feeds the ring and writes what comes out, oldest first. False with a message on the first error in input
// order.
static bool pump(Ring *ring, TextReader *reader, int requests, Output *out, Progress *p, Error *e)
{
    Error read_error;
    ChunkStatus status = CHUNK_READ;
    for (int64_t written = 0;;) {
        while (status == CHUNK_READ && ring->submitted - written < ring->count) {
            status = text_reader_next(reader, &ring->jobs[ring->submitted % ring->count].chunk, &read_error);
            if (status == CHUNK_READ)
                submit(ring);
        }
        if (written == ring->submitted)
            break;
        Job *job = &ring->jobs[written++ % ring->count];
        wait_for(ring, job);
        if (interrupted(requests))
            return error_set(e, "interrupted");
        if (!write_job(out, p, job, e))
            return false;
        show_progress(p, out);
    }
    if (status == CHUNK_ERROR)
        *e = read_error;
    return status == CHUNK_NONE;
}

static bool run_threads(const TokenizeOptions *o, const Tokenizer *t, const TextFileList *files, int requests,
                        Output *out, Progress *p, Error *e)
{
    Ring ring = {.t = t, .count = 2 * o->threads + 2};
    ring.jobs = xcalloc((size_t)ring.count, sizeof *ring.jobs);
    pthread_mutex_init(&ring.lock, NULL);
    pthread_cond_init(&ring.work, NULL);
    pthread_cond_init(&ring.done, NULL);
    pthread_t *threads = xcalloc((size_t)o->threads, sizeof *threads);
    int started = 0, refused = 0; // fewer threads than asked for still do the work
    while (started < o->threads && !(refused = pthread_create(&threads[started], NULL, worker, &ring)))
        started++;
    TextReader *reader = text_reader_create(files, requests);
    bool good = started ? pump(&ring, reader, requests, out, p, e)
                        : error_set(e, "cannot start a thread: %s", strerror(refused));
    pthread_mutex_lock(&ring.lock);
    ring.stop = true;
    pthread_cond_broadcast(&ring.work);
    pthread_mutex_unlock(&ring.lock);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    text_reader_free(reader);
    for (int i = 0; i < ring.count; i++) {
        text_chunk_free(&ring.jobs[i].chunk);
        free(ring.jobs[i].tokens.ids);
        free(ring.jobs[i].starts);
    }
    free(ring.jobs);
    free(threads);
    return good;
}

static bool find_files(const TokenizeOptions *o, TextFileList *files, Progress *p, Error *e)
{
    for (int i = 0; i < o->input_count; i++) {
        if (!text_files_add(files, o->inputs[i], o->format, e))
            return false;
    }
    for (size_t i = 0; i < files->count; i++) {
        p->total = files->files[i].size < 0 || p->total < 0 ? -1 : p->total + files->files[i].size;
    }
    return true;
}

// ---- what is said in the end -----------------------------------------------------------------------------

static void note_long_documents(const Output *out, const TokenizeOptions *o)
{
    if (out->used * 2 >= out->tokens || !text_split_none(&o->split))
        return;
    note("training uses the first %d tokens of a document, %.0f%% of these; --split blank-lines, or --split "
         "500, "
         "makes more documents of a text file",
         MAX_DOCUMENT, 100.0 * (double)out->used / (double)out->tokens);
}

static void note_unicode(const Tokenizer *t)
{
    int unicode = tokenizer_unicode(t);
    if (unicode == 0 || unicode == 16)
        return;
    note("letters and numbers are those of this PCRE2, Unicode %d; tiktoken's are of Unicode 16, and "
         "characters "
         "that came in between are cut otherwise",
         unicode);
}

static void log_line(FILE *f, const char *name, const char *text)
{
    char shown[4096];
    escape_text(shown, sizeof shown, text);
    fprintf(f, "%s: %s\n", name, shown);
}

static void log_shard(FILE *f, const ShardWriter *w, const char *what)
{
    char *line = format_string("%s, %lld tokens", w->path, (long long)w->tokens);
    log_line(f, what, line);
    free(line);
}

// OUT/NAME_tokenize.txt: how these shards were made, for whoever finds them later.
static void write_log(const Output *out, const TokenizeOptions *o, const TextFileList *files,
                      const Progress *p)
{
    char *path = format_string("%s_tokenize.txt", out->prefix), *classes = tokenizer_describe_classes(out->t);
    char date[32];
    time_t now = time(NULL);
    FILE *f = fopen(path, "w");
    if (f) {
        strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
        log_line(f, "date", date);
        log_line(f, "vocabulary", o->vocab);
        log_line(f, "letters and numbers", classes);
        log_line(f, "split", o->split_text);
        for (size_t i = 0; i < files->count; i++)
            log_line(f, "input", text_file_name(&files->files[i]));
        for (int i = 0; i < out->train_count; i++)
            log_shard(f, &out->train[i], "training");
        if (out->val.path)
            log_shard(f, &out->val, "validation");
        fprintf(f,
                "in all: %lld documents, %lld bytes of text, %lld tokens, %lld invalid UTF-8 sequences "
                "replaced\n",
                (long long)out->documents, (long long)p->text_bytes, (long long)out->tokens,
                (long long)p->replaced);
    }
    bool good = f && !ferror(f);
    if ((f && fclose(f)) || !good)
        note("cannot write %s: %s; the shards are complete", path, strerror(errno));
    free(path);
    free(classes);
}

static bool tokenize(const TokenizeOptions *o, const Tokenizer *t, const TextFileList *files, int requests,
                     Progress *p, Error *e)
{
    Output out;
    p->start = p->last_shown = seconds_now();
    p->terminal = isatty(STDERR_FILENO);
    bool good = output_open(&out, o, t, files, e) && run_threads(o, t, files, requests, &out, p, e);
    if (p->terminal)
        fputs("\r\033[K", stderr);
    if (good)
        output_end_document(&out);
    good = good && output_publish(&out, e);
    if (good) {
        write_log(&out, o, files, p);
        output_print(&out);
        note_unicode(t);
        note_long_documents(&out, o);
        double seconds = seconds_now() - p->start;
        if (p->replaced) {
            note("%lld invalid UTF-8 sequences were replaced by U+FFFD, the first in %s",
                 (long long)p->replaced, p->first_replaced);
        }
        printf("%lld documents, %.1f MB of text, %lld tokens, %.3f bytes per token, %.1f s, %.1f MB/s\n",
               (long long)out.documents, 1e-6 * (double)p->text_bytes, (long long)out.tokens,
               (double)p->text_bytes / (double)(out.tokens - out.documents), seconds,
               1e-6 * (double)p->text_bytes / seconds);
    }
    output_free(&out);
    return good;
}

int main(int argc, char **argv)
{
    open_standard_streams();
    set_program_name("tokenize", -1);
    TokenizeOptions o = tokenize_options(argc, argv);
    int requests = catch_requests_to_stop();
    signal(SIGXFSZ, SIG_IGN); // a file size limit then fails the write, with a message
    signal(SIGPIPE, SIG_IGN); // so does a reader that has gone, as in `| head -1`
    Error e;
    TextFileList files = {.split = o.split};
    Progress progress = {0};
    if (!find_files(&o, &files, &progress, &e))
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    Tokenizer *t = tokenizer_load(o.vocab, &e);
    if (!t)
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    bool good = tokenize(&o, t, &files, requests, &progress, &e);
    if (!good && interrupted(requests))
        fatal(EXIT_INTERRUPTED, "interrupted; nothing was written");
    if (!good)
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    if (fflush(stdout) || ferror(stdout))
        fatal(EXIT_BAD_INPUT, "cannot write to standard output: %s; the shards are complete",
              strerror(errno));
    tokenizer_free(t);
    text_files_free(&files);
    free(o.inputs);
    return 0;
}
