// Energy of this process's GPU from NVML, the driver's library, opened at run time: no header and no package
// is needed.
#include "llmc/ops/backend.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <math.h>

static struct {
    bool sought;
    void *device;                                       // nvmlDevice_t; NULL: there is no counter
    int (*total)(void *device, unsigned long long *mJ); // nvmlDeviceGetTotalEnergyConsumption
} counter;

static void find_counter(void)
{
    int index;
    char bus[32];
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    counter.sought = true;
    if (!nvml)
        return;
    int (*init)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*find)(const char *, void **) =
        (int (*)(const char *, void **))dlsym(nvml, "nvmlDeviceGetHandleByPciBusId_v2");
    *(void **)&counter.total = dlsym(nvml, "nvmlDeviceGetTotalEnergyConsumption");
    if (!init || !find || !counter.total || cudaGetDevice(&index) != cudaSuccess ||
        cudaDeviceGetPCIBusId(bus, sizeof bus, index) != cudaSuccess || init() || find(bus, &counter.device))
        counter.device = NULL;
}

double backend_energy(void)
{
    unsigned long long mJ = 0;
    if (!counter.sought)
        find_counter();
    return counter.device && counter.total(counter.device, &mJ) == 0 ? 1e-3 * (double)mJ : NAN;
}
