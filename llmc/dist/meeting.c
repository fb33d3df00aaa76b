#include "llmc/dist/meeting.h"
#include "llmc/dist/secret.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

// ---- what is said -----------------------------------------------------------------------------------------

static const char magic[8] = "GPTrank2";
static const char role_0[] = "train_gpt rank 0", role_rank[] = "train_gpt rank";

typedef struct {
    char magic[8];
    uint8_t nonce[NONCE_BYTES];
} Hello;

typedef struct {
    char kind; // CHALLENGE
    uint8_t nonce[NONCE_BYTES], proof[PROOF_BYTES];
} Challenge;

typedef struct {
    int32_t rank, size;
    uint64_t program, options;
    uint8_t proof[PROOF_BYTES];
} Identity;

// The first byte of what rank 0 answers. TAKEN begins the control channel's "taken".
typedef enum { CHALLENGE = 'c', WELCOME = 'w', REFUSED = 'r', TAKEN = 't' } Answer;

// What the proofs are about. Ranks run one program on machines of one byte order, so structs go over the wire
// as they are.
typedef struct {
    uint8_t of_rank[NONCE_BYTES], of_rank_0[NONCE_BYTES];
    int32_t rank, size; // these four: proof of a rank only
    uint64_t program, options;
} Said;
enum { SAID_BY_RANK_0 = 2 * NONCE_BYTES };
static_assert(sizeof(Said) == 2 * NONCE_BYTES + 24 && sizeof(Identity) == 24 + PROOF_BYTES, "no padding");

static Said what_is_said(const uint8_t *nonce_of_rank, const uint8_t *nonce_of_rank_0, const Identity *x)
{
    Said s = {.rank = x->rank, .size = x->size, .program = x->program, .options = x->options};
    memcpy(s.of_rank, nonce_of_rank, NONCE_BYTES);
    memcpy(s.of_rank_0, nonce_of_rank_0, NONCE_BYTES);
    return s;
}

// ---- addresses --------------------------------------------------------------------------------------------

typedef union {
    struct sockaddr any;
    struct sockaddr_in four;
    struct sockaddr_in6 six;
    struct sockaddr_un local;
    struct sockaddr_storage storage;
} Address;

// The name of the socket that ranks of one user and one machine share. It is in no file system: it ends with
// the run.
static socklen_t local_address(const Rendezvous *r, Address *a)
{
    memset(a, 0, sizeof *a);
    a->local.sun_family = AF_UNIX;
    int n = snprintf(a->local.sun_path + 1, sizeof a->local.sun_path - 1, "train_gpt.%u.%d",
                     (unsigned)geteuid(), r->port);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static bool is_of_this_user(int fd)
{
    struct ucred other;
    socklen_t size = sizeof other;
    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &size) && other.uid == geteuid();
}

static struct addrinfo *resolve(const Rendezvous *r)
{
    char port[16];
    struct addrinfo *found, hints = {.ai_socktype = SOCK_STREAM, .ai_family = AF_UNSPEC};
    snprintf(port, sizeof port, "%d", r->port);
    int failed = getaddrinfo(r->address, port, &hints, &found);
    if (failed)
        fatal(EXIT_BAD_INPUT, "cannot find the machine of rank 0, '%s': %s", r->address,
              gai_strerror(failed));
    return found;
}

static bool is_loopback(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a)->sin6_addr);
    return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
}

// Only an own address can be bound to.
static bool is_of_this_machine(const struct addrinfo *a)
{
    Address copy = {0};
    memcpy(&copy, a->ai_addr, a->ai_addrlen);
    copy.four.sin_port = 0; // at the same place in both kinds
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool own = fd >= 0 && !bind(fd, &copy.any, a->ai_addrlen);
    if (fd >= 0)
        close(fd);
    return own;
}

static bool is_here(const Rendezvous *r)
{
    bool here = false;
    struct addrinfo *all = resolve(r);
    for (const struct addrinfo *a = all; a && !here; a = a->ai_next)
        here = is_of_this_machine(a);
    freeaddrinfo(all);
    return here;
}

static bool means_loopback(const char *name)
{
    Address a;
    bool numeric = inet_pton(AF_INET, name, &a) == 1 || inet_pton(AF_INET6, name, &a) == 1;
    return numeric || !strcmp(name, "localhost");
}

// Where rank 0 listens: the first address of MASTER_ADDR that is this machine's, and rather one that others
// reach. Many systems give their own name a loopback address in /etc/hosts: others then see another address,
// and which one is not known here.
static socklen_t listening_address(const Rendezvous *r, Address *out)
{
    struct addrinfo *all = resolve(r), *found = NULL;
    for (struct addrinfo *a = all; a; a = a->ai_next) {
        if (!is_of_this_machine(a))
            continue;
        if (!found || (is_loopback(found->ai_addr) && !is_loopback(a->ai_addr)))
            found = a;
    }
    if (!found)
        fatal(EXIT_USAGE, "MASTER_ADDR '%s' is no address of this machine, where rank 0 runs", r->address);
    socklen_t length = found->ai_addrlen;
    memset(out, 0, sizeof *out);
    memcpy(out, found->ai_addr, length);
    if (is_loopback(found->ai_addr) && !means_loopback(r->address)) {
        note("'%s' has a loopback address on this machine: rank 0 listens on all its interfaces; MASTER_ADDR "
             "with an address "
             "keeps it to one",
             r->address);
        if (found->ai_family == AF_INET6)
            out->six.sin6_addr = in6addr_any;
        else
            out->four.sin_addr.s_addr = htonl(INADDR_ANY);
    }
    freeaddrinfo(all);
    return length;
}

// Small frames go at once; of an idle connection to a machine that is cut off the end shows after 7 s.
static void tune(int fd)
{
    int on = 1, idle = 2, interval = 1, probes = 5;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

static void set_blocking(int fd, bool on)
{
    int flags = fcntl(fd, F_GETFL);
    fcntl(fd, F_SETFL, on ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

// ---- rank 0 -----------------------------------------------------------------------------------------------

// A connection that has not yet proved anything.
typedef struct {
    int fd;
    double since;
    bool challenged;
    Hello hello;
    uint8_t nonce[NONCE_BYTES];      // rank 0's
    uint8_t bytes[sizeof(Identity)]; // of the message that is coming in
    size_t got;
} Caller;

enum { MAX_CALLERS = 64, CALLER_SECONDS = 5, REFUSAL_SECONDS = 2 };
static_assert(sizeof(Hello) <= sizeof(Identity), "Caller.bytes holds either message");

typedef struct {
    const Rendezvous *r;
    Identity mine;
    Control *c;
    Caller caller[MAX_CALLERS];
    int callers, strangers, refused[MAX_RANKS], num_refused;
    char stranger[128];  // who the last one was and what was wrong
    char objection[256]; // why the meeting fails; empty: it does not
} Meeting;

static void describe_peer(int fd, char *out, size_t capacity)
{
    Address a = {0};
    socklen_t size = sizeof a;
    if (getpeername(fd, &a.any, &size) || a.any.sa_family == AF_UNIX ||
        getnameinfo(&a.any, size, out, (socklen_t)capacity, NULL, 0, NI_NUMERICHOST))
        snprintf(out, capacity, "this machine");
}

static void forget(Meeting *m, Caller *x) { *x = m->caller[--m->callers]; }

static void drop(Meeting *m, Caller *x, const char *why)
{
    char peer[80];
    describe_peer(x->fd, peer, sizeof peer);
    snprintf(m->stranger, sizeof m->stranger, "%s, which %s", peer, why);
    m->strangers++;
    close(x->fd);
    forget(m, x);
}

static void take_caller(Meeting *m)
{
    int fd = accept4(m->c->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    if (m->callers == MAX_CALLERS) {
        Caller *oldest = m->caller;
        for (int i = 1; i < MAX_CALLERS; i++)
            if (m->caller[i].since < oldest->since)
                oldest = &m->caller[i];
        drop(m, oldest, "was silent while many called");
    }
    Caller *x = &m->caller[m->callers++];
    *x = (Caller){.fd = fd, .since = seconds_now()};
    if (!secret_known() && !is_of_this_user(fd))
        drop(m, x, "belongs to another user");
}

static bool send_challenge(Caller *x, const Meeting *m)
{
    Challenge answer = {.kind = CHALLENGE};
    memcpy(&x->hello, x->bytes, sizeof x->hello);
    secret_nonce(x->nonce);
    memcpy(answer.nonce, x->nonce, NONCE_BYTES);
    Said said = what_is_said(x->hello.nonce, x->nonce, &m->mine);
    secret_prove(answer.proof, role_0, &said, SAID_BY_RANK_0);
    x->challenged = true;
    x->got = 0;
    return send(x->fd, &answer, sizeof answer, MSG_NOSIGNAL) == (ssize_t)sizeof answer;
}

// Why this rank, which is one of ours, cannot join; NULL: it can.
static const char *objection(const Meeting *m, const Identity *x)
{
    if (x->program != m->mine.program)
        return "runs another program, or another build of this one";
    if (x->size != m->mine.size)
        return "was started with another number of ranks: two runs on one port?";
    if (x->options != m->mine.options)
        return "was started with other options than rank 0, or two runs share a port";
    if (x->rank < 1 || x->rank >= m->mine.size || m->c->fd[x->rank] >= 0)
        return "has joined before: two runs on one port?";
    return NULL;
}

static void admit(Meeting *m, Caller *x)
{
    Identity it;
    memcpy(&it, x->bytes, sizeof it);
    Said said = what_is_said(x->hello.nonce, x->nonce, &it);
    if (!secret_is_proved(it.proof, role_rank, &said, sizeof said)) {
        drop(m, x, "does not know TRAIN_GPT_SECRET");
        return;
    }
    const char *why = objection(m, &it);
    set_blocking(x->fd, true);
    if (!why) {
        tune(x->fd);
        m->c->fd[it.rank] = x->fd;
    } else {
        if (!*m->objection)
            snprintf(m->objection, sizeof m->objection, "rank %d %s (port %d)", it.rank, why, m->r->port);
        if (m->num_refused < MAX_RANKS)
            m->refused[m->num_refused++] = x->fd;
        else
            close(x->fd);
    }
    forget(m, x);
}

// Reads what is there, and no more than the message that is due.
static void hear(Meeting *m, Caller *x)
{
    size_t due = x->challenged ? sizeof(Identity) : sizeof(Hello);
    ssize_t n = recv(x->fd, x->bytes + x->got, due - x->got, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (n <= 0) {
        drop(m, x,
             x->challenged ? "ended the connection when it was to prove itself" : "ended the connection");
        return;
    }
    x->got += (size_t)n;
    bool wrong = !x->challenged && memcmp(x->bytes, magic, x->got < sizeof magic ? x->got : sizeof magic);
    if (wrong)
        drop(m, x, "said what no rank says");
    else if (x->got < due)
        return;
    else if (x->challenged)
        admit(m, x);
    else if (!send_challenge(x, m))
        drop(m, x, "ended the connection");
}

static void hear_all(Meeting *m, double seconds)
{
    struct pollfd p[MAX_CALLERS + 1] = {{.fd = m->c->listener, .events = POLLIN}};
    int callers = m->callers;
    for (int i = 0; i < callers; i++)
        p[i + 1] = (struct pollfd){.fd = m->caller[i].fd, .events = POLLIN};
    if (poll(p, (nfds_t)callers + 1, (int)(1e3 * seconds) + 1) < 0)
        return;
    for (int i = callers - 1; i >= 0; i--) // from behind: who is forgotten is replaced by the last
        if (p[i + 1].revents)
            hear(m, &m->caller[i]);
    for (int i = m->callers - 1; i >= 0; i--)
        if (seconds_now() - m->caller[i].since > CALLER_SECONDS)
            drop(m, &m->caller[i], "was silent");
    if (p[0].revents)
        take_caller(m);
}

static int open_listener(const Rendezvous *r)
{
    Address a;
    socklen_t length = secret_known() ? listening_address(r, &a) : local_address(r, &a);
    int fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    int failed = bind(fd, &a.any, length) || listen(fd, MAX_CALLERS);
    if (failed && errno == EADDRINUSE)
        fatal(EXIT_BAD_INPUT,
              "port %d is taken, most likely by another run on this machine: give each its own MASTER_PORT",
              r->port);
    if (failed)
        fatal(EXIT_BAD_INPUT, "cannot listen on %s port %d: %s", r->address, r->port, strerror(errno));
    return fd;
}

static int missing_rank(const Control *c) // 0: none
{
    for (int r = 1; r < c->size; r++)
        if (c->fd[r] < 0)
            return r;
    return 0;
}

static void fail_late(const Meeting *m, double timeout)
{
    char strangers[200] = "";
    if (m->strangers)
        snprintf(strangers, sizeof strangers, "; %d others were turned away, last %s", m->strangers,
                 m->stranger);
    fatal(EXIT_BAD_INPUT, "rank %d has not come to port %d within %.0f s (--timeout)%s%s", missing_rank(m->c),
          m->r->port, timeout, strangers,
          secret_known() ? "" : "; from other machines they come with TRAIN_GPT_SECRET only");
}

// To all that have come, and to those that come within a moment, so that none waits for a rank 0 that has
// ended.
static void refuse_all(Meeting *m)
{
    char verdict = REFUSED;
    double end = seconds_now() + REFUSAL_SECONDS;
    for (int there = 0; there < m->c->size - 1 && seconds_now() < end;) {
        there = m->num_refused;
        for (int r = 1; r < m->c->size; r++)
            there += m->c->fd[r] >= 0;
        if (there < m->c->size - 1)
            hear_all(m, 0.1);
    }
    for (int i = 0; i < m->num_refused; i++)
        send(m->refused[i], &verdict, 1, MSG_NOSIGNAL);
    for (int r = 1; r < m->c->size; r++)
        if (m->c->fd[r] >= 0)
            send(m->c->fd[r], &verdict, 1, MSG_NOSIGNAL);
    fatal(EXIT_BAD_INPUT, "%s", m->objection);
}

static void gather_ranks(const Rendezvous *r, const Identity *mine, double timeout, Control *c)
{
    static Meeting m;
    char verdict = WELCOME;
    double end = seconds_now() + timeout;
    m = (Meeting){.r = r, .mine = *mine, .c = c};
    c->listener = open_listener(r);
    while (missing_rank(c)) {
        if (*m.objection)
            refuse_all(&m);
        double left = end - seconds_now();
        if (left <= 0)
            fail_late(&m, timeout);
        hear_all(&m, fmin(left, 1));
    }
    while (m.callers)
        drop(&m, m.caller, "came when all were there");
    if (m.strangers)
        note("%d connections that were no ranks of this run were dropped, last %s", m.strangers, m.stranger);
    for (int i = 1; i < r->size; i++)
        send(c->fd[i], &verdict, 1, MSG_NOSIGNAL); // to one that is gone: the watch finds that
}

// ---- the other ranks --------------------------------------------------------------------------------------

static bool read_within(int fd, void *buf, size_t bytes, double seconds)
{
    double end = seconds_now() + seconds;
    for (size_t done = 0; done < bytes;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        double left = end - seconds_now();
        if (left <= 0)
            return false;
        if (poll(&p, 1, (int)(1e3 * left) + 1) <= 0)
            continue;
        ssize_t n = recv(fd, (char *)buf + done, bytes - done, 0);
        if (n == 0 || (n < 0 && errno != EINTR))
            return false;
        if (n > 0)
            done += (size_t)n;
    }
    return true;
}

// A machine that is silent, and does not even refuse, would keep connect waiting for two minutes. -1: no
// connection.
static int connect_within(const struct sockaddr *a, socklen_t length, double seconds)
{
    int failed = 0, fd = socket(a->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t size = sizeof failed;
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    if (fd < 0)
        return -1;
    if (connect(fd, a, length)) {
        failed = errno;
        bool decided = failed == EINPROGRESS && poll(&p, 1, (int)(1e3 * fmax(0, seconds)) + 1) > 0;
        if (decided && getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &size))
            failed = errno;
    }
    if (!failed) {
        set_blocking(fd, true);
        return fd;
    }
    close(fd);
    return -1;
}

static int try_connect(const Rendezvous *r, double end)
{
    int fd = -1;
    if (!secret_known()) {
        Address a;
        socklen_t length = local_address(r, &a);
        return connect_within(&a.any, length, end - seconds_now());
    }
    struct addrinfo *all = resolve(r);
    for (struct addrinfo *a = all; a && fd < 0; a = a->ai_next)
        fd = connect_within(a->ai_addr, a->ai_addrlen, end - seconds_now());
    freeaddrinfo(all);
    return fd;
}

// Hello, and the proof of who answers. False: the connection ended before that.
static bool hear_challenge(const Rendezvous *r, int fd, const Identity *mine, Said *said, double seconds)
{
    Hello hello;
    Challenge answer;
    memcpy(hello.magic, magic, sizeof magic);
    secret_nonce(hello.nonce);
    if (send(fd, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello)
        return false;
    if (!read_within(fd, &answer.kind, 1, seconds))
        return false;
    if (answer.kind == TAKEN)
        fatal(EXIT_BAD_INPUT,
              "%s port %d belongs to another run, which is under way: give each its own MASTER_PORT",
              r->address, r->port);
    if (answer.kind != CHALLENGE)
        fatal(EXIT_BAD_INPUT,
              "something else than rank 0 answers at %s port %d: give the run a MASTER_PORT that is free",
              r->address, r->port);
    if (!read_within(fd, (char *)&answer + 1, sizeof answer - 1, seconds))
        return false;
    *said = what_is_said(hello.nonce, answer.nonce, mine);
    if (!secret_is_proved(answer.proof, role_0, said, SAID_BY_RANK_0) ||
        (!secret_known() && !is_of_this_user(fd)))
        fatal(EXIT_BAD_INPUT, "who answers at %s port %d is not rank 0 of this run: it %s", r->address,
              r->port,
              secret_known() ? "does not know this rank's TRAIN_GPT_SECRET" : "belongs to another user");
    return true;
}

// Connects and introduces this rank. -1: not yet.
static int introduce(const Rendezvous *r, const Identity *mine, double end)
{
    Said said;
    int fd = try_connect(r, end);
    if (fd < 0)
        return -1;
    tune(fd);
    if (hear_challenge(r, fd, mine, &said, fmax(1, end - seconds_now()))) {
        Identity it = *mine;
        secret_prove(it.proof, role_rank, &said, sizeof said);
        if (send(fd, &it, sizeof it, MSG_NOSIGNAL) == (ssize_t)sizeof it)
            return fd;
    }
    close(fd);
    return -1;
}

// A connection that ends early is tried anew: rank 0 drops the oldest when strangers call in great number.
static void join_rank_0(const Rendezvous *r, const Identity *mine, double timeout, Control *c)
{
    struct timespec wait = {.tv_nsec = 100000000};
    double end = seconds_now() + timeout;
    char verdict = 0;
    for (bool met = false; !verdict;) {
        int fd = introduce(r, mine, end);
        if (fd >= 0) {
            met = true;
            c->fd[0] = fd;
            if (read_within(fd, &verdict, 1, timeout))
                break;
            close(fd);
        } else if (met) {
            fatal(EXIT_BAD_INPUT, "no welcome from rank 0 at %s port %d: it has ended", r->address, r->port);
        }
        if (seconds_now() > end)
            fatal(EXIT_BAD_INPUT,
                  "rank 0 does not answer at %s port %d within %.0f s (--timeout); has it the same "
                  "TRAIN_GPT_SECRET as this rank%s?",
                  r->address, r->port, timeout, secret_known() ? "" : ", which has none");
        nanosleep(&wait, NULL);
    }
    if (verdict == REFUSED)
        _exit(EXIT_BAD_INPUT); // rank 0 says why
    if (verdict != WELCOME)
        fatal(EXIT_BAD_INPUT, "rank 0 at %s port %d says neither welcome nor no", r->address, r->port);
}

// ---- all of them ------------------------------------------------------------------------------------------

// Without a secret all ranks must be here.
static void check_machines(const Rendezvous *r)
{
    static const char cure[] =
        "set TRAIN_GPT_SECRET to the same random text for all ranks (openssl rand -hex 32)";
    if (secret_known())
        return;
    if (r->local_size && r->local_size < r->size)
        fatal(EXIT_USAGE, "%d of %d ranks are on this machine: ranks on several machines need a secret; %s",
              r->local_size, r->size, cure);
    if (!is_here(r))
        fatal(EXIT_USAGE, "MASTER_ADDR '%s' is another machine: ranks on several machines need a secret; %s",
              r->address, cure);
}

void meet_ranks(const Rendezvous *r, uint64_t program, uint64_t options, double timeout, Control *c)
{
    Identity mine = {.rank = r->rank, .size = r->size, .program = program, .options = options};
    Error e;
    if (!secret_take(&e))
        fatal(EXIT_USAGE, "%s", e.text);
    control_init(c, r->rank, r->size);
    check_machines(r);
    if (r->rank)
        join_rank_0(r, &mine, timeout, c);
    else
        gather_ranks(r, &mine, timeout, c);
    control_speak_for_itself(c);
}
