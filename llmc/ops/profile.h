// What every op of a training step costs: calls, time on the device, and how near it comes to what the
// machine can do.
//
// The first line of every op names it and says what it must at least do (costs.h). Off, that costs a few
// nanoseconds an op. On, the tracer of the backend takes the time.
#pragma once
#include "llmc/ops/backend.h"
#ifdef __cplusplus
extern "C" {
#endif

// ---- the first line of every op ---------------------------------------------------------------------------

// flops: multiplications and additions that the op cannot do without; bytes: each input read once, each
// output written once. Either may be 0: not counted.
typedef struct {
    double flops, bytes;
} OpCost;

// OP_SCOPE(op, arguments of cost_op): the op lasts from here to the end of its function. Ops that are called
// by other ops belong to the outer one.
#define OP_SCOPE(op, ...) \
    __attribute__((cleanup(profile_leave), unused)) int op_scope = profile_enter(#op, cost_##op(__VA_ARGS__))
// Of an op that may run together with others: what it must do is counted to the op that it is called by.
#define OP_PART(op, ...) profile_count(cost_##op(__VA_ARGS__))

int profile_enter(const char *name, OpCost cost); // static text, the same pointer for the same op
void profile_leave(int *scope);
void profile_count(OpCost cost);

// The micro-batch whose ops come next. What attention and the embeddings do depends on it, and to the ops it
// is known on the device alone.  cu_seqlens host: rises from 0 to N; rows of tables by token and by pair
void profile_batch(const int32_t *cu_seqlens, int N, int token_rows, int pair_rows);
// (query, key) pairs that attention sees: j <= i, same document, i - j <= window. rows: of the sequence as
// attention takes it; a multiple of N when each token is several rows.
double profile_pairs(int rows, int window);
double profile_token_rows(void);
double profile_pair_rows(void);

// ---- for the program --------------------------------------------------------------------------------------

// Once, before the device is opened. False, with the reason, where this program or machine cannot trace.
bool profile_open(Error *e);

// Counts and times are cleared, and taken from now on until profile_stop, which waits for the stream.
void profile_start(void);
void profile_stop(Stream s);
double profile_device_ms(void); // sum of kernels, copies and fills between the two, inside and outside of ops
double profile_busy_ms(void); // the time in which at least one of them ran: one may begin while another ends
double profile_span_ms(void); // from the begin of the first to the end of the last
double profile_exposed_ms(void); // of it, the time in which nothing but collectives between ranks ran

// Measures what the machine can do: a large copy (bytes read and written a second), and a product of floatX
// matrices (operations a second).  memory: `bytes` of device memory, overwritten
typedef struct {
    double copy, product;
} Ceilings;
Ceilings profile_ceilings(Stream s, void *memory, size_t bytes);

// One line of the table of what was taken between the last start and stop, by falling time; owned by the
// caller, NULL after the last. steps: that the ops are of.
char *profile_line(int index, int steps, const Ceilings *c);

// ---- energy -----------------------------------------------------------------------------------------------

// Between the two calls each op is captured as a graph and not run. Only on a backend that has graphs.
void profile_record(Stream s);
void profile_record_stop(void);
// Launches the recorded ops of each name again and again for so many seconds, and frees their graphs. The
// device memory that they write is of no use afterwards: gradients are added to each time. Ops that share
// memory read what others left there, not the values of a step; the power depends on values a little.
void profile_energy(Stream s, double seconds);
// One line of its table: energies less that of the idle device, the largest first. Owned by the caller, NULL
// after the last.
char *profile_energy_line(int index);

// ---- what a backend provides ------------------------------------------------------------------------------

// Time on the device by tag: the number of the op, from 0; TRACE_TAGS - 1 is what runs outside of any op, as
// in a captured graph. An op is entered and left also when nothing is traced, with tag -1: a backend may tell
// other tools its name.
enum { TRACE_TAGS = 64 };
bool trace_open(Error *e);
void trace_start(void);
void trace_enter(int tag, const char *name);
void trace_leave(int tag);
// Returns the time in which anything ran, ms; exposed: of it, the time in which nothing but collectives did;
// span: from the begin of the first to the end of the last.
double trace_stop(Stream s, double ms[TRACE_TAGS], double *exposed, double *span);

#ifdef __cplusplus
}
#endif
