// Runs the grids of emulated kernels (language.h): CTA by CTA, its threads as fibers, each until it waits for
// others. A fault ends the program with status 99 and a line: the launch's name of the kernel, CTA, thread.
//
// EMULATE_ORDER=backward: the last thread first. What differs then is a race.
#include "dev/test/emulate/language.h"
#include "dev/test/no_gpu/no_gpu.h"
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

dim3 blockDim, gridDim;

namespace emulate
{

enum { MAX_THREADS = 1024, STACK = 256 << 10, WARP_LANES = 32, SHARED = 228 << 10, SHARED_ALIGNMENT = 128 };

Thread *current;

// ---- state -----------------------------------------------------------------------------------------------

struct Copy {
    void *to;
    const void *from;
    int bytes, of;
};

struct Fiber {
    Thread thread;
    jmp_buf at;
    ucontext_t first;
    bool begun, ended;
    std::vector<std::vector<Copy>> groups; // committed, oldest first
    std::vector<Copy> open;
};

// Lanes that wait for each other.
struct Exchange {
    uint32_t mask, arrived; // mask 0: not in use
    Combine combine;
    void *lane[WARP_LANES];
};

static Fiber fibers[MAX_THREADS];
static Exchange exchanges[MAX_THREADS / WARP_LANES][WARP_LANES];
static std::deque<int> ready;
static int threads, running, at_barrier;
static jmp_buf scheduler;
static const std::function<void()> *body;
static const char *kernel = "no kernel";
static char *shared_end, *shared; // of the CTA's dynamic shared memory; nothing behind it can be accessed

void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "emulate: %s, CTA %u %u %u, thread %d: ", kernel, current ? current->cta.x : 0,
            current ? current->cta.y : 0, current ? current->cta.z : 0, current ? current->number : -1);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    _exit(REFUSED);
}

static void on_segv(int, siginfo_t *info, void *)
{
    fail("an access to %p, outside of every array", info->si_addr);
}

static void catch_wrong_accesses()
{
    static char stack[64 << 10];
    stack_t other = {};
    other.ss_sp = stack;
    other.ss_size = sizeof stack;
    sigaltstack(&other, NULL);
    struct sigaction action = {};
    action.sa_sigaction = on_segv;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, NULL);
}

// Memory between pages that cannot be accessed. bytes: of whole pages
static char *fenced_memory(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *p =
        (char *)mmap(NULL, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p + page, bytes, PROT_READ | PROT_WRITE))
        fail("no memory for %zu bytes", bytes);
    return p + page;
}

// ---- fibers ----------------------------------------------------------------------------------------------

static const bool backward = getenv("EMULATE_ORDER") && !strcmp(getenv("EMULATE_ORDER"), "backward");

static Fiber *own() { return &fibers[current->number]; }

static int next_ready()
{
    int next = backward ? ready.back() : ready.front();
    backward ? ready.pop_back() : ready.pop_front();
    return next;
}

// Goes on with another thread that is ready, or else back to run_cta.
static void wait_for_turn()
{
    if (_setjmp(own()->at))
        return;
    Fiber *next = ready.empty() ? NULL : &fibers[backward ? ready.back() : ready.front()];
    if (!next || !next->begun)
        _longjmp(scheduler, 1);
    current = &fibers[next_ready()].thread;
    _longjmp(next->at, 1);
}

static void free_barrier()
{
    if (!at_barrier || at_barrier < running)
        return;
    for (int i = 0; i < threads; i++)
        if (!fibers[i].ended)
            ready.push_back(i);
    at_barrier = 0;
}

static void run_thread()
{
    for (;;) {
        (*body)();
        wait_all_copies();
        own()->ended = true;
        running--;
        free_barrier();
        wait_for_turn();
    }
}

static void resume(int number)
{
    Fiber *f = &fibers[number];
    current = &f->thread;
    if (_setjmp(scheduler))
        return;
    if (f->begun)
        _longjmp(f->at, 1);
    f->begun = true;
    getcontext(&f->first);
    f->first.uc_stack.ss_sp = fenced_memory(STACK);
    f->first.uc_stack.ss_size = STACK;
    makecontext(&f->first, run_thread, 0);
    setcontext(&f->first);
}

static void run_cta()
{
    running = threads;
    at_barrier = 0;
    for (int i = 0; i < threads; i++)
        ready.push_back(i);
    while (!ready.empty())
        resume(next_ready());
    if (running)
        fail("%d of %d threads wait for others that have ended or wait elsewhere", running, threads);
}

void run_grid(const char *name, dim3 grid, dim3 cta, size_t bytes, const std::function<void()> &thread)
{
    if (!shared_end) {
        catch_wrong_accesses();
        shared_end = fenced_memory(SHARED) + SHARED;
    }
    threads = (int)(cta.x * cta.y * cta.z);
    kernel = name;
    body = &thread;
    blockDim = cta;
    gridDim = grid;
    if (threads < 1 || threads > MAX_THREADS || bytes > SHARED - 1024 || !grid.x || !grid.y || !grid.z)
        fail("a launch of %u x %u x %u CTAs of %d threads, %zu bytes", grid.x, grid.y, grid.z, threads,
             bytes);
    shared = shared_end - (bytes + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT;
    for (unsigned i = 0; i < grid.x * grid.y * grid.z; i++) {
        memset(shared, 0xff, bytes); // NaN in every type
        for (int t = 0; t < threads; t++) {
            Fiber *f = &fibers[t];
            unsigned n = (unsigned)t;
            f->thread.number = t;
            f->thread.index = {n % cta.x, n / cta.x % cta.y, n / cta.x / cta.y};
            f->thread.cta = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
            f->ended = false;
        }
        run_cta();
    }
    kernel = "no kernel";
    current = NULL;
}

void *dynamic_shared() { return shared; }

// ---- waiting ---------------------------------------------------------------------------------------------

void cta_barrier()
{
    at_barrier++;
    free_barrier();
    wait_for_turn();
}

void warp_exchange(uint32_t mask, void *mine, Combine combine)
{
    int warp = current->number / WARP_LANES, lane = current->number % WARP_LANES;
    Exchange *x = exchanges[warp], *unused = NULL;
    for (int i = 0; x->mask != mask && i < WARP_LANES; i++, x++)
        if (!x->mask && !unused)
            unused = x;
    if (x == exchanges[warp] + WARP_LANES) {
        x = unused;
        *x = {mask, 0, combine, {}};
    }
    if (!(mask >> lane & 1) || x->arrived >> lane & 1)
        fail("lane %d in an exchange of %08x", lane, mask);
    if (x->combine != combine)
        fail("lanes of %08x meet in different instructions", mask);
    x->lane[lane] = mine;
    x->arrived |= 1u << lane;
    if (x->arrived != mask) {
        wait_for_turn();
        return;
    }
    x->mask = 0;
    combine(x->lane, mask);
    for (int l = 0; l < WARP_LANES; l++)
        if ((mask >> l & 1) && l != lane)
            ready.push_back(warp * WARP_LANES + l);
}

// ---- copies ----------------------------------------------------------------------------------------------

void queue_copy(void *to, const void *from, int bytes, int of)
{
    if ((uintptr_t)to % (unsigned)of || (uintptr_t)from % (unsigned)of)
        fail("a copy of %d bytes from %p to %p: not aligned", of, from, to);
    if (bytes)
        need_device("cp.async", from, (size_t)bytes);
    own()->open.push_back({to, from, bytes, of});
}

static void do_copies(const std::vector<Copy> &group)
{
    for (const Copy &c : group) {
        memcpy(c.to, c.from, (size_t)c.bytes);
        memset((char *)c.to + c.bytes, 0, (size_t)(c.of - c.bytes));
    }
}

void commit_copies()
{
    own()->groups.push_back(own()->open);
    own()->open.clear();
}

void wait_copies(int pending)
{
    Fiber *f = own();
    while ((int)f->groups.size() > pending) {
        do_copies(f->groups.front());
        f->groups.erase(f->groups.begin());
    }
}

void wait_all_copies()
{
    commit_copies();
    wait_copies(0);
}

// A graph under capture keeps the function, which is never deleted.
static void run_work(const void *argument) { (**(std::function<void()> *const *)argument)(); }

void enqueue(cudaStream_t s, std::function<void()> work)
{
    if (!s || !s->capture) {
        work();
        return;
    }
    auto *kept = new std::function<void()>(std::move(work));
    stream_work(s, run_work, &kept, sizeof kept);
}

} // namespace emulate

// ---- the runtime's calls for kernels ---------------------------------------------------------------------

extern "C" cudaError_t cudaFuncSetAttribute(const void *, enum cudaFuncAttribute attribute, int value)
{
    bool too_much = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > no_gpu()->shared;
    return too_much ? cudaErrorInvalidValue : cudaSuccess;
}

extern "C" cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *)
{
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = emulate::MAX_THREADS;
    a->binaryVersion = a->ptxVersion = 10 * no_gpu()->major + no_gpu()->minor;
    return cudaSuccess;
}

// ---- what the kernels for Hopper alone ask for -----------------------------------------------------------

extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **)
{
    refuse("a launch with clusters is not emulated");
}

extern "C" cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *, const cudaLaunchConfig_t *)
{
    *clusters = 0;
    return cudaSuccess;
}

#if CUDART_VERSION >= 12050
extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **, unsigned,
                                                        unsigned long long,
                                                        enum cudaDriverEntryPointQueryResult *)
#else
extern "C" cudaError_t cudaGetDriverEntryPoint(const char *name, void **, unsigned long long,
                                               enum cudaDriverEntryPointQueryResult *)
#endif
{
    refuse("%s is not emulated", name);
}
