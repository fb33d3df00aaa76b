// Tracing on the GPU: CUPTI's activity records give the time of every kernel, copy and fill, inside captured
// graphs too; ids that are pushed around an op tell which ones are its own. The library is opened only when
// somebody traces. Every op is an NVTX range as well, for tools that show time lines.
#include "llmc/ops/profile.h"
#include <cuda.h>
#include <dlfcn.h>
#include <nvtx3/nvToolsExt.h>
#include <stdlib.h>
#include <string.h>

#ifdef HAVE_CUPTI
#include <cupti.h>

// ---- the library ------------------------------------------------------------------------------------------

static struct {
    __typeof__(&cuptiActivityRegisterCallbacks) register_callbacks;
    __typeof__(&cuptiActivityEnable) enable;
    __typeof__(&cuptiActivityDisable) disable;
    __typeof__(&cuptiActivityFlushAll) flush;
    __typeof__(&cuptiActivityGetNextRecord) next_record;
    __typeof__(&cuptiActivityGetNumDroppedRecords) dropped;
    __typeof__(&cuptiActivityPushExternalCorrelationId) push;
    __typeof__(&cuptiActivityPopExternalCorrelationId) pop;
    __typeof__(&cuptiGetResultString) result_string;
} cupti;

// External ids come with the records of API calls only, and kernels carry the number of the call: hence the
// runtime's and the driver's calls (cuBLASLt and cuDNN launch by either).
static const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                           CUPTI_ACTIVITY_KIND_MEMCPY,
                                           CUPTI_ACTIVITY_KIND_MEMSET,
                                           CUPTI_ACTIVITY_KIND_RUNTIME,
                                           CUPTI_ACTIVITY_KIND_DRIVER,
                                           CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION};
enum { KINDS = sizeof kinds / sizeof *kinds, BUFFER_BYTES = 8 << 20 };

static bool find_functions(void *library, Error *e)
{
    const struct {
        void *address;
        const char *name;
    } functions[] = {{&cupti.register_callbacks, "cuptiActivityRegisterCallbacks"},
                     {&cupti.enable, "cuptiActivityEnable"},
                     {&cupti.disable, "cuptiActivityDisable"},
                     {&cupti.flush, "cuptiActivityFlushAll"},
                     {&cupti.next_record, "cuptiActivityGetNextRecord"},
                     {&cupti.dropped, "cuptiActivityGetNumDroppedRecords"},
                     {&cupti.push, "cuptiActivityPushExternalCorrelationId"},
                     {&cupti.pop, "cuptiActivityPopExternalCorrelationId"},
                     {&cupti.result_string, "cuptiGetResultString"}};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *f = dlsym(library, functions[i].name);
        if (!f)
            return error_set(e, "CUPTI lacks %s", functions[i].name);
        memcpy(functions[i].address, &f, sizeof f);
    }
    return true;
}

static const char *reason(CUptiResult result)
{
    const char *text = "unknown";
    cupti.result_string(result, &text);
    return text;
}

static void must(CUptiResult result, const char *what)
{
    if (result != CUPTI_SUCCESS)
        fatal(EXIT_BAD_INPUT, "CUPTI: %s: %s", what, reason(result));
}

// ---- records ----------------------------------------------------------------------------------------------

// A call's number, and the tag around it or when what it started ran (ns).
typedef struct {
    uint32_t call;
    int tag;
    uint64_t begin, end;
    bool collective;
} Record;
typedef struct {
    Record *record;
    size_t count, capacity;
} Records;
static Records tags, times; // filled by CUPTI's callback, on whatever thread flushes
static size_t lost;

static void add(Records *r, Record x)
{
    if (r->count == r->capacity) {
        r->capacity = r->capacity ? 2 * r->capacity : 4096;
        r->record = xrealloc(r->record, r->capacity, sizeof *r->record);
    }
    r->record[r->count++] = x;
}

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *size, size_t *max_records)
{
    *size = BUFFER_BYTES;
    *buffer = xcalloc(BUFFER_BYTES, 1);
    *max_records = 0;
}

// Records of every kind begin alike; of later versions of a kind, fields before the new ones keep their
// places.
static void take_record(const CUpti_Activity *a)
{
    const CUpti_ActivityExternalCorrelation *x = (const void *)a;
    const CUpti_ActivityKernel9 *kernel = (const void *)a;
    const CUpti_ActivityMemcpy5 *copy = (const void *)a;
    const CUpti_ActivityMemset4 *fill = (const void *)a;
    switch (a->kind) {
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION:
        add(&tags, (Record){.call = x->correlationId, .tag = (int)x->externalId});
        break;
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
        add(&times, (Record){kernel->correlationId, 0, kernel->start, kernel->end,
                             !strncmp(kernel->name, "nccl", 4)});
        break;
    case CUPTI_ACTIVITY_KIND_MEMCPY:
        add(&times, (Record){copy->correlationId, 0, copy->start, copy->end, false});
        break;
    case CUPTI_ACTIVITY_KIND_MEMSET:
        add(&times, (Record){fill->correlationId, 0, fill->start, fill->end, false});
        break;
    default:
        break;
    }
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size,
                                 size_t valid)
{
    (void)size;
    CUpti_Activity *a = NULL;
    size_t dropped = 0;
    while (valid && cupti.next_record(buffer, valid, &a) == CUPTI_SUCCESS)
        take_record(a);
    if (cupti.dropped(context, stream, &dropped) == CUPTI_SUCCESS)
        lost += dropped;
    free(buffer);
}

// ---- the interface ----------------------------------------------------------------------------------------

bool trace_open(Error *e)
{
    char name[64];
    snprintf(name, sizeof name, "libcupti.so.%d", CUDA_VERSION / 1000);
    void *library = dlopen(name, RTLD_NOW);
    if (!library)
        return error_set(e, "CUPTI, which gives the times of kernels, is not to be had: %s", dlerror());
    if (!find_functions(library, e))
        return false;
    CUptiResult result = cupti.register_callbacks(give_buffer, take_buffer);
    return result == CUPTI_SUCCESS ||
           error_set(e, "CUPTI cannot trace (does another profiler?): %s", reason(result));
}

void trace_start(void)
{
    must(cupti.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "flush");
    tags.count = times.count = lost = 0;
    for (int i = 0; i < KINDS; i++)
        must(cupti.enable(kinds[i]), "enable");
}

void trace_enter(int tag, const char *name)
{
    nvtxRangePushA(name);
    if (tag >= 0)
        must(cupti.push(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, (uint64_t)tag), "tag");
}

void trace_leave(int tag)
{
    uint64_t popped;
    if (tag >= 0)
        must(cupti.pop(CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0, &popped), "tag");
    nvtxRangePop();
}

static int by_call(const void *a, const void *b)
{
    uint32_t x = ((const Record *)a)->call, y = ((const Record *)b)->call;
    return x < y ? -1 : x > y;
}

static int by_begin(const void *a, const void *b)
{
    uint64_t x = ((const Record *)a)->begin, y = ((const Record *)b)->begin;
    return x < y ? -1 : x > y;
}

static double busy_ms(bool collectives) // of times sorted by begin
{
    uint64_t busy = 0, until = 0;
    for (size_t i = 0; i < times.count; i++) {
        const Record *r = &times.record[i];
        if (r->collective && !collectives)
            continue;
        uint64_t from = r->begin > until ? r->begin : until;
        if (r->end > from) {
            busy += r->end - from;
            until = r->end;
        }
    }
    return 1e-6 * (double)busy;
}

double trace_stop(Stream s, double ms[TRACE_TAGS], double *exposed, double *span)
{
    stream_synchronize(s);
    must(cupti.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "flush");
    for (int i = 0; i < KINDS; i++)
        must(cupti.disable(kinds[i]), "disable");
    if (lost)
        note("CUPTI lost %zu records: the times of ops are too low", lost);
    memset(ms, 0, TRACE_TAGS * sizeof *ms);
    if (tags.count)
        qsort(tags.record, tags.count, sizeof *tags.record, by_call);
    for (size_t i = 0; i < times.count; i++) {
        const Record *found =
            tags.count ? bsearch(&times.record[i], tags.record, tags.count, sizeof *tags.record, by_call)
                       : NULL;
        ms[found ? found->tag : TRACE_TAGS - 1] +=
            1e-6 * (double)(times.record[i].end - times.record[i].begin);
    }
    if (times.count)
        qsort(times.record, times.count, sizeof *times.record, by_begin);
    double all = busy_ms(true);
    uint64_t last = 0;
    for (size_t i = 0; i < times.count; i++)
        last = times.record[i].end > last ? times.record[i].end : last;
    *span = times.count ? 1e-6 * (double)(last - times.record[0].begin) : 0;
    *exposed = all - busy_ms(false);
    return all;
}

#else // nothing is traced, after one line that says why; ranges have their names all the same

bool trace_open(Error *e)
{
    return error_set(
        e, "this program was built without CUPTI (CUDA 13 or later), which gives the times of kernels");
}

void trace_start(void) { assert(!"trace_open refused"); }
double trace_stop(Stream s, double ms[TRACE_TAGS], double *exposed, double *span)
{
    assert(!"trace_open refused" && s && ms && exposed && span);
    return 0;
}

void trace_enter(int tag, const char *name)
{
    (void)tag;
    nvtxRangePushA(name);
}

void trace_leave(int tag)
{
    (void)tag;
    nvtxRangePop();
}
#endif
