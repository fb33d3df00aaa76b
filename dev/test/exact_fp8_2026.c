// The MLP in FP8 with delayed scales over six steps of the network of summer 2026, fp32 build.
#include "dev/test/fp8_steps_2026.h"

int main(void)
{
    PART(check_fp8_2026());
    return tap_done();
}
