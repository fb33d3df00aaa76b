// Ranks without any device: launched by the program itself, or started from outside and meeting over TCP.
// Every way in which a rank can end must end all of them, with one line, soon, and leave no process behind.
#include "dev/test/child.h"
#include "dev/test/tap.h"
#include "llmc/dist/launch.h"
#include "llmc/dist/meeting.h"
#include "llmc/dist/secret.h"
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 4, STEPS = 40 };
enum { LIMIT = 60, NEVER = 600 }; // seconds: of a program; a time-out that no fault waits for

// What the made-up programs write and the test reads.
typedef struct {
    _Atomic int pids, saves, steps;
    pid_t pid[64];
} Board;
static Board *board;

static bool gone(pid_t pid) // a zombie, whose new parent has not yet looked, is gone as well
{
    char path[64], line[256] = "", state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "r");
    if (!f)
        return true;
    if (fgets(line, sizeof line, f) && strrchr(line, ')'))
        state = strrchr(line, ')')[2];
    fclose(f);
    return state == 'Z' || state == 'X';
}

static int left_over(void) // ranks that still run, after a moment for the system
{
    int n = 0;
    for (int wait = 0; wait < 100; wait++) {
        n = 0;
        for (int i = 0; i < board->pids; i++)
            n += !gone(board->pid[i]);
        if (!n)
            break;
        wait_ms(20);
    }
    return n;
}

// Until the programs have counted this far. Those that have failed never do: the checks that follow say so.
static void wait_for(_Atomic int *count, int n)
{
    double end = seconds_now() + 30;
    while (*count < n && seconds_now() < end)
        wait_ms(10);
}

static void clear_board(void) { memset(board, 0, sizeof *board); }

// How many times as slow as a free machine this one is now: by runs without a fault, which take 0.1 s there.
static double slowness = 1;
static double soon(double seconds) { return seconds * slowness; }

// seconds: within which it ends, on a free machine
static void expect(const char *what, Result x, int status, const char *pattern, double seconds)
{
    bool line = !pattern ? x.lines == 0 : x.lines == 1 && strstr(x.text, pattern);
    ok(x.status == status && line, "%s: status %d, %d lines, %s", what, x.status, x.lines, first_line(&x));
    ok(x.seconds < soon(seconds) && left_over() == 0, "and no rank is left after %.1f s", x.seconds);
}

// ---- made-up training -------------------------------------------------------------------------------------

typedef enum {
    WELL,
    FATAL,
    KILLED,
    KILLED_TO,
    HANG,
    HANG_IN_TENSOR,
    FATAL_ALL,
    ENDS,
    OUT_OF_STEP,
    SLOW_DISK,
    SLOW_END,
    STUCK_DISK
} Fate;
typedef struct {
    Fate fate;
    int rank, size, step_ms;
    double timeout;
    bool tcp, nothing_to_save, nohup;
    bool local; // without a secret: over a socket of this machine and user
    int port;
    const char *options; // of this rank
} Plan;

static volatile sig_atomic_t interrupted;
static void on_signal(int number) { (void)number, interrupted++; }

static pthread_t main_thread;
static void stand_still(int number)
{
    (void)number;
    for (;;)
        pause();
}

// A launched rank is ended by its parent, one that was started from outside must end by itself.
static void *interrupt_main_thread(void *plan)
{
    wait_ms(300);
    if (((const Plan *)plan)->tcp)
        pthread_kill(main_thread, SIGUSR1);
    else
        kill(getpid(), SIGSTOP);
    return NULL;
}

// The rank of the plan stands still when a part of its tensor is on the way: rank 0 does not read before.
static void hang_in_tensor(const Plan *p, Control *c)
{
    enum { COUNT = 1 << 23 }; // floats: more than the buffers of a socket hold
    static float tensor[COUNT];
    pthread_t thread;
    if (c->rank == p->rank) {
        signal(SIGUSR1, stand_still);
        main_thread = pthread_self();
        if (pthread_create(&thread, NULL, interrupt_main_thread, (void *)p))
            fatal(EXIT_BAD_INPUT, "no thread");
    }
    if (!c->rank)
        wait_ms(600);
    control_all_reduce(c, tensor, COUNT);
}

static void meet_fate(const Plan *p, Control *c, int step)
{
    bool disk = step == 5 && (p->fate == SLOW_DISK || p->fate == STUCK_DISK);
    if (disk)
        control_patience(c, true);
    if (disk && !c->rank)
        wait_ms(p->fate == SLOW_DISK ? 5000 : 60000);
    if (disk) {
        control_barrier(c);
        control_patience(c, false);
    }
    if (step == 5 && p->fate == FATAL_ALL)
        fatal(EXIT_BAD_INPUT, "no such shard");
    if (step == 5 && p->fate == KILLED_TO && c->rank <= p->rank)
        kill(getpid(), SIGKILL); // rank 0 to p->rank at once
    if (step == 5 && p->fate == HANG_IN_TENSOR)
        hang_in_tensor(p, c);
    if (step != 5 || c->rank != p->rank)
        return;
    if (p->fate == FATAL)
        fatal(EXIT_BAD_INPUT, "shard 3 is truncated");
    if (p->fate == KILLED)
        kill(getpid(), SIGKILL);
    if (p->fate == ENDS)
        _exit(7);
    if (p->fate == OUT_OF_STEP)
        control_max(c, 0);
    while (p->fate == HANG)
        pause();
}

static int train(const Plan *p, Control *c) // the exit status
{
    bool stop = false;
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    board->pid[board->pids++] = getpid();
    for (int step = 0; step < STEPS && !stop; step++) {
        control_step(c, step);
        meet_fate(p, c, step);
        if (control_sum(c, c->rank + 1) != c->size * (c->size + 1) / 2)
            fatal(EXIT_BAD_INPUT, "a wrong sum");
        wait_ms(p->step_ms);
        stop = control_max(c, interrupted || launch_interrupted());
        if (!c->rank)
            board->steps++;
    }
    if (!c->rank)
        board->saves++;
    for (int token = 0; token < 35 && !c->rank && p->fate == SLOW_END; token++) {
        control_step(c, STEPS);
        wait_ms(100); // a sample
    }
    control_close(c);
    return stop ? EXIT_INTERRUPTED : 0;
}

static void program(void *argument)
{
    Plan *p = argument;
    static Control c;
    Rendezvous r;
    Error e;
    if (p->tcp) {
        if (!rendezvous_find(&r, &e))
            fatal(EXIT_USAGE, "%s", *e.text ? e.text : "not several ranks");
        meet_ranks(&r, 1, fingerprint_bytes(0, p->options, strlen(p->options)), p->timeout, &c);
    } else {
        signal(SIGHUP, p->nohup ? SIG_IGN : SIG_DFL);
        launch_ranks(&c, p->size ? p->size : RANKS, p->timeout);
        if (!p->nothing_to_save)
            launch_begins();
    }
    set_program_name("train_gpt", c.rank);
    control_watch(&c, p->tcp ? p->timeout : 0, NULL);
    _exit(train(p, &c));
}

static Result run(const Plan *p, double limit)
{
    clear_board();
    Run r = start(program, (void *)p);
    return finish(&r, limit);
}

static const char stops[] = "interrupted: this step will be finished and saved";

// ---- launched ---------------------------------------------------------------------------------------------

static void test_launched(void)
{
    for (int size = 2; size <= 8; size *= 2) {
        Result x = run(&(Plan){.size = size, .timeout = NEVER}, LIMIT);
        expect("ranks that end well", x, 0, NULL, 10);
        slowness = fmax(slowness, x.seconds / 0.3);
        ok(board->pids == size && board->saves == 1 && board->steps == STEPS, "%d ranks made %d steps", size,
           board->steps);
    }
    Plan fails = {.fate = FATAL, .rank = 1, .timeout = NEVER};
    expect("a rank that finds bad data", run(&fails, LIMIT), 1,
           "train_gpt (rank 1): error: shard 3 is truncated (at step 5)", 5);
    fails.rank = 0;
    expect("rank 0 finds bad data", run(&fails, LIMIT), 1, "(rank 0): error: shard 3 is truncated", 5);
    fails.fate = FATAL_ALL;
    expect("what all ranks meet is told once", run(&fails, LIMIT), 1, "(rank 0): error: no such", 5);
    Plan killed = {.fate = KILLED, .rank = 2, .timeout = NEVER};
    expect("a rank that is killed", run(&killed, LIMIT), 1,
           "(rank 2): error: killed by signal 9 (Killed) (at step 5)", 5);
    killed = (Plan){.fate = KILLED_TO, .rank = 1, .timeout = NEVER};
    expect("ranks 0 and 1 that are killed", run(&killed, LIMIT), 1,
           "): error: killed by signal 9 (Killed) (at step 5)", 5);
    Plan ends = {.fate = ENDS, .rank = 3, .timeout = NEVER};
    expect("a rank that ends", run(&ends, LIMIT), 7, "(rank 3): error: ended with status 7", 5);
    Plan hangs = {.fate = HANG, .rank = 1, .timeout = 1};
    expect("a rank that hangs", run(&hangs, LIMIT), 1, "(rank 1): error: no progress for 1 s (--timeout)", 5);
    hangs.rank = 0;
    expect("rank 0 hangs", run(&hangs, LIMIT), 1, "(rank 0): error: no progress for 1 s (--timeout)", 5);
    hangs.fate = HANG_IN_TENSOR;
    hangs.rank = 2;
    expect("a rank that is stopped amid a tensor", run(&hangs, LIMIT), 1,
           "(rank 2): error: no progress for 1 s (--timeout)", 5);
    Plan disk = {.fate = SLOW_DISK, .size = 2, .timeout = 2};
    expect("a save that takes longer than the time-out", run(&disk, LIMIT), 0, NULL, 10);
    disk.fate = SLOW_END;
    expect("a sample that does", run(&disk, LIMIT), 0, NULL, 10);
    disk.fate = STUCK_DISK;
    disk.timeout = 0.4; // times PATIENCE
    expect("a save that never ends", run(&disk, LIMIT), 1, "no progress for 6 s (--timeout)", 9);
    Plan lost = {.fate = OUT_OF_STEP, .rank = 1, .timeout = NEVER};
    expect("ranks at different places", run(&lost, LIMIT), 1, "are not at the same place", 5);
}

static void test_parent(void)
{
    Plan slow = {.timeout = NEVER, .step_ms = 100};
    clear_board();
    Run r = start(program, &slow);
    wait_for(&board->steps, 3);
    kill(r.pid, SIGKILL);
    Result x = finish(&r, LIMIT);
    ok(x.status == 128 + SIGKILL && left_over() == 0, "a parent that is killed takes its %d ranks along",
       board->pids);

    const int number[] = {SIGTERM, SIGHUP, SIGINT, SIGHUP};
    const char *name[] = {"SIGTERM to the parent", "SIGHUP to the parent", "SIGINT to the group",
                          "SIGHUP to the group"};
    for (int i = 0; i < 4; i++) {
        bool group = i >= 2;
        clear_board();
        r = start(program, &slow);
        wait_for(&board->steps, 3);
        int before = board->steps;
        kill(group ? -r.pid : r.pid, number[i]);
        x = finish(&r, LIMIT);
        expect(name[i], x, EXIT_INTERRUPTED, stops, 5);
        ok(board->saves == 1 && board->steps <= before + 2, "the step is finished and saved once, %d to %d",
           before, board->steps);
    }
    Plan nohup = {.timeout = NEVER, .step_ms = 30, .nohup = true};
    clear_board();
    r = start(program, &nohup);
    wait_for(&board->steps, 3);
    kill(-r.pid, SIGHUP);
    expect("a closed terminal under nohup", finish(&r, LIMIT), 0, NULL, 10);
    ok(board->steps == STEPS && board->saves == 1, "all steps are made");

    slow.step_ms = 2 * LIMIT * 1000;
    slow.nothing_to_save = true;
    clear_board();
    r = start(program, &slow);
    wait_for(&board->pids, RANKS);
    wait_ms(100);
    kill(r.pid, SIGTERM);
    expect("asked once, with nothing to save", finish(&r, LIMIT), EXIT_INTERRUPTED, NULL, 2.5);

    slow.nothing_to_save = false;
    clear_board();
    r = start(program, &slow);
    wait_for(&board->pids, RANKS);
    kill(r.pid, SIGTERM);
    wait_ms(2000); // half a second later it is another request
    kill(r.pid, SIGTERM);
    expect("asked twice", finish(&r, LIMIT), EXIT_INTERRUPTED, stops, 3.8);
    ok(board->saves == 0, "nothing is saved then");
}

// ---- started from outside ---------------------------------------------------------------------------------

static Run start_rank(Plan *p, int rank, const char *options)
{
    char text[16];
    snprintf(text, sizeof text, "%d", rank);
    setenv("RANK", text, 1);
    snprintf(text, sizeof text, "%d", p->size);
    setenv("WORLD_SIZE", text, 1);
    snprintf(text, sizeof text, "%d", p->port);
    setenv("MASTER_ADDR", "localhost", 1);
    if (p->local || !secret_supported())
        unsetenv("TRAIN_GPT_SECRET");
    else
        setenv("TRAIN_GPT_SECRET", "a secret of the test's ranks", 1);
    setenv("MASTER_PORT", text, 1);
    p->tcp = true;
    p->options = options;
    return start(program, p);
}

// Starts ranks 0..size-1; rank `other` gets other options. Joins the lines of all; the status of rank 0.
static Result run_ranks(Plan *p, int other, double limit)
{
    Run run[RANKS];
    Result all = {0};
    clear_board();
    for (int r = 0; r < p->size; r++)
        run[r] = start_rank(p, r, r == other ? "two" : "one");
    for (int r = 0; r < p->size; r++) {
        Result x = finish(&run[r], limit);
        if (!r)
            all.status = x.status;
        all.lines += x.lines;
        all.seconds = fmax(all.seconds, x.seconds);
        strncat(all.text, x.text, sizeof all.text - strlen(all.text) - 1);
    }
    return all;
}

// Rank 0, alone or with others, is gone without a word: each that is left says so.
static void expect_each_to_speak(Plan *p)
{
    char line[64];
    Result x = run_ranks(p, -1, LIMIT);
    bool all = x.lines == p->size - 1 - p->rank;
    for (int r = p->rank + 1; r < p->size; r++) {
        snprintf(line, sizeof line, "(rank %d): error: rank 0 is gone", r);
        all = all && strstr(x.text, line);
    }
    ok(x.status == 128 + SIGKILL && all, "TCP: ranks 0 to %d are killed: status %d, %d lines, %s", p->rank,
       x.status, x.lines, first_line(&x));
    ok(x.seconds < soon(5) && left_over() == 0, "and no rank is left after %.1f s", x.seconds);
}

static void test_tcp(int port)
{
    Plan p = {.size = RANKS, .timeout = NEVER, .port = port};
    expect("ranks that meet over TCP", run_ranks(&p, -1, LIMIT), 0, NULL, 10);
    ok(board->saves == 1 && board->steps == STEPS, "all steps are made");
    expect("a rank with other options", run_ranks(&p, 2, LIMIT), 1, "was started with other options", 5);
    p.fate = FATAL;
    p.rank = 1;
    expect("TCP: a rank that finds bad data", run_ranks(&p, -1, LIMIT), 1,
           "(rank 1): error: shard 3 is truncated (at step 5)", 5);
    p.rank = 0;
    expect("TCP: rank 0 finds bad data", run_ranks(&p, -1, LIMIT), 1,
           "(rank 0): error: shard 3 is truncated (at step 5)", 5);
    p.fate = KILLED;
    p.rank = 3;
    expect("TCP: a rank that is killed", run_ranks(&p, -1, LIMIT), 1, "(rank 0): error: rank 3 is gone", 5);
    p.fate = KILLED_TO;
    for (p.rank = 0; p.rank < 2; p.rank++)
        expect_each_to_speak(&p);
    p.fate = HANG;
    p.rank = 2;
    p.timeout = 2;
    const char *line = "(rank 0): error: no progress for 2 s (--timeout), waiting for rank 2";
    expect("TCP: a rank that hangs", run_ranks(&p, -1, LIMIT), 1, line, 6);
    p.fate = HANG_IN_TENSOR;
    expect("TCP: a rank that hangs amid a tensor", run_ranks(&p, -1, LIMIT), 1, line, 6);
    p.fate = SLOW_DISK;
    expect("TCP: a save that takes longer than the time-out", run_ranks(&p, -1, LIMIT), 0, NULL, 15);
}

// Without a secret: no network, the rest as before.
static void test_local(int port)
{
    Plan p = {.size = RANKS, .timeout = NEVER, .port = port, .local = true};
    expect("ranks that meet on one machine", run_ranks(&p, -1, LIMIT), 0, NULL, 10);
    ok(board->saves == 1 && board->steps == STEPS, "all steps are made");
    expect("one machine: a rank with other options", run_ranks(&p, 2, LIMIT), 1,
           "was started with other options", 5);
    p.fate = FATAL;
    p.rank = 1;
    expect("one machine: a rank that finds bad data", run_ranks(&p, -1, LIMIT), 1,
           "(rank 1): error: shard 3 is truncated", 5);
    p.fate = KILLED;
    p.rank = 3;
    expect("one machine: a rank that is killed", run_ranks(&p, -1, LIMIT), 1,
           "(rank 0): error: rank 3 is gone", 5);
}

// A port whose queue of new connections is full: the system answers no further one, as a machine that is
// switched off. The connections that fill it stay open.
static int silent_listener(int port)
{
    struct sockaddr_in here = {.sin_family = AF_INET,
                               .sin_port = htons((uint16_t)port),
                               .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&here, sizeof here) || listen(fd, 0))
        return -1;
    for (int i = 0; i < 4; i++)
        connect(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), (struct sockaddr *)&here, sizeof here);
    wait_ms(50);
    return fd;
}

static void test_two_programs(int port)
{
    Plan p = {.size = 2, .timeout = NEVER, .port = port, .step_ms = 50};
    clear_board();
    Run first[2], second[2];
    for (int r = 0; r < 2; r++)
        first[r] = start_rank(&p, r, "one");
    wait_for(&board->steps, 2);
    for (int r = 0; r < 2; r++)
        second[r] = start_rank(&p, r, "one");
    Result x0 = finish(&second[0], LIMIT), x1 = finish(&second[1], LIMIT);
    ok(x0.status == 1 && x0.lines == 1 && strstr(x0.text, "is taken"), "a second program on the port: %s",
       first_line(&x0));
    ok(x1.status == 1 && x1.lines == 1 && strstr(x1.text, "belongs to another run"), "and its rank 1: %s",
       first_line(&x1));
    ok(x0.seconds < soon(5) && x1.seconds < soon(5), "both at once");
    Result y0 = finish(&first[0], LIMIT), y1 = finish(&first[1], LIMIT);
    ok(!y0.status && !y1.status && !y0.lines && !y1.lines && !left_over(),
       "while the first goes on to its end");

    Plan alone = {.size = 2, .timeout = 1, .port = port + 1};
    Run r = start_rank(&alone, 0, "one");
    Result x = finish(&r, LIMIT);
    ok(x.status == 1 && strstr(x.text, "rank 1 has not come"), "a rank that never comes: %s", first_line(&x));
    r = start_rank(&alone, 1, "one");
    x = finish(&r, LIMIT);
    ok(x.status == 1 && strstr(x.text, "rank 0 does not answer"), "a rank 0 that never comes: %s",
       first_line(&x));

    if (!secret_supported())
        return skip("built without libsodium: no TCP");
    int silent = silent_listener(port + 2);
    Plan unheard = {.size = 2, .timeout = 1, .port = port + 2};
    r = start_rank(&unheard, 1, "one");
    x = finish(&r, LIMIT);
    ok(x.status == 1 && strstr(x.text, "rank 0 does not answer") && x.seconds < soon(3),
       "a machine that is silent: %.1f s, %s", x.seconds, first_line(&x));
    close(silent);
}

static bool network(bool on)
{
    struct ifreq lo = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    bool done = !ioctl(fd, SIOCGIFFLAGS, &lo);
    lo.ifr_flags = (short)(on ? lo.ifr_flags | IFF_UP : lo.ifr_flags & ~IFF_UP);
    done = done && !ioctl(fd, SIOCSIFFLAGS, &lo);
    close(fd);
    return done;
}

// In a network of the test's own, which it switches off: no process ends and no connection is closed. The
// last of all tests:
// there is no way back.
static void test_cut_off(int port)
{
    if (!secret_supported())
        return skip("built without libsodium: no TCP");
    if (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET))
        return skip("no network of our own: not allowed");
    ok(network(true), "a network of our own");
    Plan p = {.size = RANKS, .timeout = NEVER, .port = port, .step_ms = 50};
    Run run[RANKS];
    clear_board();
    for (int r = 0; r < RANKS; r++)
        run[r] = start_rank(&p, r, "one");
    wait_for(&board->steps, 3);
    double cut = seconds_now();
    ok(network(false), "is switched off");
    for (int r = 0; r < RANKS; r++) {
        Result x = finish(&run[r], LIMIT);
        ok(x.status == 1 && x.lines == 1 && strstr(x.text, "is gone"),
           "a rank that is cut off: status %d, %s", x.status, first_line(&x));
    }
    ok(seconds_now() - cut < soon(10) && left_over() == 0, "and no rank is left after %.1f s",
       seconds_now() - cut);
}

static int answer(void) { return 5; }

int main(void)
{
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int port = first_port();
    PART(test_launched());
    PART(test_parent());
    PART(test_tcp(port));
    PART(test_local(port));
    PART(test_two_programs(port + 1));
    ok(launch_ask(answer) == 5, "a question asked in a child");
    PART(test_cut_off(port + 4));
    return tap_done();
}
