// Opening the device, and what it can do. A program may hold machine code for several GPUs, and a GPU takes
// the best that fits it:
// what counts is not only the device but also the code that it chose, so a kernel tells for which
// architecture it was compiled.
#include "llmc/cuda/device/cuda_common.cuh"
#include <string.h>

enum { FIRST_WITH_BULK_COPIES = 900, FIRST_WITH_FP8 = 89, HOPPER = 90, GEFORCE_BLACKWELL = 120 };

// code[0]: __CUDA_ARCH__ of the code that runs here; code[1]: it may use the instructions of sm_90a.
__global__ void device_probe_kernel(int *code)
{
#ifdef __CUDA_ARCH__
    code[0] = __CUDA_ARCH__;
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    code[1] = 1;
#else
    code[1] = 0;
#endif
}

// ---- errors -----------------------------------------------------------------------------------------------

// After these the context is lost: every later call gives the same error.
static bool is_device_failure(cudaError_t status)
{
    switch (status) {
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorDevicesUnavailable:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
#if CUDART_VERSION >= 13000
    case cudaErrorContained:
#endif
    case cudaErrorUnknown:
        return true;
    default:
        return false;
    }
}

void cuda_failed(cudaError_t status, const char *call, const char *file, int line)
{
    const char *text = cudaGetErrorString(status), *name = cudaGetErrorName(status);
    if (!is_device_failure(status))
        fatal(EXIT_BAD_INPUT, "CUDA: %s at %s:%d: %s (%s)", call, file, line, text, name);
    fatal(EXIT_DEVICE,
          "the GPU failed: %s (%s). Work is asynchronous: %s at %s:%d noticed it, the cause is one of the "
          "launches before; "
          "CUDA_LAUNCH_BLOCKING=1 shows which. Hardware faults are in dmesg (Xid); --resume goes on from the "
          "last checkpoint",
          text, name, call, file, line);
}

void device_check_failure(const char *call, const char *file, int line)
{
    cudaError_t status = cudaStreamQuery(NULL);
    if (is_device_failure(status))
        cuda_failed(status, call, file, line);
}

bool allow_shared_memory(const void *kernel, size_t bytes)
{
    cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (status == cudaErrorInvalidValue) {
        cudaGetLastError();
        return false;
    }
    CUDA_CHECK(status);
    return true;
}

// ---- the device -------------------------------------------------------------------------------------------

// What a build for exactly this device is called: "80", "90a".
static const char *architecture(const DeviceState *s)
{
    static char text[16];
    snprintf(text, sizeof text, "%d%s", s->compute, s->compute >= HOPPER ? "a" : "");
    return text;
}

static void probe_code(DeviceState *s)
{
    int code[2] = {0, 0}, *device_code;
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, (const void *)device_probe_kernel) != cudaSuccess)
        fatal(EXIT_BAD_INPUT,
              "%s is compute capability %d.%d, for which this program was not built: rebuild with make "
              "GPU_ARCH=%s",
              s->name, s->compute / 10, s->compute % 10, architecture(s));
    CUDA_CHECK(cudaMalloc(&device_code, sizeof code));
    device_probe_kernel<<<1, 1>>>(device_code);
    CHECK_LAUNCH();
    CUDA_CHECK(cudaMemcpy(code, device_code, sizeof code, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaFree(device_code));
    s->code = code[0];
    s->wgmma_code = code[1];
    if (s->compute == HOPPER && !s->wgmma_code)
        note("built without the instructions of sm_90a: slower kernels than this GPU could run; rebuild with "
             "make GPU_ARCH=90a");
}

// The runtime says "insufficient driver" of one that is older than itself, and where there is none at all.
// Within a major version of CUDA a driver as old as its first release will do.
static void refuse_driver(void)
{
    const int major = CUDART_VERSION / 1000, minor = CUDART_VERSION % 1000 / 10;
    const char *needed = major == 12 ? "525" : major == 13 ? "580" : "that of its first release";
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
        fatal(EXIT_BAD_INPUT,
              "no NVIDIA driver here: install one (for CUDA %d: %s or later), or run the CPU program", major,
              needed);
    fatal(
        EXIT_BAD_INPUT,
        "the NVIDIA driver is too old: it supports CUDA up to %d.%d, this program was built with CUDA %d.%d: "
        "update the driver (to %s or later), or rebuild with a toolkit of CUDA %d (12.4 or later)",
        driver / 1000, driver % 1000 / 10, major, minor, needed, driver / 1000);
}

void device_open(DeviceState *s, int index)
{
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver)
        refuse_driver();
    if (status != cudaSuccess || count == 0)
        fatal(EXIT_BAD_INPUT, "no CUDA device (%s): check the driver with nvidia-smi, or run the CPU program",
              cudaGetErrorString(status));
    if (index < 0 || index >= count)
        fatal(EXIT_BAD_INPUT, "device %d does not exist: this machine has %d (0 to %d)", index, count,
              count - 1);
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, index));
    CUDA_CHECK(cudaSetDevice(index));
    s->index = index;
    s->sms = p.multiProcessorCount;
    s->compute = 10 * p.major + p.minor;
    s->shared_block = p.sharedMemPerBlockOptin;
    snprintf(s->name, sizeof s->name, "%s", p.name);
    probe_code(s);
    s->open = true;
}

void device_set_portable(bool portable) { device_state.portable = portable; }
bool device_is_portable(void) { return device_state.portable; }
bool device_has_wgmma(void) { return device_state.wgmma_code && !device_state.portable; }
void device_leave_wgmma(const char *why)
{
    device_state.wgmma_code = false;
    device_state.left = why;
    note("%s: slower kernels than this GPU could run", why);
}

bool device_has_bulk_copies(void)
{
    return device_state.code >= FIRST_WITH_BULK_COPIES && !device_state.portable;
}

// Compute capability whose kernels are taken.
static int compute_taken(void)
{
    int as = device_state.sizes.as_compute;
    return as ? as : device_state.compute;
}

bool device_has_fp8(void) { return compute_taken() >= FIRST_WITH_FP8; }
bool device_library_uses_mma(void)
{
    int compute = compute_taken();
    return !device_has_wgmma() && (compute < HOPPER || compute >= GEFORCE_BLACKWELL);
}
bool device_has_fp8_mma(void)
{
    return device_library_uses_mma() && device_has_fp8() && device_state.code >= 10 * FIRST_WITH_FP8;
}

const char *device_path(void)
{
    static char text[160];
    const DeviceState *s = &device_state;
    if (device_has_wgmma())
        return "kernels for Hopper (wgmma, TMA)";
    if (s->portable)
        return "portable kernels (--portable)";
    if (s->left) {
        snprintf(text, sizeof text, "portable kernels (%s)", s->left);
        return text;
    }
    if (s->compute == HOPPER)
        return "portable kernels (built without sm_90a)";
    snprintf(text, sizeof text, "portable kernels (compute capability %d.%d has no wgmma)%s", s->compute / 10,
             s->compute % 10, device_has_bulk_copies() ? ", rows by bulk copies" : "");
    return text;
}
