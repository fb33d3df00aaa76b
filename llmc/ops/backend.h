// Contracts: device, memory, streams, graphs. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/common.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *Stream; // the CPU backend ignores it

// Whose attention kernels: the fastest that are right here; cuDNN's; the program's own. The CPU has one kind.
typedef enum { ATTENTION_AUTO, ATTENTION_CUDNN, ATTENTION_OWN } AttentionKernels;

// Whether the backend compares its kernels with others before the first op; auto: unless they passed before.
typedef enum { SELF_CHECK_NEVER, SELF_CHECK_AUTO, SELF_CHECK_ALWAYS } SelfCheck;

enum { SMALLER_SIZES = 4 };

typedef struct {
    int tokens;                 // largest N of a training micro-batch
    int smaller[SMALLER_SIZES]; // others, whose products are to be timed at the start, too; 0: no more
    int eval_tokens;            // largest N of a forward-only sequence
    int dim, heads, mlp_dim, vocab_padded;
    int key_dim;       // width of q and of k, with fp8_qkv
    int max_documents; // most documents in one packed sequence, 0: no limit known
    int reach;         // of attention's backward pass: most rows from a query back to a key that it sees, the
                       // shorter of window and document; 0: no limit known
    bool fp8_head, fp8_mlp, fp8_qkv;
    bool fp8_weight_grads; // matmul_fp8_weight_grads is called: of the MLP with fp8_mlp, of q, k and v
    bool sdpa_alone;       // attention_forward is not called, so that cuDNN's kernels have no use
    bool deterministic;    // attention backward with a fixed order of sums; see ops.h
    bool portable;         // only kernels that every supported GPU runs; and FP8 units where there are any
    int as_compute; // with `portable`, for tests: kernels for GPUs of this compute capability (80: no FP8
                    // units; 89: FP8 by mma.sync); 0: the device's own
    AttentionKernels attention;
    SelfCheck self_check;
    double
        wait_limit; // seconds; the program ends when the host has waited longer for the device. 0: no limit
} OpSizes;

// Whether sdpa takes heads of q and k of width qk beside those of v of width e. The CPU: qk up to e.
bool backend_takes_heads(int qk, int e);

// First of all in main: may start the program anew (same arguments) with the environment that the backend's
// libraries need.
void backend_prepare_process(char **argv);
int backend_device_count(void); // 0 when there is none or it cannot be asked; the CPU counts as one
// Takes device `index` (ignored on the CPU) and its handles. Fatal, with the reason, when there is none.
void backend_open(int index);
// Scratch memory and plans for all ops up to these sizes. Call once, before any op.
void backend_reserve(const OpSizes *sizes);
void backend_close(void);
const char *backend_device_name(void); // of a GPU, as the driver has it; NULL: a CPU
// Joules that the device has taken since some moment, of a counter that moves every 0.02 to 0.1 s; NaN: it
// has none.
double backend_energy(void);
bool backend_is_asynchronous(void); // ops are still running when they return
const char *
backend_description(void); // one line: device, threads, libraries and their versions, paths taken and why
// Version lines for the log header, one by one from index 0; NULL after the last.
const char *backend_version_line(int index);

// Zeroed; fatal with `what` and the size when memory is short. what: "class: detail", or the class alone; see
// llmc/base/memory.h.
void *device_alloc(size_t bytes, const char *what);
void device_free(void *p);
size_t device_bytes_allocated(void); // now, by device_alloc and backend_reserve together
size_t device_bytes_peak(void);
// The most that was in use on the device whenever this was called: contexts, the libraries' own memory,
// graphs, and what other programs use there, beside what device_alloc gave. On the CPU device_bytes_peak().
size_t device_bytes_in_use(void);
size_t device_bytes_free(void); // of the device, for any program; on the CPU SIZE_MAX: it is not limited
void *host_alloc(size_t bytes); // zeroed host memory from which copies run asynchronously
void host_free(void *p);

Stream stream_create(void);
Stream stream_create_urgent(void); // its kernels go before those of other streams, also in a graph
void stream_destroy(Stream s);
void stream_synchronize(Stream s);
void copy_to_device(Stream s, void *dst, const void *host_src, size_t bytes);
void copy_to_host(Stream s, void *host_dst, const void *src, size_t bytes); // valid after stream_synchronize
void copy_on_device(Stream s, void *dst, const void *src, size_t bytes);
void device_zero(Stream s, void *p, size_t bytes);

// Marks in a stream's work that the host, or another stream, can wait for. A few are enough: recording again
// moves the mark.
typedef struct Event Event;
Event *event_create(void);
void event_record(Event *e, Stream s);
void event_synchronize(
    Event *e); // returns when all work queued before the mark is done; at once when never recorded
void stream_wait(
    Stream s,
    Event *e); // what is queued on s from here on runs after the mark; both may belong to one capture
void event_destroy(Event *e);

// Records the ops queued between begin and end instead of running them. The CPU has no graphs: begin returns
// false and the ops run at once.
typedef struct Graph Graph;
bool graph_begin(Stream s);
Graph *graph_end(Stream s);
void graph_launch(Graph *g, Stream s);
void graph_destroy(Graph *g);

#ifdef __cplusplus
}
#endif
