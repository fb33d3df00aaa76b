// Newton-Schulz orthogonalisation: the polar factor of a batch of matrices by an odd polynomial iteration.
//
//   X = U / norm;  then for each tuple (a, b, c):  X <- a X + (b A + c A^2) X,  A = X X^T
//
// Standard form: as written. Gram form (Gram Newton-Schulz): the same map carried on in the n x n matrices R
// = X X^T and Q, with X touched at the start, at restarts and at the end only. AOL ("Turbo"): rows are scaled
// by their almost-orthogonal bound instead of by the Frobenius norm, which saves the first tuple but computes
// polar(diag(s) U). All run on the primitives of llmc/ops/ns_ops.h and allocate nothing. Sources of the
// coefficients: ns_options.c.
#pragma once
#include "llmc/base/common.h"
#include "llmc/ops/ns_ops.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    double a, b, c; // x -> a x + b x^3 + c x^5
} NsTuple;

typedef enum { NS_KJ, NS_YOU, NS_POLAR, NS_GRAM, NS_TURBO, NS_TURBO_GRAM, NS_VARIANTS } NsVariant;

typedef struct {
    bool gram;        // Gram form
    bool aol;         // AOL row scaling in place of the Frobenius norm; kappa and eps are not used then
    bool fallback;    // Gram form: the standard form takes its place where it is cheaper: squares, and what
                      // ns_iterate does
    float aol_gain;   // over-drives the AOL scale: singular values start in (0, aol_gain]
    float kappa, eps; // X = U / (kappa |U|_F + eps)
    NsDtype dtype;    // of the iteration and of the result
    int steps;
    NsTuple tuples[NS_MAX_STEPS];
    uint32_t restarts; // Gram form: bit i set = X and R are rebuilt after i iterations
} NsOptions;

// ---- options ----------------------------------------------------------------------------------------------

// kj, you: standard form with these tuples; polar: standard form, Polar Express tuples; gram: Gram form of
// polar, restart 2; turbo: AOL and the last 4 polar tuples; turbo-gram: Gram form of turbo. dtype: bf16, Gram
// forms fp16, in the exact build fp32. Restarts: the defaults are the usual choice. Where half of the
// spectrum is flat and the rest zero they err by 10-20 % (singular values up to 1.3-1.5). There restart 3 for
// gram, at no cost, and 2 for turbo-gram, two large products more, err by 1-3 %.
//
// What the user wrote; NULL, "" and "auto" (0 for numbers) stand for the variant's default.
typedef struct {
    const char *variant;      // name, see above
    const char *coefficients; // kj, you, polar, dao, ga, hybrid; or tuples "a,b,c;a,b,c;..."
    const char *restarts;     // "none", "2" or "1,3": after so many iterations
    const char *dtype;        // bf16, fp16, fp32
    int steps;                // the first tuples, with AOL the last; beyond the set its last tuple repeats
    float aol_gain;
} NsText;

// Fills *o; false with one line in *e for an unknown name, a malformed list, a restart outside of the
// iterations, or tuples that blow up for an input that the normalisation lets through.
bool ns_options_parse(NsOptions *o, const NsText *text, Error *e);

const char *ns_variant_name(NsVariant variant);
const char *ns_dtype_name(NsDtype dtype);
char *ns_describe(const NsOptions *o);      // one line for the log; owned by the caller
const char *ns_caution(const NsOptions *o); // why this valid choice is known to be inaccurate, or NULL

// ---- coefficients -----------------------------------------------------------------------------------------

// What the iteration makes of the singular value x (after normalisation).
double ns_scalar_map(const NsTuple *tuples, int steps, double x);

// ---- the iteration ----------------------------------------------------------------------------------------

// Bytes of device memory that newton_schulz() needs for these arguments.
size_t ns_workspace_bytes(const NsOptions *o, int rows, int cols, int batch);

// Matrices (rows, cols) fp32 on the device, each packed: the i-th begins at u + (i / group) group_stride +
// (i % group) stride elements; group 0: at u + i stride.
typedef struct {
    const float *u;
    int rows, cols, batch;
    int64_t stride;
    int group;
    int64_t group_stride;
} NsInput;

// Orthogonalises matrices of equal shape; any shape from 1 x 1 on, zero matrices give zeros, batch 0 does
// nothing.
//   workspace ns_workspace_bytes(), device, aligned to 256 bytes
//   returns   (batch, rows, cols) packed in o->dtype, inside the workspace: valid until the workspace is used
//             again
void *newton_schulz(Stream s, const NsOptions *o, const NsInput *in, void *workspace);

#ifdef __cplusplus
}
#endif
