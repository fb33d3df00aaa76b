// Six steps with FP8 in both directions, bf16 build.
#include "dev/test/fp8_both_steps.h"

int main(void)
{
    PART(check_fp8_both_2026());
    return tap_done();
}
