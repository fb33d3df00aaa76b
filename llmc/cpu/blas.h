// OpenBLAS, loaded when the first product is computed: linked, it would allocate before main, and where the
// address space is limited (ulimit -v) its allocator tries for ever.
#pragma once
#ifdef HAVE_OPENBLAS
#include <cblas.h>

typedef struct {
    __typeof__(cblas_sgemm) *sgemm;
    __typeof__(cblas_dgemm) *dgemm;
    __typeof__(openblas_get_config) *config;
    __typeof__(openblas_get_corename) *corename;
} Blas;

// On one thread of its own: the ops are the parallelism. Call it outside of a parallel region first; from
// then on its products may be computed by as many threads at once as OpenMP had at that call. Ends the
// program with one line when the library cannot be loaded, or when there is no room for the buffer that each
// thread needs.
const Blas *blas(void);
#endif
