// The network of the records of summer 2026 in bf16, forward and backward.
#include "dev/test/golden_2026_check.h"

int main(void)
{
    check_golden_2026();
    return tap_done();
}
