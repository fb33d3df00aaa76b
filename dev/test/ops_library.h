// One build of the CPU backend as a library that is opened beside the CUDA one. Before this file: OPS(X), the
// ops that the test calls.
#pragma once
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>

typedef struct {
#define X(f) __typeof__(&f) f;
    OPS(X)
#undef X
} Ops;

static bool load_ops(Ops *o, const char *directory, const char *file) // directory: "" when file is a path
{
    char path[4096];
    snprintf(path, sizeof path, "%s%s%s", directory, *directory ? "/" : "", file);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s; make test-gpu builds it\n", dlerror());
        return false;
    }
#define X(f) \
    *(void **)&o->f = dlsym(library, #f); \
    if (!o->f) \
        return fprintf(stderr, "%s has no %s\n", path, #f), false;
    OPS(X)
#undef X
    return true;
}
