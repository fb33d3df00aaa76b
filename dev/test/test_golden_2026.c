// The network of the records of summer 2026 in bf16, forward and backward.
#include "dev/test/golden_2026_check.h"

int main(void)
{
    comm_open(); // one rank
    check_golden_2026("toy-2026", "2026");
    check_golden_2026("toy-2026-08", "2026-08");
    check_golden_2026("2026-05-27", "2026-05-27");
    return tap_done();
}
