// Stands in for NVML, the library that tells a GPU's energy: 100 W, and a microjoule for each graph that
// no_gpu.so has launched. The counter moves every NO_GPU_COUNTER seconds, 0.02 by default.
#include <stdlib.h>
#include <time.h>

extern unsigned long long no_gpu_graph_launches;

int nvmlInit_v2(void);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device);
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mJ);

int nvmlInit_v2(void) { return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device)
{
    *device = (void *)bus;
    return 0;
}

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mJ)
{
    static double moved;
    static unsigned long long shown;
    const char *every = getenv("NO_GPU_COUNTER");
    struct timespec now;
    (void)device;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    if (seconds - moved >= (every ? atof(every) : 0.02)) {
        shown = (unsigned long long)(1e3 * (100 * seconds + 1e-6 * (double)no_gpu_graph_launches));
        moved = seconds;
    }
    *mJ = shown;
    return 0;
}
