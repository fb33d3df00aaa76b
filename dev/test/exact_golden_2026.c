// The network of the records of summer 2026 in fp32, forward and backward.
#include "dev/test/golden_2026_check.h"

// The codes of h and of c_fc are the only roundings, and the file's values are not near the border between
// two (dev/reference/make_golden_2026_05.py): the losses and gradients are those of the same codes.
static void check_up_alone(void)
{
    double loss[2];
    golden_2026_open_85(&g, "fp8");
    SafeTensors *st = golden_2026_file(&g, "fp8-gradients");
    float *want = read_golden(st, "loss", NULL);
    g.model.params.tied = false;
    golden_2026_weights(&g);
    golden_2026_gradients(&g, 0, loss);
    for (int i = 0; i < 2; i++)
        ok_at_most(fabs(loss[i] - want[i]) / want[i], loss_limit, "MLP up alone in FP8: loss");
    ok(!g.model.mlp.sets && !record_scales_are_state(&g.config), "it has no delayed scales");
    check_gradients_of(st, false);
    free(want);
    golden_2026_close(&g);
    safetensors_close(st);
}

int main(void)
{
    comm_open(); // one rank
    check_golden_2026("toy-2026", "2026");
    check_golden_2026("toy-2026-08", "2026-08");
    check_golden_2026("2026-05-27", "2026-05-27");
    check_up_alone();
    return tap_done();
}
