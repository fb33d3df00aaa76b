#include "llmc/rendezvous.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

// ---- who we are --------------------------------------------------------------------------------------------------------

typedef struct {
    const char *rank, *size, *local, *local_size;
} Names;
static const Names known[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"},
};

// True and the number, when the variable is set and holds one from 0 to `most`.
static bool number(const char *name, int most, int *out)
{
    const char *text = getenv(name);
    char *end;
    if (!text || !*text) return false;
    long value = strtol(text, &end, 10);
    if (*end || value < 0 || value > most) return false;
    *out = (int)value;
    return true;
}

void rendezvous_first_host(const char *list, char *out, size_t capacity)
{
    size_t plain = strcspn(list, "[,");
    if (list[plain] == '[') {
        size_t first = strcspn(list + plain + 1, "-,]");
        snprintf(out, capacity, "%.*s%.*s", (int)plain, list, (int)first, list + plain + 1);
    } else {
        snprintf(out, capacity, "%.*s", (int)plain, list);
    }
}

// Runs that a batch system or mpirun starts side by side on one machine get ports of their own, from the number of their job.
static int usual_port(void)
{
    const char *pmix = getenv("PMIX_NAMESPACE"), *job = getenv("SLURM_JOB_ID"), *step = getenv("SLURM_STEP_ID");
    char text[256] = "";
    if (pmix) snprintf(text, sizeof text, "%s", pmix);
    else if (job) snprintf(text, sizeof text, "%s.%s", job, step ? step : "");
    return *text ? 20000 + (int)(fingerprint_bytes(0, text, strlen(text)) % 10000) : 29500;
}

static bool find_address(Rendezvous *r, Error *e)
{
    const char *given = getenv("MASTER_ADDR"), *nodes = getenv("SLURM_STEP_NODELIST");
    if (given && *given) snprintf(r->address, sizeof r->address, "%s", given);
    else if (!strncmp(r->source, "SLURM", 5) && nodes) rendezvous_first_host(nodes, r->address, sizeof r->address);
    else if (r->local_size == r->size)
        snprintf(r->address, sizeof r->address, "127.0.0.1");
    else
        return error_set(e, "started as rank %d of %d (%s), but MASTER_ADDR, the machine of rank 0, is not set", r->rank, r->size,
                         r->source);
    r->port = usual_port();
    if (getenv("MASTER_PORT") && (!number("MASTER_PORT", 65535, &r->port) || r->port < 1))
        return error_set(e, "MASTER_PORT '%s' is no port number", getenv("MASTER_PORT"));
    const char *taken = getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (taken && !strcmp(taken, "True")) r->port++;
    return true;
}

bool rendezvous_find(Rendezvous *r, Error *e)
{
    e->text[0] = 0;
    memset(r, 0, sizeof *r);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const Names *n = &known[i];
        if (!number(n->size, 1 << 20, &r->size) || r->size < 2) continue;
        r->source = n->size;
        if (r->size > MAX_RANKS) return error_set(e, "%s is %d ranks; this program drives at most 8", n->size, r->size);
        if (!number(n->rank, r->size - 1, &r->rank))
            return error_set(e, "%s is %d, but %s is '%s' and not a rank from 0 to %d", n->size, r->size, n->rank,
                             getenv(n->rank) ? getenv(n->rank) : "(not set)", r->size - 1);
        r->local_rank = r->rank;
        r->local_size = 1;
        number(n->local, MAX_RANKS, &r->local_rank);
        number(n->local_size, r->size, &r->local_size);
        return find_address(r, e);
    }
    return false;
}

// ---- meeting -----------------------------------------------------------------------------------------------------------

static const char magic[8] = "GPTranks";
typedef struct {
    char magic[8];
    int32_t rank, size;
    uint64_t program, options;
} Hello;
typedef enum { WELCOME = 'w', REFUSED = 'r', TAKEN = 't' } Answer; // 't' begins the control channel's "taken"

static struct addrinfo *resolve(const Rendezvous *r)
{
    char port[16];
    struct addrinfo *found, hints = {.ai_socktype = SOCK_STREAM, .ai_family = AF_UNSPEC};
    snprintf(port, sizeof port, "%d", r->port);
    int failed = getaddrinfo(r->address, port, &hints, &found);
    if (failed) fatal(EXIT_BAD_INPUT, "cannot find the machine of rank 0, '%s': %s", r->address, gai_strerror(failed));
    return found;
}

static void tune(int fd) // small frames go at once; of an idle connection to a machine that is cut off the end shows after 7 s
{
    int on = 1, idle = 2, interval = 1, probes = 5;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

static bool read_within(int fd, void *buf, size_t bytes, double seconds)
{
    double end = seconds_now() + seconds;
    for (size_t done = 0; done < bytes;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        double left = end - seconds_now();
        if (left <= 0) return false;
        if (poll(&p, 1, (int)(1e3 * left) + 1) <= 0) continue;
        ssize_t n = recv(fd, (char *)buf + done, bytes - done, 0);
        if (n == 0 || (n < 0 && errno != EINTR)) return false;
        if (n > 0) done += (size_t)n;
    }
    return true;
}

static int open_listener(const Rendezvous *r)
{
    struct addrinfo *a = resolve(r);
    bool loopback = a->ai_family == AF_INET && ntohl(((struct sockaddr_in *)a->ai_addr)->sin_addr.s_addr) >> 24 == 127;
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons((uint16_t)r->port),
                              .sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY)};
    struct sockaddr_in6 any6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)r->port), .sin6_addr = in6addr_any};
    bool six = a->ai_family == AF_INET6;
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    freeaddrinfo(a);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    int failed = six ? bind(fd, (struct sockaddr *)&any6, sizeof any6) : bind(fd, (struct sockaddr *)&any, sizeof any);
    if (!failed) failed = listen(fd, MAX_RANKS);
    if (failed && errno == EADDRINUSE)
        fatal(EXIT_BAD_INPUT, "port %d is taken, most likely by another run on this machine: give each its own MASTER_PORT",
              r->port);
    if (failed) fatal(EXIT_BAD_INPUT, "cannot listen on port %d: %s", r->port, strerror(errno));
    return fd;
}

static void answer(int fd, Answer a)
{
    char byte = (char)a;
    send(fd, &byte, 1, MSG_NOSIGNAL); // to one that is gone: the watch finds that
}

// Why this rank cannot join; NULL: it can.
static const char *objection(const Control *c, const Hello *mine, const Hello *x)
{
    if (x->program != mine->program) return "is another program, or another build of this one";
    if (x->size != mine->size) return "was started with another number of ranks: two runs on one port?";
    if (x->options != mine->options) return "was started with other options: two runs on one port?";
    if (x->rank < 1 || x->rank >= mine->size || c->fd[x->rank] >= 0) return "has joined before: two runs on one port?";
    return NULL;
}

// To those that have joined, and to those that come within five seconds, so that none waits for a rank 0 that has ended.
static void refuse_all(Control *c)
{
    Hello x;
    double end = seconds_now() + 5;
    int left = c->size - 2;
    for (int r = 1; r < c->size; r++)
        if (c->fd[r] >= 0) answer(c->fd[r], REFUSED), left--;
    while (left > 0 && seconds_now() < end) {
        struct pollfd p = {.fd = c->listener, .events = POLLIN};
        if (poll(&p, 1, 100) <= 0) continue;
        int fd = accept(c->listener, NULL, NULL);
        if (fd < 0) continue;
        if (read_within(fd, &x, sizeof x, 1)) answer(fd, REFUSED), left--;
        close(fd);
    }
}

static void accept_rank(Control *c, const Hello *mine, int port)
{
    Hello x;
    int fd = accept4(c->listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) return;
    if (!read_within(fd, &x, sizeof x, 5) || memcmp(x.magic, magic, sizeof magic)) {
        close(fd); // not one of ours
        return;
    }
    const char *why = objection(c, mine, &x);
    if (why) {
        answer(fd, REFUSED);
        refuse_all(c);
        fatal(EXIT_BAD_INPUT, "who comes to port %d as rank %d %s", port, x.rank, why);
    }
    tune(fd);
    c->fd[x.rank] = fd;
}

static void gather_ranks(const Rendezvous *r, const Hello *mine, double timeout, Control *c)
{
    double end = seconds_now() + timeout;
    c->listener = open_listener(r);
    for (int joined = 1; joined < r->size;) {
        struct pollfd p = {.fd = c->listener, .events = POLLIN};
        double left = end - seconds_now();
        if (left <= 0) {
            int missing = 1;
            while (c->fd[missing] >= 0) missing++;
            fatal(EXIT_BAD_INPUT, "rank %d has not come to port %d within %.0f s (--timeout)", missing, r->port, timeout);
        }
        if (poll(&p, 1, (int)(1e3 * left) + 1) > 0) accept_rank(c, mine, r->port);
        joined = 1;
        for (int i = 1; i < r->size; i++) joined += c->fd[i] >= 0;
    }
    for (int i = 1; i < r->size; i++) answer(c->fd[i], WELCOME);
}

// A machine that is silent, and does not even refuse, would keep connect waiting for two minutes.
static bool connect_within(int fd, const struct addrinfo *a, double seconds)
{
    int failed = 0;
    socklen_t size = sizeof failed;
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    int flags = fcntl(fd, F_GETFL);
    fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    if (connect(fd, a->ai_addr, a->ai_addrlen)) {
        if (errno != EINPROGRESS || poll(&p, 1, (int)(1e3 * fmax(0, seconds)) + 1) <= 0) return false;
        if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &size) || failed) return false;
    }
    return fcntl(fd, F_SETFL, flags) == 0;
}

static int try_connect(const Rendezvous *r, double end)
{
    int fd = -1;
    struct addrinfo *all = resolve(r);
    for (struct addrinfo *a = all; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (!connect_within(fd, a, end - seconds_now())) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(all);
    return fd;
}

static void join_rank_0(const Rendezvous *r, const Hello *mine, double timeout, Control *c)
{
    struct timespec wait = {.tv_nsec = 100000000};
    double end = seconds_now() + timeout;
    char verdict = 0;
    int fd;
    while ((fd = try_connect(r, end)) < 0) {
        if (seconds_now() > end)
            fatal(EXIT_BAD_INPUT, "rank 0 does not answer at %s port %d within %.0f s (--timeout)", r->address, r->port, timeout);
        nanosleep(&wait, NULL);
    }
    tune(fd);
    bool sent = send(fd, mine, sizeof *mine, MSG_NOSIGNAL) == (ssize_t)sizeof *mine;
    bool answered = sent && read_within(fd, &verdict, 1, timeout);
    if (answered && verdict == REFUSED) _exit(EXIT_BAD_INPUT); // rank 0 says why
    if (answered && verdict == TAKEN)
        fatal(EXIT_BAD_INPUT, "%s port %d belongs to another run, which is under way: give each its own MASTER_PORT", r->address,
              r->port);
    if (!answered || verdict != WELCOME)
        fatal(EXIT_BAD_INPUT, "no welcome from rank 0 at %s port %d: it has ended, or something else answers there", r->address,
              r->port);
    c->fd[0] = fd;
}

void rendezvous_meet(const Rendezvous *r, uint64_t program, uint64_t options, double timeout, Control *c)
{
    Hello mine = {.rank = r->rank, .size = r->size, .program = program, .options = options};
    memcpy(mine.magic, magic, sizeof magic);
    control_init(c, r->rank, r->size);
    if (r->rank) join_rank_0(r, &mine, timeout, c);
    else gather_ranks(r, &mine, timeout, c);
    control_speak_for_itself(c);
}
