#include "llmc/run/run_folder.h"
#include "llmc/base/temporary.h"
#include "llmc/dist/comm.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { ID_DIGITS = 8 };
static const double PATIENCE = 2; // seconds for a process that was just ended and still saves its run

// ---- names ------------------------------------------------------------------------------------------------

char *checkpoint_path(const char *folder, int step)
{
    return format_string("%s/step_%06d.safetensors", folder, step);
}

// The step of a checkpoint's file name as the program writes it; -1 for any other name, such as
// step_7.safetensors.
static int step_of(const char *name)
{
    char canonical[64];
    int step;
    if (sscanf(name, "step_%9d.safetensors", &step) != 1 || step < 0)
        return -1;
    snprintf(canonical, sizeof canonical, "step_%06d.safetensors", step);
    return strcmp(name, canonical) ? -1 : step;
}

static bool is_checkpoint(const void *unused, const char *name)
{
    (void)unused;
    return step_of(name) >= 0;
}

static bool hex_digits(const char *text, int count)
{
    for (int i = 0; i < count; i++) {
        if (!isdigit((unsigned char)text[i]) && (text[i] < 'a' || text[i] > 'f'))
            return false;
    }
    return true;
}

// "<uuid>.txt" or "<uuid>.jsonl"
static bool is_log(const char *name)
{
    static const int group[] = {8, 4, 4, 4, 12};
    for (int i = 0; i < 5; i++) {
        if (!hex_digits(name, group[i]) || name[group[i]] != (i < 4 ? '-' : '.'))
            return false;
        name += group[i] + 1;
    }
    return !strcmp(name, "txt") || !strcmp(name, "jsonl");
}

// "2026-11-22_tiny_1a2b3c4d"
static bool is_run_name(const char *name)
{
    int year, month, day, end = 0;
    size_t length = strlen(name);
    if (sscanf(name, "%4d-%2d-%2d_%n", &year, &month, &day, &end) != 3 || end != 11)
        return false;
    if (length <= 11 + ID_DIGITS + 1)
        return false;
    const char *id = name + length - ID_DIGITS;
    return id[-1] == '_' && hex_digits(id, ID_DIGITS);
}

// RFC 9562, version 4: 122 random bits.
static void make_uuid(char uuid[UUID_CHARS + 1])
{
    uint8_t b[16];
    while (getrandom(b, sizeof b, 0) != sizeof b) {
        if (errno != EINTR)
            fatal(EXIT_BAD_INPUT, "cannot name the run: no random numbers: %s", strerror(errno));
    }
    b[6] = (b[6] & 0x0f) | 0x40;
    b[8] = (b[8] & 0x3f) | 0x80;
    char *p = uuid;
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            *p++ = '-';
        p += sprintf(p, "%02x", b[i]);
    }
}

// The last component of a path, without slashes at its end; owned by the caller.
static char *base_name(const char *path)
{
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/')
        end--;
    size_t start = end;
    while (start > 0 && path[start - 1] != '/')
        start--;
    return format_string("%.*s", (int)(end - start), path + start);
}

static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash)
        return xstrdup(".");
    return slash == path ? xstrdup("/") : format_string("%.*s", (int)(slash - path), path);
}

// ---- what lies in a folder --------------------------------------------------------------------------------

typedef struct {
    int highest, youngest; // steps of checkpoints; -1: there is none
    double written_at;     // of the highest, seconds
    bool log;
    char id[ID_DIGITS + 1]; // of a log; "" without one
    int unread;             // errno of what could not be looked at; 0
} Contents;

// -1: no file, or *failed is why it cannot be looked at.
static double written_at(const char *folder, int step, int *failed)
{
    struct stat info;
    char *path = checkpoint_path(folder, step);
    bool known = stat(path, &info) == 0, file = known && S_ISREG(info.st_mode);
    if (!known && errno != ENOENT)
        *failed = errno;
    free(path);
    return file ? (double)info.st_mtim.tv_sec + 1e-9 * (double)info.st_mtim.tv_nsec : -1;
}

static Contents look_into(const char *folder)
{
    Contents c = {.highest = -1, .youngest = -1, .written_at = -1};
    double youngest = -1;
    DIR *dir = opendir(folder);
    if (!dir && errno != ENOTDIR && errno != ENOENT)
        c.unread = errno;
    for (struct dirent *f; dir && (f = readdir(dir));) {
        if (is_log(f->d_name)) {
            c.log = true;
            snprintf(c.id, sizeof c.id, "%.*s", ID_DIGITS, f->d_name);
        }
        int step = step_of(f->d_name);
        double at = step < 0 ? -1 : written_at(folder, step, &c.unread);
        if (at < 0)
            continue;
        if (step > c.highest) {
            c.highest = step;
            c.written_at = at;
        }
        if (at > youngest) {
            youngest = at;
            c.youngest = step;
        }
    }
    if (dir)
        closedir(dir);
    if (c.highest >= 0 && youngest <= c.written_at)
        c.youngest = c.highest;
    return c;
}

// One that was renamed is known by its logs.
static bool is_run_folder(const char *folder, const Contents *c)
{
    char *name = base_name(folder);
    bool run = c->log || is_run_name(name);
    free(name);
    return run;
}

// Waits until no process writes into the folder of a run, at most until `end`.
static void wait_for_writer(const char *folder, double end)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    while (fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK && seconds_now() < end)
        usleep(20000);
    if (fd >= 0)
        close(fd);
}

static Contents look_when_free(const char *folder, double end)
{
    Contents c = look_into(folder);
    if (!is_run_folder(folder, &c) || seconds_now() >= end)
        return c;
    wait_for_writer(folder, end);
    return look_into(folder);
}

static char *newest_of(const char *folder, const Contents *c)
{
    if (c->youngest != c->highest)
        note(
            "%s: step %d is taken, the last one; step %d was written after it: to resume that, name its file",
            folder, c->highest, c->youngest);
    return checkpoint_path(folder, c->highest);
}

static char *find_in(const char *given, bool wait, Error *e)
{
    double end = wait ? seconds_now() + PATIENCE : 0;
    Contents best = look_when_free(given, end);
    char *folder = best.highest < 0 ? NULL : xstrdup(given);
    bool run = is_run_folder(given, &best);
    if (best.unread) {
        free(folder);
        error_set(e, "%s: cannot be read: %s", given, strerror(best.unread));
        return NULL;
    }
    DIR *dir = run ? NULL : opendir(given);
    for (struct dirent *f; dir && (f = readdir(dir));) {
        if (*f->d_name == '.')
            continue;
        char *path = format_string("%s/%s", given, f->d_name);
        Contents c = look_when_free(path, end);
        if (c.unread && is_run_folder(path, &c))
            note("%s: cannot be read, and is left out: %s", path, strerror(c.unread));
        if (c.written_at > best.written_at && is_run_folder(path, &c)) {
            best = c;
            free(folder);
            folder = xstrdup(path);
        }
        free(path);
    }
    if (dir)
        closedir(dir);
    char *newest = folder ? newest_of(folder, &best) : NULL;
    free(folder);
    if (!newest)
        error_set(e, "%s: no checkpoint (step_*.safetensors) in this folder%s", given,
                  run ? "" : " or its run folders; name the folder that holds the run, like runs/quickstart");
    return newest;
}

char *checkpoint_find(const char *given, bool wait, Error *e)
{
    struct stat info;
    size_t length = strlen(given);
    if (stat(given, &info) || !S_ISDIR(info.st_mode))
        return xstrdup(given);
    while (length > 1 && given[length - 1] == '/')
        length--;
    char *folder = format_string("%.*s", (int)length, given), *newest = find_in(folder, wait, e);
    free(folder);
    return newest;
}

// ---- whether a run is finished ----------------------------------------------------------------------------

static bool log_ends(const char *path, int steps)
{
    char *line = NULL, *last = format_string("step:%d/%d val_loss:", steps, steps);
    const char *end = "peak memory allocated: ";
    size_t room = 0;
    bool validated = false, ended = false;
    FILE *f = fopen(path, "re");
    while (f && getline(&line, &room, f) >= 0) {
        validated = validated || !strncmp(line, last, strlen(last));
        ended = validated && !strncmp(line, end, strlen(end));
    }
    if (f)
        fclose(f);
    free(line);
    free(last);
    return ended;
}

bool run_folder_finished(const char *checkpoint, int steps)
{
    char *folder = folder_of(checkpoint);
    bool finished = false;
    DIR *dir = opendir(folder);
    for (struct dirent *f; dir && !finished && (f = readdir(dir));) {
        char *path = format_string("%s/%s", folder, f->d_name);
        finished = is_log(f->d_name) && log_ends(path, steps);
        free(path);
    }
    if (dir)
        closedir(dir);
    free(folder);
    return finished;
}

// ---- the place of this run --------------------------------------------------------------------------------

// A file of some bytes, brought to the disk and removed again.
static bool prove_writable(const char *folder, Error *e)
{
    char bytes[512] = "written by train_gpt to see whether this folder can be written to\n";
    char *path = format_string("%s/.write_test.%ld", folder, (long)getpid());
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    ssize_t written = fd >= 0 ? write(fd, bytes, sizeof bytes) : -1;
    int code = written < 0 ? errno : written < (ssize_t)sizeof bytes ? ENOSPC : 0;
    if (!code && fsync(fd) && errno != EINVAL)
        code = errno; // EINVAL: a file system that has nothing to be synced
    if (fd >= 0 && close(fd) && !code)
        code = errno;
    if (fd >= 0)
        unlink(path);
    free(path);
    if (!code)
        return true;
    return error_set(e, "--out %s: cannot write into this folder: %s; give another --out", folder,
                     strerror(code));
}

// Held as long as the process lives. A run that was just ended may still be on its way out.
static bool take(RunFolder *f, Error *e)
{
    double end = seconds_now() + PATIENCE;
    f->lock = open(f->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    while (f->lock >= 0 && flock(f->lock, LOCK_EX | LOCK_NB)) {
        if (errno != EWOULDBLOCK)
            return true; // a file system without locks
        if (seconds_now() > end)
            return error_set(
                e, "%s: another process goes on with this run; wait for its end, or give another --out",
                f->path);
        usleep(20000);
    }
    return true;
}

// Takes the folder of a run that goes on; highest: its last step when the checkpoint was chosen.
static bool take_run(RunFolder *f, int highest, Error *e)
{
    if (!take(f, e))
        return false;
    int now = look_into(f->path).highest;
    if (now != highest)
        return error_set(e, "%s: another process saved step %d meanwhile; start this one again", f->path,
                         now);
    temporary_remove_stale(f->path, is_checkpoint, NULL);
    return true;
}

static bool same_folder(const char *a, const char *b)
{
    struct stat one, other;
    return stat(a, &one) == 0 && stat(b, &other) == 0 && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}

static bool lies_in(const char *folder, const char *out)
{
    char *above = format_string("%s/..", folder);
    bool inside = same_folder(folder, out) || same_folder(above, out);
    free(above);
    return inside;
}

bool run_folder_prepare(RunFolder *f, const char *out, bool out_given, const char *checkpoint, Error *e)
{
    *f = (RunFolder){.lock = -1};
    make_uuid(f->uuid);
    char *beside = checkpoint ? folder_of(checkpoint) : NULL;
    if (beside) {
        Contents c = look_into(beside);
        if (is_run_folder(beside, &c) && (!out_given || lies_in(beside, out))) {
            char *name = base_name(beside);
            const char *id = c.log ? c.id : name + strlen(name) - ID_DIGITS;
            memcpy(f->uuid, id, ID_DIGITS);
            free(name);
            f->path = beside;
            return take_run(f, c.highest, e) && prove_writable(f->path, e);
        }
    }
    f->parent = xstrdup(out_given || !beside ? out : beside);
    free(beside);
    if (!*f->parent)
        return error_set(e, "--out is empty; give a folder");
    int failed = make_folders(f->parent);
    if (failed)
        return error_set(e, "--out %s: cannot make this folder: %s", f->parent, strerror(failed));
    return prove_writable(f->parent, e);
}

// 0, or the errno. Another run may have drawn the same id.
static int make_run_folder(RunFolder *f, const char *preset)
{
    char day[16];
    time_t now = time(NULL);
    struct tm date;
    localtime_r(&now, &date);
    strftime(day, sizeof day, "%Y-%m-%d", &date);
    make_folders(f->parent); // it may have been removed meanwhile
    for (int attempt = 0; attempt < 8; attempt++) {
        free(f->path);
        f->path = format_string("%s/%s_%s_%.*s", f->parent, day, preset, ID_DIGITS, f->uuid);
        if (mkdir(f->path, 0777) == 0)
            return 0;
        if (errno != EEXIST)
            return errno;
        make_uuid(f->uuid);
    }
    return EEXIST;
}

// All ranks name the same folder in their messages.
static void hand_over(RunFolder *f)
{
    char path[PATH_MAX] = "";
    if (f->path)
        snprintf(path, sizeof path, "%s", f->path);
    comm_broadcast(path, sizeof path);
    if (!f->path)
        f->path = format_string("%.*s", (int)sizeof path - 1, path);
}

bool run_folder_open(RunFolder *f, const char *preset, Error *e)
{
    if (comm_rank() == 0 && f->parent) {
        int failed = make_run_folder(f, preset);
        if (failed)
            return error_set(e, "--out %s: cannot make %s: %s", f->parent, f->path, strerror(failed));
        if (!take(f, e))
            return false;
    }
    hand_over(f);
    return true;
}

char *run_folder_options(const RunFolder *f, int step)
{
    char *first = format_string("%s/run.toml", f->path);
    if (access(first, F_OK))
        return first;
    free(first);
    return format_string("%s/run_%06d.toml", f->path, step);
}

int64_t run_folder_free(const RunFolder *f)
{
    struct statvfs s;
    bool known = statvfs(f->path, &s) == 0 && s.f_blocks > 0;
    return known ? (int64_t)(s.f_bavail * s.f_frsize) : INT64_MAX;
}

void run_folder_close(RunFolder *f)
{
    if (f->lock >= 0)
        close(f->lock);
    free(f->parent);
    free(f->path);
    *f = (RunFolder){.lock = -1};
}

// ---- old checkpoints --------------------------------------------------------------------------------------

void run_folder_prune(const RunFolder *f, int step, int keep)
{
    while (keep > 0) {
        int earlier = 0, lowest = -1;
        DIR *dir = opendir(f->path);
        for (struct dirent *d; dir && (d = readdir(dir));) {
            int s = step_of(d->d_name), failed = 0;
            if (s < 0 || s >= step || written_at(f->path, s, &failed) < 0)
                continue;
            earlier++;
            if (lowest < 0 || s < lowest)
                lowest = s;
        }
        if (dir)
            closedir(dir);
        if (earlier < keep)
            return;
        char *path = checkpoint_path(f->path, lowest);
        int failed = unlink(path) ? errno : 0;
        if (failed)
            note("%s: --keep-checkpoints cannot remove it: %s", path, strerror(failed));
        free(path);
        if (failed)
            return;
    }
}
