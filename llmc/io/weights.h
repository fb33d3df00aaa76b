// The weights in a safetensors file, under the names, shapes and orientation of the public checkpoint layout
// (FileSpec in records/record.h): tables and gates BF16 (F32 from the exact build), matrices and scalars F32,
// signs BF16. A tensor of a file may hold several parameters; its matrices that are none of them are zero
// where they are written, and are not read.
#pragma once
#include "llmc/io/safetensors.h"
#include "llmc/run/trainer.h"

// A tensor of a file.
typedef struct {
    const char *name;
    const ParamSpec *spec; // of a row that it holds
    int ndim;
    int64_t shape[FILE_DIMS];
    int64_t matrix;   // elements
    int64_t matrices; // in all
} FileTensor;
// That of a parameter. With a %d in the row's name it holds this parameter alone.
FileTensor weights_tensor(const Config *c, const Param *a);

// Whether every parameter has matrices of a file's tensor for itself: else a checkpoint would lose its
// values.
bool weights_check(const Params *p, const Config *c, Error *e);
void weights_declare(const Trainer *t, SafeWriter *w);
int64_t weights_bytes(const Trainer *t); // of what it declares
// Collective. Brings every rank's parameters to rank 0 and writes them there; w is NULL elsewhere. The
// weights of all ranks are complete.
bool weights_write(Trainer *t, SafeWriter *w, Error *e);
// Every rank reads all of them. A parameter that is one with another for now must be equal in the file.
bool weights_read(Trainer *t, const SafeTensors *st, Error *e);

static inline size_t element_bytes(bool half) { return half ? sizeof(floatX) : sizeof(float); }
SafeDtype element_dtype(bool half);
// The name of a tensor in the file: that of a model under torch.compile has a prefix. Owned by the caller.
char *name_in_file(const SafeTensors *st, const char *name);
// Elements [first, first + count) of a tensor of BF16 or F32, as floatX when half, else fp32.
//   host (count floats) out
bool read_elements(const SafeTensors *st, const char *name, int64_t first, int64_t count, bool half,
                   void *host, Error *e);
