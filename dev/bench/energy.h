// Energy of a GPU from NVML, the library of its driver, opened at run time: no header and no package is
// needed.
#pragma once
#include "llmc/base/common.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>

typedef struct {
    void *device;                                       // nvmlDevice_t
    int (*total)(void *device, unsigned long long *mJ); // nvmlDeviceGetTotalEnergyConsumption
} EnergyCounter;

// Two readings of the counter, which moves every 20 to 100 ms: only moments at which it has moved are taken.
typedef struct {
    double first_s, last_s;
    unsigned long long first_mJ, last_mJ, seen_mJ;
    int edges;
} EnergySpan;

static unsigned long long energy_read(const EnergyCounter *c)
{
    unsigned long long mJ = 0;
    int status = c->total(c->device, &mJ);
    if (status)
        fatal(EXIT_DEVICE, "NVML gives no energy (status %d): GPUs before Volta have no counter", status);
    return mJ;
}

// The counter of the device that CUDA calls 0. Fatal without NVML.
static EnergyCounter energy_open(void)
{
    EnergyCounter c = {0};
    char bus[32];
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml)
        fatal(EXIT_DEVICE, "libnvidia-ml.so.1 is missing: it comes with the driver");
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*find)(const char *, void **) =
        (int (*)(const char *, void **))dlsym(nvml, "nvmlDeviceGetHandleByPciBusId_v2");
    *(void **)&c.total = dlsym(nvml, "nvmlDeviceGetTotalEnergyConsumption");
    if (!init || !find || !c.total)
        fatal(EXIT_DEVICE, "libnvidia-ml.so.1 has no energy counter: a newer driver is needed");
    if (cudaDeviceGetPCIBusId(bus, sizeof bus, 0) != cudaSuccess || init() || find(bus, &c.device))
        fatal(EXIT_DEVICE, "NVML does not know the GPU");
    return c;
}

static void energy_poll(const EnergyCounter *c, EnergySpan *span)
{
    unsigned long long mJ = energy_read(c);
    double now = seconds_now();
    if (!span->edges || mJ == span->seen_mJ) {
        span->edges += !span->edges;
        span->seen_mJ = mJ;
        return;
    }
    span->seen_mJ = mJ;
    if (span->edges++ == 1) {
        span->first_s = now;
        span->first_mJ = mJ;
    }
    span->last_s = now;
    span->last_mJ = mJ;
}

// Mean power in watts. Fatal if the counter moved less than three times.
static double energy_watts(const EnergySpan *span)
{
    if (span->edges < 4)
        fatal(EXIT_USAGE, "the energy counter moved %d times only: ask for more seconds", span->edges - 1);
    return (double)(span->last_mJ - span->first_mJ) * 1e-3 / (span->last_s - span->first_s);
}
