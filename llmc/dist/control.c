#include "llmc/dist/control.h"
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef enum { SUM = 1, MAX, BARRIER, BROADCAST, COLLECT, TENSOR, ABORT } Kind;
static const char *const kind_name[] = {"",          "sum",        "maximum", "barrier",
                                        "broadcast", "collection", "tensor",  "abort"};

typedef struct {
    uint32_t kind, call;
    uint64_t bytes; // that follow
} Frame;

void control_init(Control *c, int rank, int size)
{
    memset(c, 0, sizeof *c);
    c->rank = rank;
    c->size = size;
    c->listener = -1;
    control_place_init(&c->own_place);
    c->place = &c->own_place;
    for (int r = 0; r < MAX_RANKS; r++)
        c->fd[r] = -1;
}

void control_place_init(RankPlace *p) { *p = (RankPlace){.step = -1, .waiting_for = -1}; }

void control_place_text(const RankPlace *p, char *out, size_t capacity)
{
    if (p->step < 0)
        snprintf(out, capacity, "before the first step");
    else
        snprintf(out, capacity, "at step %d", p->step);
}

double control_place_limit(const RankPlace *p, double timeout)
{
    return p->patience ? timeout * p->patience : timeout;
}

static void sleep_seconds(double s)
{
    struct timespec t = {.tv_sec = (time_t)s, .tv_nsec = (long)(1e9 * (s - (double)(time_t)s))};
    nanosleep(&t, NULL);
}

// ---- the end of a rank ------------------------------------------------------------------------------------

void control_abort(Control *c)
{
    Frame f = {.kind = ABORT};
    for (int r = 0; r < c->size; r++)
        if (c->fd[r] >= 0)
            send(c->fd[r], &f, sizeof f, MSG_NOSIGNAL | MSG_DONTWAIT); // one that is gone needs no news
}

static Control *speaker;

static void abort_ranks(int status)
{
    (void)status;
    control_abort(speaker);
}

static void speak(int status, const char *message)
{
    char place[40];
    (void)status;
    control_place_text(speaker->place, place, sizeof place);
    print_error(speaker->rank, "%s (%s)", message, place);
}

void control_speak_for_itself(Control *c)
{
    speaker = c;
    set_abort_hook(abort_ranks);
    set_error_sink(speak);
}

// Another rank has failed and has said why: no second message.
static void leave_quietly(Control *c)
{
    if (c->rank == 0)
        control_abort(c);
    _exit(EXIT_BAD_INPUT);
}

// The connection to rank r ended without a word. A moment first: whoever watches may know more, and a parent
// ends us meanwhile. All that miss rank 0 say so: they cannot know which others are left, it may have taken
// its whole machine along.
static void peer_lost(int r)
{
    sleep_seconds(1);
    fatal(EXIT_BAD_INPUT, "rank %d is gone: its process or its connection ended", r);
}

// ---- frames -----------------------------------------------------------------------------------------------

// All of it, to or from rank r.
static bool transfer(Control *c, int r, void *buf, size_t bytes, bool out)
{
    size_t done = 0;
    c->place->waiting_for = r;
    while (done < bytes) {
        char *at = (char *)buf + done;
        ssize_t n =
            out ? send(c->fd[r], at, bytes - done, MSG_NOSIGNAL) : recv(c->fd[r], at, bytes - done, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        done += (size_t)n;
        atomic_fetch_add(&c->place->progress, 1);
    }
    c->place->waiting_for = -1;
    return done == bytes;
}

static bool send_all(Control *c, int r, const void *buf, size_t bytes)
{
    return transfer(c, r, (void *)buf, bytes, true);
}

static bool receive_all(Control *c, int r, void *buf, size_t bytes)
{
    return transfer(c, r, buf, bytes, false);
}

static void send_frame(Control *c, int r, Kind kind, const void *buf, size_t bytes)
{
    Frame f = {.kind = kind, .call = c->calls, .bytes = bytes};
    if (!send_all(c, r, &f, sizeof f) || !send_all(c, r, buf, bytes))
        peer_lost(r);
}

// Returns how many bytes follow: from `least` to `most`, whatever the other side says.
static size_t receive_header(Control *c, int r, Kind kind, size_t least, size_t most)
{
    Frame f;
    if (!receive_all(c, r, &f, sizeof f))
        peer_lost(r);
    if (f.kind == ABORT)
        leave_quietly(c);
    if (f.kind != kind || f.call != c->calls)
        fatal(EXIT_BAD_INPUT,
              "ranks %d and %d are not at the same place: %s number %u here, %s number %u there", c->rank, r,
              kind_name[kind], c->calls, f.kind <= ABORT ? kind_name[f.kind] : "?", f.call);
    if (f.bytes < least || f.bytes > most)
        fatal(EXIT_BAD_INPUT, "rank %d sends %llu bytes for %s number %u, and %zu to %zu are expected", r,
              (unsigned long long)f.bytes, kind_name[kind], c->calls, least, most);
    return f.bytes;
}

static void receive_frame(Control *c, int r, Kind kind, void *buf, size_t bytes)
{
    receive_header(c, r, kind, bytes, bytes);
    if (!receive_all(c, r, buf, bytes))
        peer_lost(r);
}

static void move_on(Control *c)
{
    atomic_fetch_add(&c->place->progress, 1);
    atomic_fetch_add(&c->place->calls, 1);
}

static void begin_call(Control *c)
{
    c->calls++;
    move_on(c);
}

// ---- collective calls -------------------------------------------------------------------------------------

static void combine(Kind kind, void *into, const void *x)
{
    double a, b;
    int64_t i, k;
    if (kind == SUM) {
        memcpy(&a, into, 8);
        memcpy(&b, x, 8);
        a += b;
        memcpy(into, &a, 8);
    } else {
        memcpy(&i, into, 8);
        memcpy(&k, x, 8);
        i = max_i64(i, k);
        memcpy(into, &i, 8);
    }
}

static void reduce(Control *c, Kind kind, void *value) // 8 bytes
{
    char other[8];
    if (c->size == 1)
        return;
    begin_call(c);
    if (c->rank) {
        send_frame(c, 0, kind, value, 8);
        receive_frame(c, 0, kind, value, 8);
        return;
    }
    for (int r = 1; r < c->size; r++) {
        receive_frame(c, r, kind, other, 8);
        combine(kind, value, other);
    }
    for (int r = 1; r < c->size; r++)
        send_frame(c, r, kind, value, 8);
}

double control_sum(Control *c, double x)
{
    reduce(c, SUM, &x);
    return x;
}

int64_t control_max(Control *c, int64_t x)
{
    reduce(c, MAX, &x);
    return x;
}

void control_barrier(Control *c)
{
    int64_t nothing = 0;
    reduce(c, BARRIER, &nothing);
}

void control_broadcast(Control *c, void *buf, size_t bytes)
{
    if (c->size == 1)
        return;
    begin_call(c);
    if (c->rank)
        receive_frame(c, 0, BROADCAST, buf, bytes);
    for (int r = 1; r < c->size && !c->rank; r++)
        send_frame(c, r, BROADCAST, buf, bytes);
}

size_t control_collect(Control *c, void *buf, size_t bytes, size_t capacity, int owner)
{
    if (owner == 0)
        return c->rank ? 0 : bytes;
    begin_call(c);
    if (c->rank == owner) {
        send_frame(c, 0, COLLECT, buf, bytes);
        return bytes;
    }
    if (c->rank)
        return 0;
    size_t arrived = receive_header(c, owner, COLLECT, 0, capacity);
    if (!receive_all(c, owner, buf, arrived))
        peer_lost(owner);
    return arrived;
}

// ---- tensors ----------------------------------------------------------------------------------------------

// Rank 0 reads one rank after the other, and not before it comes to this call itself: a sender may have to
// wait.
static void send_tensor(Control *c, int r, const void *buf, size_t bytes)
{
    c->bulk = 1;
    send_frame(c, r, TENSOR, buf, bytes);
    c->bulk = 0;
}

static void add_tensor(Control *c, int r, float *sum, int64_t count)
{
    enum { PIECE = 1 << 14 }; // floats: what is received is added while it is in the cache
    static float piece[PIECE];
    size_t bytes = (size_t)count * sizeof *sum;
    receive_header(c, r, TENSOR, bytes, bytes);
    for (int64_t at = 0; at < count; at += PIECE) {
        int64_t n = min_i64(PIECE, count - at);
        if (!receive_all(c, r, piece, (size_t)n * sizeof *piece))
            peer_lost(r);
        for (int64_t i = 0; i < n; i++)
            sum[at + i] += piece[i];
    }
}

static float *room_for_sums(Control *c, int64_t count)
{
    if (count > c->sums_count)
        c->sums = xrealloc(c->sums, (size_t)count, sizeof *c->sums);
    c->sums_count = max_i64(count, c->sums_count);
    return c->sums;
}

// Chunk by chunk: a rank whose chunk it was receives its sum before it sends the next, so nobody sends to one
// that sends.
void control_reduce_scatter(Control *c, float *out, const float *in, int64_t count)
{
    size_t bytes = (size_t)count * sizeof *in;
    if (c->size == 1)
        return;
    begin_call(c);
    for (int chunk = 0; chunk < c->size; chunk++) {
        const float *own = in + chunk * count;
        if (c->rank) {
            send_tensor(c, 0, own, bytes);
            if (chunk == c->rank)
                receive_frame(c, 0, TENSOR, out, bytes);
            continue;
        }
        float *sum = chunk ? room_for_sums(c, count) : out;
        memmove(sum, own, bytes);
        for (int r = 1; r < c->size; r++)
            add_tensor(c, r, sum, count);
        if (chunk)
            send_tensor(c, chunk, sum, bytes);
    }
}

void control_all_gather(Control *c, void *buf, int64_t bytes)
{
    size_t chunk = (size_t)bytes, whole = (size_t)(bytes * c->size);
    if (c->size == 1)
        return;
    begin_call(c);
    if (c->rank) {
        send_tensor(c, 0, (char *)buf + c->rank * bytes, chunk);
        receive_frame(c, 0, TENSOR, buf, whole);
        return;
    }
    for (int r = 1; r < c->size; r++)
        receive_frame(c, r, TENSOR, (char *)buf + r * bytes, chunk);
    for (int r = 1; r < c->size; r++)
        send_tensor(c, r, buf, whole);
}

// One rank's chunks after the other, as above.
void control_all_to_all(Control *c, void *out, const void *in, int64_t bytes)
{
    size_t chunk = (size_t)bytes, whole = (size_t)(bytes * c->size);
    if (c->size > 1)
        begin_call(c);
    for (int to = 0; to < c->size; to++) {
        const char *own = (const char *)in + to * bytes;
        if (c->rank) {
            send_tensor(c, 0, own, chunk);
            if (to == c->rank)
                receive_frame(c, 0, TENSOR, out, whole);
            continue;
        }
        char *chunks = to ? (char *)room_for_sums(c, ceil_div((int64_t)whole, sizeof(float))) : out;
        memcpy(chunks, own, chunk);
        for (int r = 1; r < c->size; r++)
            receive_frame(c, r, TENSOR, chunks + r * bytes, chunk);
        if (to)
            send_tensor(c, to, chunks, whole);
    }
}

void control_all_reduce(Control *c, float *buf, int64_t count)
{
    size_t bytes = (size_t)count * sizeof *buf;
    if (c->size == 1)
        return;
    begin_call(c);
    if (c->rank) {
        send_tensor(c, 0, buf, bytes);
        receive_frame(c, 0, TENSOR, buf, bytes);
        return;
    }
    for (int r = 1; r < c->size; r++)
        add_tensor(c, r, buf, count);
    for (int r = 1; r < c->size; r++)
        send_tensor(c, r, buf, bytes);
}

// ---- watching ---------------------------------------------------------------------------------------------

static struct {
    Control *channel;
    double timeout;
    const char *(*check)(void);
    pthread_t thread;
    bool runs;
    _Atomic bool ends;
} watch;

// The other side has closed. Its last words may still be unread, and the program's own thread may be waiting
// for the device.
static void on_hang_up(Control *c, int r)
{
    static char tail[1 << 16];
    Frame f = {0};
    ssize_t n = recv(c->fd[r], tail, sizeof tail, MSG_PEEK | MSG_DONTWAIT);
    if (n >= (ssize_t)sizeof f)
        memcpy(&f, tail + n - (ssize_t)sizeof f, sizeof f);
    if (f.kind == ABORT)
        leave_quietly(c);
    if (c->closing)
        return;
    peer_lost(r);
}

static void refuse_late_comer(Control *c)
{
    int fd = accept(c->listener, NULL, NULL);
    if (fd < 0)
        return;
    send(fd, "taken", 6, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(fd);
}

static void look_at_sockets(Control *c, int milliseconds)
{
    struct pollfd p[MAX_RANKS + 1];
    int rank_of[MAX_RANKS + 1], n = 0;
    for (int r = 0; r < c->size; r++)
        if (c->fd[r] >= 0)
            rank_of[n] = r, p[n++] = (struct pollfd){.fd = c->fd[r], .events = POLLRDHUP};
    if (c->listener >= 0)
        rank_of[n] = -1, p[n++] = (struct pollfd){.fd = c->listener, .events = POLLIN};
    if (poll(p, (nfds_t)n, milliseconds) <= 0)
        return;
    for (int i = 0; i < n && !c->closing; i++) {
        if (!p[i].revents)
            continue;
        if (rank_of[i] < 0)
            refuse_late_comer(c);
        else
            on_hang_up(c, rank_of[i]);
    }
}

// A machine that is switched off or cut off ends no connection, and the system sends for many minutes. (Idle
// connections: tune() in rendezvous.c.) What only waits here to be sent may wait for a rank that is slow to
// read: under patience, and with tensors.
static bool is_silent(const Control *c, int r)
{
    enum { SILENCE_MS = 6000 };
    struct tcp_info i;
    socklen_t size = sizeof i;
    int waiting = 0;
    if (c->fd[r] < 0 || getsockopt(c->fd[r], IPPROTO_TCP, TCP_INFO, &i, &size))
        return false; // ranks of a parent have no TCP
    ioctl(c->fd[r], SIOCOUTQ, &waiting);
    return i.tcpi_last_ack_recv > SILENCE_MS &&
           (i.tcpi_unacked || (waiting && !c->place->patience && !c->bulk));
}

// A second look, since it may be this machine that stood still: then what it missed arrives now.
static void look_for_silence(Control *c)
{
    for (int r = 0; r < c->size && !c->closing; r++) {
        if (!is_silent(c, r))
            continue;
        sleep_seconds(1);
        if (is_silent(c, r))
            peer_lost(r);
    }
}

// Rank 0 knows for whom all wait and speaks first. It may begin to wait up to a time-out later than another
// rank, as its work may take that long.
static void look_for_standstill(Control *c, double idle)
{
    double limit = control_place_limit(c->place, watch.timeout);
    int other = c->place->waiting_for;
    if (c->rank)
        limit = 2 * limit + 2;
    if (watch.timeout <= 0 || idle < limit)
        return;
    if (other >= 0)
        fatal(EXIT_BAD_INPUT, "no progress for %.0f s (--timeout), waiting for rank %d", limit, other);
    fatal(EXIT_BAD_INPUT, "no progress for %.0f s (--timeout)", limit);
}

static void *watch_thread(void *unused)
{
    (void)unused;
    Control *c = watch.channel;
    double idle = 0, last = seconds_now();
    int64_t seen = -1;
    while (!watch.ends) {
        if (c->closing)
            sleep_seconds(0.1);
        else
            look_at_sockets(c, 100);
        look_for_silence(c);
        const char *failure = watch.check ? watch.check() : NULL;
        if (failure && !c->closing) {
            sleep_seconds(
                1.5); // most often the echo of a rank that is gone, and that is told better elsewhere
            fatal(EXIT_BAD_INPUT, "%s", failure);
        }
        double now = seconds_now();
        double passed =
            now - last < 1 ? now - last : 1; // of a process that was stopped, no more than a second counts
        idle = seen == atomic_load(&c->place->progress) ? idle + passed : 0;
        last = now;
        seen = atomic_load(&c->place->progress);
        look_for_standstill(c, idle);
    }
    return NULL;
}

void control_watch(Control *c, double timeout, const char *(*check)(void))
{
    watch.channel = c;
    watch.timeout = timeout;
    watch.check = check;
    watch.ends = false;
    watch.runs = !pthread_create(&watch.thread, NULL, watch_thread, NULL);
    if (!watch.runs)
        fatal(EXIT_BAD_INPUT, "cannot start the thread that watches the other ranks");
}

void control_step(Control *c, int step)
{
    c->place->step = step;
    move_on(c);
}

void control_patience(Control *c, bool on)
{
    c->place->patience = on ? PATIENCE : 0;
    move_on(c);
}

void control_close(Control *c)
{
    control_patience(c, true); // they may wait for rank 0, which writes a sample
    c->closing = 1;            // from here on an end of a connection is what all expect
    control_barrier(c);
    watch.ends = true;
    if (watch.runs)
        pthread_join(watch.thread, NULL);
    watch.runs = false;
    for (int r = 0; r < c->size; r++)
        if (c->fd[r] >= 0)
            close(c->fd[r]);
    if (c->listener >= 0)
        close(c->listener);
    free(c->sums);
    c->sums = NULL;
}
