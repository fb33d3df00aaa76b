// The log of a run, character by character; the JSON lines beside it; the console; and runs that lose their
// disk or are killed.
#include "dev/test/tap.h"
#include "llmc/io/logger.h"
#include <dirent.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[256];

static char *in_folder(const char *name) { return format_string("%s/%s", folder, name); }

// The file's bytes with a NUL behind them; NULL when it cannot be read. Owned by the caller.
static char *read_text(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return NULL;
    char *text = xcalloc(1, 1);
    size_t bytes = 0, n;
    char block[65536];
    while ((n = fread(block, 1, sizeof block, f)) > 0) {
        text = xrealloc(text, bytes + n + 1, 1);
        memcpy(text + bytes, block, n);
        text[bytes += n] = 0;
    }
    fclose(f);
    return text;
}

// The only file of <folder>/<run> that ends so; NULL when there is none, or more than one.
static char *find_log(const char *run, const char *ending)
{
    char *logs = format_string("%s/%s", folder, run), *found = NULL;
    int count = 0;
    DIR *dir = opendir(logs);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        size_t n = strlen(entry->d_name), m = strlen(ending);
        if (n < m || strcmp(entry->d_name + n - m, ending) != 0)
            continue;
        free(found);
        found = format_string("%s/%s", logs, entry->d_name);
        count++;
    }
    if (dir)
        closedir(dir);
    free(logs);
    if (count == 1)
        return found;
    free(found);
    return NULL;
}

static void remove_tree(const char *path)
{
    char *command = format_string("rm -rf '%s'", path);
    if (system(command) != 0)
        printf("# could not remove %s\n", path);
    free(command);
}

static const char *version_line(int index)
{
    const char *lines[] = {"compiler 12.3", "CUDA runtime 12.8", NULL};
    return lines[index];
}

// Larger than all JSON lines of a run, so that a limit to the size of files can be one for the log alone.
static char source[300001];

static void fill_source(void)
{
    static const char line[] = "// ---- train_gpt.cu ----\nint main(void);\n// ----\n";
    for (size_t i = 0; i + 1 < sizeof source; i++)
        source[i] = line[i % (sizeof line - 1)];
    source[sizeof source - 2] = '\n';
}

static char *arguments[] = {"./train_gpt", "--preset", "tiny", "--sample", "it's \n here", ""};

static const char uuid[] = "01234567-89ab-4def-8123-456789abcdef";

static LogHead log_head(double patience)
{
    return (LogHead){
        .source = source,
        .source_size = strlen(source),
        .commit = "0123abc and uncommitted changes",
        .argc = 6,
        .argv = arguments,
        .version_line = version_line,
        .patience = patience,
    };
}

static Logger *open_run(const char *run)
{
    char *out = in_folder(run);
    LogHead head = log_head(30);
    make_folders(out);
    Logger *l = logger_open(out, uuid, 0, &head);
    free(out);
    return l;
}

// What `scenario` writes to stdout and stderr in a process of its own. Owned by the caller.
static char *capture(void (*scenario)(const char *run), const char *run, int *status)
{
    char *path = in_folder("console");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (dup2(fd, 1) < 0 || dup2(fd, 2) < 0)
            _exit(9);
        scenario(run);
        fflush(stdout);
        _exit(0);
    }
    waitpid(child, status, 0);
    char *text = read_text(path);
    unlink(path);
    free(path);
    return text;
}

static int count_of(const char *text, const char *part)
{
    int n = 0;
    for (; (text = strstr(text, part)); text += strlen(part))
        n++;
    return n;
}

static double tokens = 262144, tokens_left = 2 * 262144, peak_flops; // of the reports that follow

static void report_step(Logger *l, int step, int total, double train_ms, double loss, double rate,
                        double flops)
{
    StepReport r = {.step = step,
                    .total = total,
                    .train_ms = train_ms,
                    .loss = loss,
                    .rate = rate,
                    .momentum = 0.875,
                    .tokens = tokens,
                    .tokens_left = tokens_left,
                    .flops = flops,
                    .peak_flops = peak_flops};
    logger_step(l, &r);
}

// ---- a whole run ------------------------------------------------------------------------------------------

static void short_run(const char *run)
{
    Logger *l = open_run(run);
    logger_option(l, "preset", "tiny", KIND_TEXT);
    logger_option(l, "out", "a \"path\" \xff", KIND_TEXT);
    logger_option(l, "adam-rate", "0.0080000000000000002", KIND_NUMBER);
    logger_option(l, "repeat", "1", KIND_FLAG);
    logger_message(l, "model: %d parameters", 42);
    logger_detail(l, "memory: %d", 7);
    peak_flops = 1e12;
    logger_validation(l, 0, 3, 10.82584, 0.4);
    report_step(l, 1, 3, 1234.5678, 10.5, 0.01234, 0.4e9 * 1234.1678);
    report_step(l, 2, 3, 2000.006, NAN, 0.5, 0);
    logger_profile(l, "%-10s %d", "op", 7);
    report_step(l, 3, 3, 3333.6, INFINITY, 0.25, 0);
    logger_validation(l, 3, 3, 3.27996, 3333.6);
    logger_memory(l, 39999.7, 51000.2);
    logger_close(l);
}

static const char short_lines[] = "step:0/3 val_loss:10.8258 train_time:0ms step_avg:0.40ms\n"
                                  "step:1/3 train_time:1235ms step_avg:1234.57ms\n"
                                  "step:2/3 train_time:2000ms step_avg:1000.00ms\n"
                                  "profile: op         7\n"
                                  "step:3/3 train_time:3334ms step_avg:1111.20ms\n"
                                  "step:3/3 val_loss:3.2800 train_time:3334ms step_avg:1111.20ms\n"
                                  "peak memory allocated: 40000 MiB reserved: 51000 MiB\n";

static void check_log(const char *path)
{
    char *log = read_text(path), separator[102] = "";
    memset(separator, '=', 100);
    separator[100] = '\n';
    if (!ok(log && strncmp(log, source, strlen(source)) == 0, "the log begins with the source"))
        return;

    char *p = log + strlen(source);
    ok(strncmp(p, separator, 101) == 0, "100 =");
    static const char versions[] =
        "compiler 12.3\nCUDA runtime 12.8\ngit commit: 0123abc and uncommitted changes\n"
        "command line: ./train_gpt --preset tiny --sample 'it'\\''s ? here' ''\n";
    p += 101;
    ok(strncmp(p, versions, strlen(versions)) == 0, "version lines, commit, command line");
    p += strlen(versions);
    char *second = strstr(p, separator);
    size_t between = second ? (size_t)(second - p) : 0;
    ok(memmem(p, between, "NVIDIA-SMI", 10) || memmem(p, between, "no NVIDIA GPU", 13),
       "the words of nvidia-smi, or that there is none");
    ok(second && strcmp(second + 101, short_lines) == 0, "100 =, and every line to the character");
    free(log);
}

static void check_json(const char *path)
{
    static const char *const wanted[] = {
        NULL, // options, below
        "{\"event\":\"message\",\"text\":\"model: 42 parameters\"}",
        "{\"event\":\"message\",\"text\":\"memory: 7\"}",
        "{\"event\":\"validation\",\"step\":0,\"val_loss\":10.82584,\"train_ms\":0.4}",
        "{\"event\":\"step\",\"step\":1,\"loss\":10.5,\"lr\":0.01234,\"momentum\":0.875,\"ms\":1234.1678,"
        "\"mfu\":0.4,\"tokens\":262144,\"tokens_left\":524288,\"train_ms\":1234.5678}",
        "{\"event\":\"step\",\"step\":2,\"loss\":null,\"lr\":0.5,\"momentum\":0.875,\"ms\":765.4382,"
        "\"tokens\":262144,\"tokens_left\":524288,\"train_ms\":2000.006}",
        "{\"event\":\"message\",\"text\":\"profile: op         7\"}",
        "{\"event\":\"step\",\"step\":3,\"loss\":null,\"lr\":0.25,\"momentum\":0.875,\"ms\":1333."
        "5939999999998,\"tokens\":262144,\"tokens_left\":524288,\"train_ms\":3333.6}",
        "{\"event\":\"validation\",\"step\":3,\"val_loss\":3.27996,\"train_ms\":3333.6}",
        "{\"event\":\"memory\",\"allocated_mib\":39999.7,\"reserved_mib\":51000.2}",
        "{\"event\":\"end\"}",
    };
    enum { LINES = sizeof wanted / sizeof *wanted };
    char *text = read_text(path), *head = xstrdup(text), *rest = text, *line;
    int n = 0, same = 0;
    json_t *options = NULL;
    while (rest && (line = strsep(&rest, "\n")) && (*line || rest)) {
        if (n == 0)
            options = json_loads(line, 0, NULL);
        else if (n < LINES && strcmp(line, wanted[n]) == 0)
            same++;
        else
            printf("# %s\n", line);
        n++;
    }
    ok(n == LINES && same == LINES - 1, "%d JSON lines as they should be, null for NaN and infinity", same);
    json_t *list = json_object_get(options, "options");
    ok(list && json_object_size(list) == 4 &&
           strcmp(json_string_value(json_object_get(list, "out")), "a \"path\" \xef\xbf\xbd") == 0,
       "the options come first, repaired where they are not UTF-8");
    ok(strstr(head, "\"adam-rate\":0.008,\"repeat\":true}"), "numbers as numbers, flags as flags");
    free(head);
    const char *run = json_string_value(json_object_get(options, "run"));
    ok(run && strstr(path, run), "with the name of the run");
    json_decref(options);
    free(text);
}

static void test_whole_run(void)
{
    int status;
    char *console = capture(short_run, "whole", &status), *log = find_log("whole", ".txt");
    ok(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a run");
    if (!ok(log && strstr(log, uuid), "one log named by the uuid: %s", log))
        return;
    check_log(log);
    char *json = find_log("whole", ".jsonl");
    ok(json && strncmp(json, log, strlen(log) - 3) == 0, "JSON lines of the same name");
    if (json)
        check_json(json);

    ok(strstr(console, log) && strstr(console, "step:3/3 val_loss:3.2800 train_time:3334ms"),
       "the console shows log and validation");
    ok(strstr(console, "step 1/3  loss 10.5000  lr 0.0123  1234 ms  212k tokens/s  MFU 40.0%  eta 0:02\n") !=
           NULL,
       "and loss, learning rate, ms, tokens/s, MFU, time left");
    ok(strstr(console, "step 3/3 ") && !strstr(console, "step 2/3 ") && !strchr(console, '\r'),
       "without a terminal only some lines");

    char *command = format_string(
        "perl -Iscripts -MRunLog -e 'my $l = RunLog::parse($ARGV[0]); print STDERR RunLog::unfinished($l);"
        " exit 1 if RunLog::unfinished($l) || $l->{command} !~ /--preset tiny/' '%s'",
        log);
    if (system("perl -e 1 2>/dev/null") != 0)
        skip("no perl");
    else
        ok(system(command) == 0, "the record tool finds the log complete");
    free(command);
    free(console);
    free(log);
    free(json);
}

// A program of that name before all others in PATH. Returns the log of a run that asks it, without the
// source; owned by the caller.
static char *log_with_smi(const char *script, double patience, double *seconds)
{
    char *bin = in_folder("bin"), *path = in_folder("bin/nvidia-smi"), *old = xstrdup(getenv("PATH")),
         *out = in_folder("smi");
    char *new_path = format_string("%s:%s", bin, old);
    remove_tree(out);
    mkdir(bin, 0700);
    FILE *f = fopen(path, "w");
    fprintf(f, "#!/bin/sh\n%s\n", script);
    fclose(f);
    chmod(path, 0700);
    setenv("PATH", new_path, 1);
    double began = seconds_now();
    LogHead head = log_head(patience);
    make_folders(out);
    Logger *l = logger_open(out, uuid, 0, &head);
    *seconds = seconds_now() - began;
    logger_close(l);
    setenv("PATH", old, 1);
    char *name = find_log("smi", ".txt"), *log = name ? read_text(name) : NULL;
    char *text = xstrdup(log ? log + strlen(source) : "");
    free(bin);
    free(path);
    free(old);
    free(out);
    free(new_path);
    free(name);
    free(log);
    return text;
}

static void test_nvidia_smi(void)
{
    double seconds;
    char *log = log_with_smi("printf 'NVIDIA-SMI 1\n| 0  GPU |'", 30, &seconds);
    ok(strstr(log, "\nNVIDIA-SMI 1\n| 0  GPU |\n==="), "what nvidia-smi prints is in the head");
    free(log);
    log = log_with_smi("echo half; exec sleep 60", 0.5, &seconds);
    ok(strstr(log, "\nnvidia-smi: no answer within 0.5 s\n===") && !strstr(log, "half") && seconds < 5,
       "one that hangs is left out after %.1f s", seconds);
    free(log);
    log = log_with_smi("exec >&- 2>&-; exec sleep 60", 0.5, &seconds);
    ok(strstr(log, "\nnvidia-smi: no answer within") && seconds < 5,
       "also when it has closed its output: %.1f s", seconds);
    free(log);
    log = log_with_smi("echo failed; exit 9", 30, &seconds);
    ok(strstr(log, "\nnvidia-smi: no NVIDIA GPU or driver") && !strstr(log, "failed"),
       "one that fails is no answer");
    free(log);
}

static void test_resumed(void)
{
    char *out = in_folder("resumed");
    LogHead head = log_head(30);
    head.resumed = "from step 13, runs/x/step_000013.safetensors";
    make_folders(out);
    Logger *l = logger_open(out, uuid, 0, &head);
    logger_validation(l, 13, 20, 3, 1);
    logger_failure(l, "diverged");
    logger_close(l);
    char *name = find_log("resumed", ".txt"), *log = read_text(name);
    char *json_name = find_log("resumed", ".jsonl"), *json = read_text(json_name);
    ok(strstr(log + strlen(source), "\nresumed: from step 13, runs/x/step_000013.safetensors\nnvidia-smi") !=
           NULL,
       "the head of a resumed run's log says where it begins");
    ok(strstr(json, "\"resumed\":\"from step 13, runs/x/step_000013.safetensors\"") != NULL,
       "and so do its JSON lines");
    ok(strstr(json, "{\"event\":\"failure\",\"text\":\"diverged\"}\n") != NULL, "which hold how it ended");
    free(out);
    free(name);
    free(log);
    free(json_name);
    free(json);
}

static void test_other_ranks(void)
{
    char *out = in_folder("rank1");
    struct stat info;
    LogHead head = log_head(30);
    make_folders(out);
    Logger *l = logger_open(out, uuid, 1, &head);
    char *log = format_string("%s/%s.txt", out, uuid);
    ok(l == NULL && stat(log, &info) != 0, "rank 1 has no logger and makes no file");
    free(log);
    logger_option(l, "a", "b", KIND_TEXT);
    logger_message(l, "x");
    logger_validation(l, 0, 1, 1, 1);
    report_step(l, 1, 1, 1, 1, 1, 0);
    logger_memory(l, 1, 1);
    ok(logger_path(l) == NULL, "and may call everything");
    logger_close(l);
    free(out);
}

// ---- losing the disk --------------------------------------------------------------------------------------

static void limited_run(const char *run)
{
    Logger *l = open_run(run);
    logger_validation(l, 0, 1000, 10, 0);
    struct stat info;
    if (stat(logger_path(l), &info) != 0)
        _exit(8);
    struct rlimit limit = {(rlim_t)info.st_size + 1000, RLIM_INFINITY};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    for (int i = 1; i <= 1000; i++)
        report_step(l, i, 1000, 10 * i, 5, 1, 0);
    logger_validation(l, 1000, 1000, 4, 10000);
    logger_close(l);
    printf("went on to the end\n");
}

static void test_full_disk(void)
{
    int status;
    char *console = capture(limited_run, "limited", &status);
    ok(WIFEXITED(status) && WEXITSTATUS(status) == 0 && strstr(console, "went on to the end\n"),
       "a run outlives its full disk");
    ok(count_of(console, "note: ") == 1 && strstr(console, "File too large; the run goes on without it"),
       "with one note for the log");
    ok(strstr(console, "step:1000/1000 val_loss:4.0000") != NULL, "and the losses still on the console");
    char *path = find_log("limited", ".txt"), *log = path ? read_text(path) : NULL;
    const char *last = log ? strrchr(log, ':') : NULL; // of step_avg
    ok(last && strcmp(last, ":10.00ms\n") == 0, "the log ends with a whole line");
    free(log);
    free(path);
    free(console);
}

static void no_folder_run(const char *run)
{
    char *out = in_folder(run);
    close(open(out, O_WRONLY | O_CREAT, 0600)); // a file where the folder should be
    short_run(run);
    printf("went on to the end\n");
    free(out);
}

static void test_no_folder(void)
{
    int status;
    char *console = capture(no_folder_run, "blocked", &status);
    ok(WIFEXITED(status) && WEXITSTATUS(status) == 0 && strstr(console, "went on to the end\n"),
       "a run without a folder for its logs");
    ok(count_of(console, "note: ") == 2 && count_of(console, "Not a directory") == 2,
       "says so once for each of the two files");
    ok(strstr(console, "val_loss:3.2800") != NULL, "and shows its losses");
    free(console);
}

// ---- being killed -----------------------------------------------------------------------------------------

static void test_kill(void)
{
    int channel[2], status, step = 0;
    if (pipe(channel) != 0)
        fatal(1, "no pipe");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int quiet = open("/dev/null", O_WRONLY);
        dup2(quiet, 1);
        Logger *l = open_run("killed");
        for (int i = 1;; i++) {
            report_step(l, i, 100000000, i, 5, 1, 0);
            if (write(channel[1], &i, sizeof i) != sizeof i)
                _exit(1);
        }
    }
    close(channel[1]);
    while (step < 2000 && read(channel[0], &step, sizeof step) == sizeof step) {
    }
    kill(child, SIGKILL);
    while (read(channel[0], &step, sizeof step) == sizeof step) {
    } // what it still reported
    waitpid(child, &status, 0);
    close(channel[0]);
    char *path = find_log("killed", ".txt"), *log = path ? read_text(path) : NULL;
    char *json_path = find_log("killed", ".jsonl"), *json = json_path ? read_text(json_path) : NULL;
    char *line = format_string("step:%d/100000000 train_time:%dms step_avg:1.00ms\n", step, step);
    char *record = format_string("{\"event\":\"step\",\"step\":%d,", step);
    ok(step >= 2000 && log && strstr(log, line), "SIGKILL after %d steps: the log has the last of them",
       step);
    ok(json && strstr(json, record), "and so have the JSON lines");
    free(line);
    free(record);
    free(log);
    free(json);
    free(path);
    free(json_path);
}

// ---- a terminal -------------------------------------------------------------------------------------------

static void test_terminal(void)
{
    int master = posix_openpt(O_RDWR | O_NOCTTY), status;
    const char *name = master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0 ? ptsname(master) : NULL;
    int terminal = name ? open(name, O_RDWR | O_NOCTTY) : -1;
    if (terminal < 0) {
        skip("no pseudo-terminals here");
        return;
    }
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(terminal, 1);
        Logger *l = open_run("terminal");
        logger_validation(l, 0, 400, 10, 0);
        for (int i = 1; i <= 400; i++) {
            // The last steps take twice the tokens in twice the time.
            tokens = i < 399 ? 1000 : 2000;
            tokens_left = 2000 * (400 - i);
            report_step(l, i, 400, i < 399 ? 10 * i : 20 * i - 3980, 5, 1, 0);
            usleep(1000);
        }
        logger_message(l, "done");
        logger_close(l);
        _exit(0);
    }
    close(terminal);
    char text[65536];
    size_t bytes = 0;
    ssize_t n;
    while (bytes < sizeof text - 1 && (n = read(master, text + bytes, sizeof text - 1 - bytes)) > 0)
        bytes += (size_t)n;
    text[bytes] = 0;
    waitpid(child, &status, 0);
    close(master);
    int rewritten = count_of(text, "\r\033[Kstep ");
    ok(rewritten >= 3 && rewritten < 200, "on a terminal one line is rewritten, %d times in 400 steps",
       rewritten);
    ok(strstr(text, "step 400/400  loss 5.0000  lr 1  20.0 ms  100k tokens/s  eta 0:00\r\ndone\r\n") != NULL,
       "up to the last step, whose speed is that of steps of its size; what follows begins a new line");
}

int main(void)
{
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/logger-XXXXXX", base ? base : P_tmpdir);
    if (!mkdtemp(folder))
        fatal(1, "cannot make a folder in %s", base ? base : P_tmpdir);
    fill_source();
    PART(test_whole_run());
    PART(test_nvidia_smi());
    PART(test_resumed());
    PART(test_other_ranks());
    PART(test_full_disk());
    PART(test_no_folder());
    PART(test_kill());
    PART(test_terminal());
    remove_tree(folder);
    return tap_done();
}
