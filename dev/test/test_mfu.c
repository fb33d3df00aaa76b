// FLOPs of a token, counted by hand for the record's network, and the GPUs whose peak is known.
#include "dev/test/tap.h"
#include "llmc/run/mfu.h"
#include <stdlib.h>
#include <string.h>

static double flops(const char *name, int step)
{
    Config c;
    Params p;
    Error e;
    char *argv[] = {"train_gpt", "--preset", (char *)name, "--vocab-size", "50257"};
    if (!config_parse(&c, 5, argv, &e))
        fatal(EXIT_USAGE, "%s", e.text);
    params_describe(&p, &c);
    return mfu_flops_per_token(&p, &c, step);
}

int main(void)
{
    // 10 layers of attention (q, k, v, o of 768 x 768), 11 of MLP (two of 768 x 3072), the head; windows: 2
    // long, 8 short.
    double matrices = 10.0 * 4 * 768 * 768 + 11.0 * 2 * 768 * 3072 + 50257.0 * 768;
    ok(flops("2025-10-27", 0) == 6 * matrices + 12.0 * 768 * (2 * 384 + 8 * 128),
       "a token at window 3: %.0f FLOPs", flops("2025-10-27", 0));
    ok(flops("2025-10-27", 2000) == 6 * matrices + 12.0 * 768 * (2 * 1408 + 8 * 640), "at window 11: %.0f",
       flops("2025-10-27", 2000));
    ok(flops("2025-11-18", 0) == flops("2025-10-27", 0), "skips cost nothing");

    static const struct {
        const char *name;
        double tflops;
    } gpus[] = {{"NVIDIA H100 80GB HBM3", 989},
                {"NVIDIA H200", 989},
                {"NVIDIA H100 PCIe", 756},
                {"NVIDIA H200 NVL", 835},
                {"NVIDIA GH200 480GB", 989},
                {"NVIDIA A100-SXM4-80GB", 312},
                {"NVIDIA B200", 2250},
                {"NVIDIA GB200", 2500},
                {"NVIDIA GeForce RTX 4090", 165.2},
                {"NVIDIA RTX A4000", 0},
                {"Tesla T4", 0}};
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++) {
        double peak = mfu_peak_flops(gpus[i].name) / 1e12;
        ok(peak == gpus[i].tflops, "%s: %g TFLOP/s", gpus[i].name, peak);
    }
    ok(mfu_peak_flops(NULL) == 0, "a CPU has none");
    return tap_done();
}
