// Ranks meet while strangers call: whoever does not know the secret is dropped and counted, ends no run and
// delays none, whether silent, talkative, imitating a rank or posing as rank 0. Without a secret no port is
// open and other users are turned away.
#include "dev/test/child.h"
#include "dev/test/tap.h"
#include "llmc/dist/meeting.h"
#include "llmc/dist/secret.h"
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

static const char the_secret[] = "0123456789abcdef of this test",
                  another_secret[] = "0123456789abcdef of another";
enum { HELLO = 40, CHALLENGE = 65, IDENTITY = 56, NONCE = 32, TIMEOUT = 20 };

// ---- ranks ------------------------------------------------------------------------------------------------

typedef struct {
    int rank, port;
    const char *secret, *address;
    double timeout;
} Rank;

static void be_rank(void *argument)
{
    const Rank *x = argument;
    static Control c;
    char text[16];
    Rendezvous r;
    Error e;
    snprintf(text, sizeof text, "%d", x->rank);
    setenv("RANK", text, 1);
    snprintf(text, sizeof text, "%d", x->port);
    setenv("MASTER_PORT", text, 1);
    setenv("WORLD_SIZE", "2", 1);
    setenv("MASTER_ADDR", x->address ? x->address : "127.0.0.1", 1);
    if (x->secret)
        setenv("TRAIN_GPT_SECRET", x->secret, 1);
    else
        unsetenv("TRAIN_GPT_SECRET");
    if (!rendezvous_find(&r, &e))
        fatal(EXIT_USAGE, "%s", e.text);
    meet_ranks(&r, 1, 2, x->timeout, &c);
    if (getenv("TRAIN_GPT_SECRET"))
        fatal(EXIT_BAD_INPUT, "the secret is still in the environment");
    if (control_sum(&c, r.rank + 1) != 3)
        fatal(EXIT_BAD_INPUT, "a wrong sum");
    control_close(&c);
}

static Run start_rank(int rank, int port, const char *secret)
{
    return start(be_rank, &(Rank){.rank = rank, .port = port, .secret = secret, .timeout = TIMEOUT});
}

// ---- strangers --------------------------------------------------------------------------------------------

static struct sockaddr_in loopback(int port)
{
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)port),
                                .sin_addr = {htonl(INADDR_LOOPBACK)}};
}

static int try_call(int port)
{
    struct sockaddr_in a = loopback(port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!connect(fd, (struct sockaddr *)&a, sizeof a))
        return fd;
    close(fd);
    return -1;
}

static int call(int port) // as soon as rank 0 listens; -1: never
{
    for (double end = seconds_now() + 10; seconds_now() < end; wait_ms(5)) {
        int fd = try_call(port);
        if (fd >= 0)
            return fd;
    }
    return -1;
}

static void say(int fd, const void *what, size_t bytes) { send(fd, what, bytes, MSG_NOSIGNAL); }

static size_t listen_to(int fd, void *buf, size_t bytes) // at most two seconds
{
    size_t done = 0;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){.tv_sec = 2}, sizeof(struct timeval));
    for (ssize_t n; done < bytes && (n = recv(fd, (char *)buf + done, bytes - done, 0)) > 0;)
        done += (size_t)n;
    return done;
}

static void say_hello(int fd)
{
    char hello[HELLO] = "GPTrank2";
    secret_nonce((uint8_t *)hello + 8);
    say(fd, hello, sizeof hello);
}

typedef enum { SILENT, GARBAGE, OLD_HELLO, HALF_A_HELLO, GONE_AT_ONCE, GUESSES, REFLECTS, FLOOD, MUCH } Kind;
static const char *const kind_name[] =
    {"silent",       "talks HTTP",        "32 bytes of a hello of old",    "half a hello, then silent",
     "gone at once", "guesses the proof", "gives back rank 0's own proof", "200 at once",
     "a megabyte"};

// An identity whose fields are right but for the rank, so that only the proof can be wrong. proof: NULL: a
// random one.
static void say_who(int fd, const char *proof)
{
    struct {
        int32_t rank, size;
        uint64_t program, options;
        uint8_t proof[PROOF_BYTES];
    } it = {5, 2, 1, 2, {0}};
    static_assert(sizeof it == IDENTITY, "as meeting.c has it");
    secret_nonce(it.proof);
    if (proof)
        memcpy(it.proof, proof, PROOF_BYTES);
    say(fd, &it, sizeof it);
}

static int intrude(Kind kind, int port)
{
    static char much[1 << 20];
    char challenge[CHALLENGE] = "";
    int fd = call(port);
    if (kind == GARBAGE)
        say(fd, "GET / HTTP/1.1\r\n\r\n", 18);
    if (kind == OLD_HELLO)
        say(fd, "GPTranks\1\0\0\0\3\0\0\0and some fingerprints", 32);
    if (kind == HALF_A_HELLO)
        say(fd, "GPTrank2abc", 11);
    if (kind == MUCH)
        say(fd, much, sizeof much);
    if (kind == GUESSES || kind == REFLECTS) {
        say_hello(fd);
        bool answered = listen_to(fd, challenge, CHALLENGE) == CHALLENGE && challenge[0] == 'c';
        if (!answered)
            ok(false, "rank 0 answers a hello");
        say_who(fd, kind == REFLECTS ? challenge + 1 + NONCE : NULL);
    }
    for (int i = 0; kind == FLOOD && i < 200; i++)
        try_call(port); // and they stay
    if (kind == GONE_AT_ONCE)
        close(fd);
    return fd;
}

static void test_strangers(int port)
{
    for (int kind = SILENT; kind <= MUCH; kind++, port++) {
        Run zero = start_rank(0, port, the_secret);
        int fd = intrude((Kind)kind, port);
        wait_ms(20);
        double began = seconds_now();
        Run one = start_rank(1, port, the_secret);
        Result x1 = finish(&one, 30), x0 = finish(&zero, 30);
        bool counted = x0.lines == 1 && strstr(x0.text, " were dropped, last 127.0.0.1, which ");
        ok(!x0.status && !x1.status && counted && !x1.lines, "%s: %d and %d, %s", kind_name[kind], x0.status,
           x1.status, first_line(&x0));
        ok(!strstr(x0.text, "was silent\n"), "and the meeting has not waited for that, %.2f s",
           seconds_now() - began);
        close(fd);
    }
}

static void test_all_strangers(int port)
{
    Run zero = start_rank(0, port, the_secret);
    for (int kind = SILENT; kind <= MUCH; kind++)
        intrude((Kind)kind, port);
    Run one = start_rank(1, port, the_secret);
    Result x1 = finish(&one, 30), x0 = finish(&zero, 30);
    ok(!x0.status && !x1.status && x1.seconds < 3, "all of them: a meeting after %.2f s, %s", x1.seconds,
       first_line(&x0));
}

// They do not keep rank 0 from noticing that a rank is missing.
static void test_only_strangers(int port)
{
    Run zero = start(be_rank, &(Rank){.rank = 0, .port = port, .secret = the_secret, .timeout = 1});
    intrude(GUESSES, port);
    Result x = finish(&zero, 20);
    ok(x.status == 1 && x.lines == 1 && strstr(x.text, "rank 1 has not come") &&
           strstr(x.text, "does not know TRAIN_GPT_SECRET"),
       "strangers alone: %s", first_line(&x));
}

// ---- posing as rank 0 -------------------------------------------------------------------------------------

typedef enum { RANDOM_PROOF, NO_SUCH_ANSWER, WELCOMES, SAYS_NOTHING } Pose;
static const char *const pose_line[] = {"does not know this rank's TRAIN_GPT_SECRET",
                                        "something else than rank 0 answers",
                                        "something else than rank 0 answers", "rank 0 does not answer"};

static void test_pose(Pose pose, int port)
{
    struct sockaddr_in a = loopback(port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    char heard[HELLO + IDENTITY], challenge[CHALLENGE] = "c";
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 8))
        return (void)ok(false, "a port to listen on");
    double timeout = pose == SAYS_NOTHING ? 1 : TIMEOUT; // only this pose is found out by waiting
    Run one = start(be_rank, &(Rank){.rank = 1, .port = port, .secret = the_secret, .timeout = timeout});
    int rank = accept(fd, NULL, NULL);
    size_t got = listen_to(rank, heard, HELLO);
    secret_nonce((uint8_t *)challenge + 1);
    secret_nonce((uint8_t *)challenge + 1 + NONCE);
    if (pose == RANDOM_PROOF)
        say(rank, challenge, sizeof challenge);
    if (pose == NO_SUCH_ANSWER)
        say(rank, "HTTP/1.1 400 Bad Request\r\n", 26);
    if (pose == WELCOMES)
        say(rank, "w", 1);
    got += listen_to(rank, heard + HELLO, IDENTITY);
    Result x = finish(&one, 20);
    close(rank);
    close(fd);
    ok(x.status == 1 && x.lines == 1 && strstr(x.text, pose_line[pose]) && x.seconds < 6,
       "someone poses as rank 0: %s", first_line(&x));
    ok(got == HELLO, "and learns nothing: %zu bytes", got);
}

// ---- secrets ----------------------------------------------------------------------------------------------

static void refused(const char *what, Rank x, int status, const char *pattern)
{
    Run one = start(be_rank, &x);
    Result y = finish(&one, 20);
    ok(y.status == status && y.lines == 1 && strstr(y.text, pattern) && y.seconds < 5, "%s: %s", what,
       first_line(&y));
}

static void test_secrets(int port)
{
    Run zero = start(be_rank, &(Rank){.rank = 0, .port = port, .secret = the_secret, .timeout = 3});
    close(call(port));
    refused("a rank with another secret",
            (Rank){.rank = 1, .port = port, .secret = another_secret, .timeout = TIMEOUT}, 1,
            "does not know this rank's TRAIN_GPT_SECRET");
    refused("a rank without one", (Rank){.rank = 1, .port = port, .timeout = 0.5}, 1,
            "has it the same TRAIN_GPT_SECRET as this rank, which has none?");
    Result x = finish(&zero, 20);
    ok(x.status == 1 && x.lines == 1 && strstr(x.text, "rank 1 has not come"), "and their rank 0: %s",
       first_line(&x));
    refused("a short secret", (Rank){.rank = 1, .port = port, .secret = "0123456789", .timeout = TIMEOUT}, 2,
            "TRAIN_GPT_SECRET has 10 characters, at least 16 are needed");
}

static void test_without_library(int port)
{
    refused("a secret without libsodium",
            (Rank){.rank = 1, .port = port, .secret = the_secret, .timeout = TIMEOUT}, 2,
            "built without libsodium");
}

// ---- where rank 0 listens ---------------------------------------------------------------------------------

// The addresses on which some process listens at this port, as /proc writes them; "" for none.
static const char *listening(int port)
{
    static char found[256];
    const char *files[] = {"/proc/net/tcp", "/proc/net/tcp6"};
    char line[256], address[64];
    unsigned at, state;
    found[0] = 0;
    for (int i = 0; i < 2; i++) {
        FILE *f = fopen(files[i], "r");
        while (f && fgets(line, sizeof line, f))
            if (sscanf(line, "%*d: %63[0-9A-F]:%x %*[0-9A-F]:%*x %x", address, &at, &state) == 3 &&
                at == (unsigned)port && state == 10)
                snprintf(found + strlen(found), sizeof found - strlen(found), "%s ", address);
        if (f)
            fclose(f);
    }
    return found;
}

static int call_local(int port) // the socket of a run without a secret, as soon as it is there
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "train_gpt.%u.%d", (unsigned)geteuid(), port);
    for (double end = seconds_now() + 10; seconds_now() < end; wait_ms(5)) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (!connect(fd, (struct sockaddr *)&a,
                     (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)))
            return fd;
        close(fd);
    }
    return -1;
}

static void call_as_nobody(void *port)
{
    int wanted = *(int *)port;
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "train_gpt.0.%d", wanted);
    char answer;
    if (setuid(65534))
        _exit(2);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&a,
                (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)))
        _exit(3);
    say_hello(fd);
    _exit(listen_to(fd, &answer, 1) ? 4 : 0);
}

static void test_interfaces(int port)
{
    if (secret_supported()) {
        Run zero = start_rank(0, port, the_secret);
        close(call(port));
        ok(!strcmp(listening(port), "0100007F "),
           "with a secret rank 0 listens on MASTER_ADDR's interface alone: %s", listening(port));
        Run one = start_rank(1, port, the_secret);
        ok(!finish(&one, 20).status && !finish(&zero, 20).status, "and they meet");
    }
    Run zero = start_rank(0, ++port, NULL);
    int fd = call_local(port);
    ok(fd >= 0 && !*listening(port), "without one it listens on no interface: '%s'", listening(port));
    say(fd, "hello?", 6);
    if (geteuid() == 0) {
        Run nobody = start(call_as_nobody, &port);
        Result x = finish(&nobody, 20);
        ok(x.status == 0, "another user gets no answer: %d", x.status);
    } else {
        skip("no other user to be");
    }
    Run one = start_rank(1, port, NULL);
    Result x1 = finish(&one, 20), x0 = finish(&zero, 20);
    ok(!x1.status && !x0.status && strstr(x0.text, " were dropped"), "and they meet: %s", first_line(&x0));
    close(fd);

    const char *cure = "ranks on several machines need a secret; set TRAIN_GPT_SECRET";
    Rank far = {.rank = 1,
                .port = port,
                .address = "192.0.2.1",
                .timeout = TIMEOUT}; // an address of no machine
    refused("a rank 0 on another machine", far, 2, cure);
    far.rank = 0;
    refused("the same on rank 0", far, 2, cure);
    far.secret = the_secret;
    refused("rank 0 somewhere else", far, 2,
            secret_supported() ? "is no address of this machine" : "built without libsodium");
    setenv("LOCAL_WORLD_SIZE", "1", 1);
    refused("ranks on two machines", (Rank){.rank = 0, .port = port, .timeout = TIMEOUT}, 2, cure);
    unsetenv("LOCAL_WORLD_SIZE");
}

int main(void)
{
    int port = first_port();
    if (secret_supported()) {
        PART(test_strangers(port));
        PART(test_all_strangers(port + 20));
        PART(test_only_strangers(port + 21));
        for (int pose = RANDOM_PROOF; pose <= SAYS_NOTHING; pose++)
            PART(test_pose((Pose)pose, port + 22 + pose));
        PART(test_secrets(port + 30));
    } else {
        PART(test_without_library(port));
    }
    PART(test_interfaces(port + 31));
    return tap_done();
}
