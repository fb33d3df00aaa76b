#include "llmc/dist/launch.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// ---- which devices ----------------------------------------------------------------------------------------

bool launch_ranks_fit(int ranks, int micro_batches)
{
    return ranks >= 1 && ranks <= 8 && 8 % ranks == 0 && micro_batches % ranks == 0;
}

static bool parse_list(LaunchChoice *c, const char *text, Error *e)
{
    const char *p = text;
    while (*p) {
        char *end;
        long index = strtol(p, &end, 10);
        if (end == p || index < 0 || index > 1023 || (*end && *end != ','))
            return error_set(e, "--gpus: '%s' is neither a number of GPUs, nor a list like 0,1, nor all",
                             text);
        if (c->count == MAX_RANKS)
            return error_set(e, "--gpus: '%s' names more than %d", text, MAX_RANKS);
        c->device[c->count++] = (int)index;
        p = *end ? end + 1 : end;
    }
    return true;
}

bool launch_choose(LaunchChoice *c, const char *gpus, int visible, int micro_batches, Error *e)
{
    memset(c, 0, sizeof *c);
    bool all = !strcmp(gpus, "all"), list = strchr(gpus, ',') != NULL;
    if (!*gpus || !strcmp(gpus, ","))
        return error_set(e, "--gpus: needs a number of GPUs, a list like 0,1, or all");
    if (!all && !parse_list(c, gpus, e))
        return false;
    if (all || !list) {
        int count = all ? (int)min_i64(visible, 8) : c->device[0];
        while (all && count > 1 && !launch_ranks_fit(count, micro_batches))
            count--;
        if (count > MAX_RANKS)
            return error_set(e, "--gpus %d: at most 8", count);
        c->count = all && count < 1 ? 1 : count; // without a device the backend says so
        for (int i = 0; i < c->count; i++)
            c->device[i] = i;
    }
    if (!all && !list && !c->count)
        return error_set(e, "--gpus %s: is no GPU; GPU 0 alone is --gpus 0, (with the comma)", gpus);
    if (!launch_ranks_fit(c->count, micro_batches))
        return error_set(e, "--gpus %s: %d ranks; must be 1, 2, 4 or 8 and divide --micro-batches %d", gpus,
                         c->count, micro_batches);
    for (int i = 0; i < c->count && visible > 0; i++)
        if (c->device[i] >= visible)
            return error_set(e, "--gpus %s: device %d does not exist: this machine has %d", gpus,
                             c->device[i], visible);
    c->left_out = all && visible > c->count ? visible - c->count : 0;
    if (c->left_out)
        snprintf(c->why, sizeof c->why,
                 "%d of %d GPUs used: ranks must be 1, 2, 4 or 8 and divide --micro-batches %d", c->count,
                 visible, micro_batches);
    return true;
}

int launch_ask(int (*f)(void))
{
    int status;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0)
        _exit(f());
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return pid > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// ---- what parent and ranks share --------------------------------------------------------------------------

typedef struct {
    RankPlace place;
    int status;
    char message[2048];
} RankState;

typedef struct {
    _Atomic int first_failed; // 1 + the rank whose message came first; 0: none
    _Atomic int begun, interrupted, saved;
    RankState rank[MAX_RANKS];
} Shared;

static Shared *shared; // NULL in a program that was not launched
static Control *own_control;
static volatile sig_atomic_t begun, saved; // in a program that was not launched

bool launch_interrupted(void) { return shared && shared->interrupted; }

void launch_answer(void)
{
    static const char amid[] = "train_gpt: note: interrupted: this step will be finished and saved; a second "
                               "request ends at once, without saving\n",
                      early[] = "train_gpt: note: interrupted: the run ends before its first step; a second "
                                "request ends at once\n";
    int code = errno;
    bool has_begun = shared ? shared->begun : begun;
    if (!own_control && !(shared ? shared->saved : saved)) {
        ssize_t written = has_begun ? write(STDERR_FILENO, amid, sizeof amid - 1)
                                    : write(STDERR_FILENO, early, sizeof early - 1);
        (void)written; // a terminal may be gone
    }
    errno = code;
}

void launch_begins(void)
{
    begun = 1;
    if (shared)
        shared->begun = 1;
}

void launch_saved(void)
{
    saved = 1;
    if (shared)
        shared->saved = 1;
}

static void report(int status, const char *message) // fatal() in a rank
{
    RankState *mine = &shared->rank[own_control->rank];
    int none = 0;
    snprintf(mine->message, sizeof mine->message, "%s", message);
    mine->status = status;
    atomic_compare_exchange_strong(&shared->first_failed, &none, own_control->rank + 1);
}

// ---- the parent -------------------------------------------------------------------------------------------

typedef struct {
    int size, left, status;
    pid_t pid[MAX_RANKS], parent; // 0: has ended
    double timeout, idle[MAX_RANKS], interrupted_at;
    int64_t seen[MAX_RANKS];
} Watch;

// A process that hangs in the driver of a broken GPU cannot be killed: after a while nobody waits for it any
// more.
static void end_all(Watch *w)
{
    struct timespec tick = {.tv_nsec = 5000000};
    double end = seconds_now() + 8;
    for (int r = 0; r < w->size; r++)
        if (w->pid[r])
            kill(w->pid[r], SIGKILL);
    for (int r = 0; r < w->size; r++)
        while (w->pid[r] && waitpid(w->pid[r], NULL, WNOHANG) == 0 && seconds_now() < end)
            nanosleep(&tick, NULL);
}

static void fail(Watch *w, int rank, int status, const char *cause)
{
    char place[40];
    control_place_text(&shared->rank[rank].place, place, sizeof place);
    print_error(rank, "%s (%s)", cause, place);
    end_all(w);
    exit(status);
}

static void fail_by_message(Watch *w)
{
    int first = shared->first_failed - 1;
    fail(w, first, shared->rank[first].status ? shared->rank[first].status : EXIT_BAD_INPUT,
         shared->rank[first].message);
}

static void on_end(Watch *w, int rank, int status)
{
    char cause[128];
    w->pid[rank] = 0;
    w->left--;
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code == EXIT_INTERRUPTED && !shared->begun) { // this rank alone was asked
        end_all(w);
        exit(code);
    }
    if (code == 0 || code == EXIT_INTERRUPTED) {
        if (code)
            w->status = code;
        return;
    }
    if (shared->first_failed)
        fail_by_message(w);
    if (code >= 0)
        snprintf(cause, sizeof cause, "ended with status %d and no message", code);
    else
        snprintf(cause, sizeof cause, "killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    fail(w, rank, code > 0 ? code : EXIT_BAD_INPUT, cause);
}

static void reap(Watch *w)
{
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (int r = 0; r < w->size; r++)
            if (w->pid[r] == pid)
                on_end(w, r, status);
}

// A second request ends everything without saving, and so does the first before there is something to save.
// What comes within half a second of the first is the same one: it is often sent to the parent and to its
// group.
static void on_interrupt(Watch *w)
{
    if (!shared->begun || (shared->interrupted && seconds_now() - w->interrupted_at > 0.5)) {
        end_all(w);
        exit(EXIT_INTERRUPTED);
    }
    if (!shared->interrupted) {
        w->interrupted_at = seconds_now();
        launch_answer();
    }
    shared->interrupted = 1;
}

// Whether somebody has stopped the process, as a debugger or SIGSTOP does.
static bool is_stopped(pid_t pid)
{
    char path[64], line[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    const char *name_end = fgets(line, sizeof line, f) ? strrchr(line, ')') : NULL;
    fclose(f);
    return name_end && (name_end[2] == 'T' || name_end[2] == 't');
}

// Of two ranks: whether the others rather wait for a than for b. One that is stopped may be amid a transfer
// with one that is not; one that waits in the control channel waits for another; of the rest the one with the
// fewest calls is behind.
static bool is_behind(const Watch *w, int a, int b)
{
    bool stopped[2] = {is_stopped(w->pid[a]), is_stopped(w->pid[b])};
    const RankPlace *p = &shared->rank[a].place, *q = &shared->rank[b].place;
    bool waits[2] = {p->waiting_for >= 0, q->waiting_for >= 0};
    if (stopped[0] != stopped[1])
        return stopped[0];
    if (waits[0] != waits[1])
        return waits[1];
    return p->calls < q->calls;
}

static int rank_behind(const Watch *w)
{
    int behind = -1;
    for (int r = 0; r < w->size; r++)
        if (w->pid[r] && (behind < 0 || is_behind(w, r, behind)))
            behind = r;
    return behind;
}

static void look_for_standstill(Watch *w, double seconds)
{
    double stuck = 0;
    for (int r = 0; r < w->size; r++) {
        if (!w->pid[r])
            continue;
        int64_t now = shared->rank[r].place.progress;
        w->idle[r] = now == w->seen[r] ? w->idle[r] + seconds : 0;
        w->seen[r] = now;
        double limit = control_place_limit(&shared->rank[r].place, w->timeout);
        if (w->idle[r] > limit)
            stuck = limit;
    }
    if (!(stuck > 0))
        return;
    char cause[128];
    snprintf(cause, sizeof cause, "no progress for %.0f s (--timeout); the others wait for this rank", stuck);
    fail(w, rank_behind(w), EXIT_BAD_INPUT, cause);
}

static void supervise(Watch *w, const sigset_t *signals)
{
    struct timespec tick = {.tv_nsec = 100000000};
    double last = seconds_now();
    signal(SIGPIPE, SIG_IGN); // Ctrl-C ends the reader of a pipe, too, while ranks still save
    while (w->left) {
        int signal = sigtimedwait(signals, NULL, &tick);
        if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP)
            on_interrupt(w);
        reap(w);
        if (shared->first_failed && w->left)
            fail_by_message(w);
        double now = seconds_now();
        look_for_standstill(w, now - last < 1
                                   ? now - last
                                   : 1); // of a process that was stopped, no more than a second counts
        last = now;
    }
    exit(w->status);
}

// ---- ranks ------------------------------------------------------------------------------------------------

static void make_sockets(int size, int (*pair)[2])
{
    for (int r = 1; r < size; r++)
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair[r]))
            fatal(EXIT_BAD_INPUT, "cannot connect the ranks: socketpair: %s", strerror(errno));
}

static void become_rank(Control *c, int rank, int size, int (*pair)[2], pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(EXIT_BAD_INPUT); // it was gone before the line above
    signal(SIGINT, SIG_IGN);   // until the program catches them; the parent hands requests on
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    control_init(c, rank, size);
    c->place = &shared->rank[rank].place;
    own_control = c;
    for (int r = 1; r < size; r++) {
        if (rank == 0)
            c->fd[r] = pair[r][0];
        else if (rank == r)
            c->fd[0] = pair[r][1];
        if (rank)
            close(pair[r][0]);
        if (rank != r)
            close(pair[r][1]);
    }
    set_error_sink(report);
}

// The requests that the parent takes up, and the ends of ranks.
static void watched_signals(sigset_t *signals)
{
    struct sigaction hangup;
    sigemptyset(signals);
    sigaddset(signals, SIGCHLD);
    sigaddset(signals, SIGINT);
    sigaddset(signals, SIGTERM);
    sigaction(SIGHUP, NULL, &hangup);
    if (hangup.sa_handler != SIG_IGN)
        sigaddset(signals, SIGHUP); // nohup: a terminal that is closed is no request
}

void launch_ranks(Control *c, int size, double timeout)
{
    static int pair[MAX_RANKS][2];
    Watch w = {.size = size, .left = size, .parent = getpid(), .timeout = timeout};
    sigset_t signals, before;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        fatal(EXIT_BAD_INPUT, "cannot share memory among the ranks: %s", strerror(errno));
    for (int r = 0; r < size; r++)
        control_place_init(&shared->rank[r].place);
    make_sockets(size, pair);
    signal(SIGCHLD, SIG_DFL); // whoever started us may have ignored it, and children would then vanish
                              // without a status
    watched_signals(&signals);
    sigprocmask(SIG_BLOCK, &signals, &before);
    fflush(NULL);
    for (int r = 0; r < size; r++) {
        w.pid[r] = fork();
        if (w.pid[r] < 0) {
            end_all(&w);
            fatal(EXIT_BAD_INPUT, "cannot start rank %d: fork: %s", r, strerror(errno));
        }
        if (w.pid[r])
            continue;
        become_rank(c, r, size, pair, w.parent);
        sigprocmask(SIG_SETMASK, &before, NULL);
        return;
    }
    for (int r = 1; r < size; r++) {
        close(pair[r][0]);
        close(pair[r][1]);
    }
    supervise(&w, &signals);
}
